"""Where algorithms cross among 8 to 512 hosts, in the model of tests/support/hosts_model.py."""

import pytest

from mpistrat.core.tuning import EAGER_MESSAGE_BYTES

from ..support.hosts_model import Network, direct, ring, tree, wire

SLOW, FAST = Network(1.25e8, 60e-6), Network(3.1e9, 30e-6)  # 1 and 25 Gbit/s
COUNTS = [8, 32, 128, 512]
RESNET50 = 102e6


@pytest.mark.parametrize("hosts", [2, *COUNTS])
@pytest.mark.parametrize("network", [SLOW, FAST], ids=["1 Gbit/s", "25 Gbit/s"])
def test_nothing_is_faster_than_the_wire(network: Network, hosts: int) -> None:
    for nbytes in (1e3, 1e6, RESNET50):
        least = wire(network, hosts, nbytes)
        assert all(takes(network, hosts, nbytes) > least for takes in (direct, ring, tree)), nbytes


@pytest.mark.parametrize("hosts", COUNTS)
def test_over_a_slow_network_direct_exchange_takes_the_time_of_the_wire_for_any_number_of_hosts(hosts: int) -> None:
    least = wire(SLOW, hosts, RESNET50)
    assert direct(SLOW, hosts, RESNET50) < 1.01 * least < ring(SLOW, hosts, RESNET50)


def test_over_a_fast_network_many_hosts_want_chunks_of_whole_messages() -> None:
    for hosts in (8, 32):
        assert direct(FAST, hosts, RESNET50) < 1.02 * wire(FAST, hosts, RESNET50)
    for hosts in (128, 512):
        assert direct(FAST, hosts, RESNET50) > 1.3 * wire(FAST, hosts, RESNET50)
        assert direct(FAST, hosts, RESNET50, hosts * EAGER_MESSAGE_BYTES) < 1.05 * wire(FAST, hosts, RESNET50)


def test_small_arrays_are_for_direct_exchange_among_few_hosts_and_for_trees_among_many() -> None:
    assert direct(FAST, 8, 1024) < tree(FAST, 8, 1024) < ring(FAST, 8, 1024)
    for hosts in (128, 512):
        assert tree(FAST, hosts, 1024) < direct(FAST, hosts, 1024) < ring(FAST, hosts, 1024)
