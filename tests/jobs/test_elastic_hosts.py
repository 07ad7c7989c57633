"""Elastic jobs on two hosts: a rank, a whole host and the link between the hosts are lost."""

import re
import sys
import threading
from pathlib import Path

import pytest

from mpistrat.elastic.agent import HOST_LOST_AFTER_S

from ..support.hosts_in_namespaces import Hosts
from ..support.jobs import Finished, wait_until
from .test_elastic import SCRIPT, assert_whole


def elastic(hosts: Hosts, *script: str, options: tuple[str, ...] = ()) -> Finished:
    first, second = hosts.names
    return hosts.run_line([sys.executable, "-m", "mpistrat", "run", "--elastic", *options, "-np", "4", "-H",
                           f"{first}:2,{second}:2", "--", sys.executable, SCRIPT, *script])


def test_new_processes_go_on_when_a_rank_of_two_hosts_is_lost(hosts: Hosts) -> None:
    job = elastic(hosts, "--kill", "1:3:5:before")
    assert_whole(job, ranks=4, generation=2, most_twice=0)


@pytest.mark.nightly
def test_the_other_host_goes_on_from_its_own_commits(hosts: Hosts) -> None:
    job = elastic(hosts, "--kill", "1:2:5:host")
    assert_whole(job, ranks=2, generation=2, most_twice=4)
    assert f"{hosts.names[1]} is lost" in job.output


@pytest.mark.nightly
def test_a_host_that_returns_is_taken_in_again(hosts: Hosts) -> None:
    job = elastic(hosts, "--kill", "1:2:5:host", "--pause", "0.3", options=("--blacklist-cooldown-range", "1", "1"))
    assert_whole(job, ranks=4, generation=3, most_twice=6)
    assert f"{hosts.names[1]} is lost" in job.output
    assert "there is room for 4 ranks instead of 2" in job.output


@pytest.mark.nightly
def test_one_side_of_a_cut_link_goes_on_for_longer_than_the_other_one_is_left_out(hosts: Hosts) -> None:
    with hosts.mended_after():
        job = elastic(hosts, "--kill", "1:0:5:cut", "--pause", "0.2", options=("--blacklist-cooldown-range", "1", "1"))
    assert_whole(job, ranks=2, generation=2, most_twice=4)
    assert re.search(rf"{hosts.names[1]} is lost: no sign of life", job.output), job.output


@pytest.mark.nightly
def test_the_commits_of_the_only_host_outlive_a_link_that_is_cut_for_longer_than_it_is_left_out(
        hosts: Hosts, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def cut() -> None:
        wait_until(lambda: log.exists() and "step 5" in log.read_text(), 60)
        hosts.cut(HOST_LOST_AFTER_S + 8)

    cutting = threading.Thread(target=cut)
    with hosts.mended_after():
        cutting.start()
        job = hosts.run_line([sys.executable, "-m", "mpistrat", "run", "--blacklist-cooldown-range", "1", "1",
                              "--start-timeout", "1", "-np", "2", "-H", f"{hosts.names[1]}:2", "--", sys.executable,
                              SCRIPT, "--pause", "0.3", "--log", str(log)])
        cutting.join()
    # Several starts have started nobody.
    assert job.output.count(f"no rank has started on {hosts.names[1]}") > 1, job.output
    generation, = set(re.findall(r"rank \d: of 2, generation (\d+)", job.output))
    assert_whole(job, ranks=2, generation=int(generation), most_twice=0)
    assert "The commits there are kept" in job.output and "IS LOST" not in job.output, job.output
