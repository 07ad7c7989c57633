"""Elastic jobs on two hosts: a rank, a whole host and the link between the hosts are lost."""

import re
import sys
from collections.abc import Iterator

import pytest

from ..support.hosts_in_namespaces import Hosts, two_hosts
from ..support.jobs import Finished
from .test_elastic import SCRIPT, assert_whole
from .test_two_hosts import require_namespaces


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Two hosts."""
    require_namespaces()
    with two_hosts() as made:
        yield made


def elastic(hosts: Hosts, *script: str, options: tuple[str, ...] = ()) -> Finished:
    """Run the script with two ranks on each host."""
    first, second = hosts.names
    return hosts.run_line([sys.executable, "-m", "mpistrat", "run", "--elastic", *options, "-np", "4", "-H",
                           f"{first}:2,{second}:2", "--", sys.executable, SCRIPT, *script])


def test_new_processes_go_on_when_a_rank_of_two_hosts_is_lost(hosts: Hosts) -> None:
    job = elastic(hosts, "--kill", "1:3:5:before")
    assert_whole(job, ranks=4, generation=2, most_twice=0)


def test_the_other_host_goes_on_from_its_own_commits(hosts: Hosts) -> None:
    job = elastic(hosts, "--kill", "1:2:5:host")
    assert_whole(job, ranks=2, generation=2, most_twice=4)
    assert f"{hosts.names[1]} is lost" in job.output


def test_a_host_that_returns_is_taken_in_again(hosts: Hosts) -> None:
    job = elastic(hosts, "--kill", "1:2:5:host", "--pause", "0.3", options=("--blacklist-cooldown-range", "1", "1"))
    assert_whole(job, ranks=4, generation=3, most_twice=6)
    assert f"{hosts.names[1]} is lost" in job.output
    assert "there is room for 4 ranks instead of 2" in job.output


def test_one_side_of_a_cut_link_goes_on(hosts: Hosts) -> None:
    with hosts.mended_after():
        job = elastic(hosts, "--kill", "1:0:5:cut")
    assert_whole(job, ranks=2, generation=2, most_twice=4)
    assert re.search(rf"{hosts.names[1]} is lost: no sign of life", job.output), job.output
