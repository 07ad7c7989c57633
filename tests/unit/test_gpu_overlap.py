"""How much of the network's time a step hides behind the backward pass, in virtual time."""

import pytest

from mpistrat.gpu import executor
from tests.support import virtual_gpu

BACKWARD_S, BUCKETS = 0.065, 4


@pytest.fixture(autouse=True)
def _without_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "check_waiting", lambda device, buffer: None)


@pytest.mark.parametrize("collective_ms", [5, 10, 20])
def test_a_step_takes_as_long_as_the_longer_of_backward_pass_and_network(collective_ms: int) -> None:
    last_s = collective_ms / 1000
    found = virtual_gpu.seconds_of(virtual_gpu.held_back, last_s)
    assert found < 1.05 * (max(BACKWARD_S, BUCKETS * last_s) + last_s)
    assert found < virtual_gpu.seconds_of(virtual_gpu.at_once, last_s) - 2 * last_s


def test_nothing_is_lost_on_a_fast_network() -> None:
    found, before = (virtual_gpu.seconds_of(way, 0.3e-3) for way in (virtual_gpu.held_back, virtual_gpu.at_once))
    assert found <= before
