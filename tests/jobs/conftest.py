"""What all tests of jobs need."""

import signal
from collections.abc import Iterator

import pytest

from ..support.hosts_in_namespaces import Hosts, two_hosts
from ..support.jobs import find_mpirun, needs_mpirun


@pytest.fixture(scope="session", autouse=True)
def _jobs_can_start_and_be_interrupted() -> None:
    """A shell makes commands in the background ignore Ctrl-C, and what they start inherits that."""
    if find_mpirun() is None:
        pytest.skip(needs_mpirun.kwargs["reason"])
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made
