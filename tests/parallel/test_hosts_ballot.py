"""Votes between hosts: each process of this session is a host, whose ranks are objects in it that vote in turn."""

import mmap
import random
import time
from collections.abc import Iterator, Sequence

import pytest
from mpi4py import MPI

from mpistrat.collectives.base import Outcome
from mpistrat.collectives.hierarchical import counterparts
from mpistrat.collectives.host_memory import HostMemory
from mpistrat.collectives.hosts_ballot import HostsBallot
from mpistrat.topology import Topology

LIMIT_S = 30.0  # only a failing test waits for so long


class Host:
    """The ranks of this process.

    Args:
        sizes: How many ranks each host has.
        host: Which host this is.
    """

    def __init__(self, sizes: Sequence[int], host: int):
        self.size = sum(sizes)
        self.ranks = list(range(sum(sizes[:host]), sum(sizes[:host + 1])))
        self.roused: list[int] = []
        block = mmap.mmap(-1, HostMemory.size_for(len(self.ranks), 0))
        elsewhere = [rank for rank in range(self.size) if rank not in self.ranks]
        between = counterparts(MPI.COMM_WORLD, Topology(host, tuple(f"host {h}" for h in range(len(sizes)))))
        self.ballots = [HostsBallot(HostMemory(block, i, self.ranks), self.roused.append,
                                    between if i == 0 else MPI.COMM_NULL, elsewhere) for i in range(len(self.ranks))]

    def outcomes(self) -> list[Outcome]:
        """Of the round in which all ranks of all hosts have voted, or will."""
        found: dict[int, Outcome] = {}
        end = time.monotonic() + LIMIT_S
        while len(found) < len(self.ballots):
            assert time.monotonic() < end, f"the round does not end: {found}"
            for i, ballot in enumerate(self.ballots):
                outcome = ballot.outcome() if i not in found else None
                if outcome is not None:
                    found[i] = outcome
        return list(found.values())


@pytest.fixture(scope="module", params=[1, 3], ids=["one rank each", "up to three ranks"])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    """This process's host, of as many hosts as there are processes."""
    made = Host([1 + h % request.param for h in range(MPI.COMM_WORLD.Get_size())], MPI.COMM_WORLD.Get_rank())
    yield made
    for ballot in made.ballots:
        ballot.close()


@pytest.mark.parametrize("number", [1, 2**61 - 1])
@pytest.mark.parametrize("ready, expected", [(True, Outcome.ALL_READY), (False, Outcome.AGREED)])
def test_all_hosts_agree_on_what_all_vote_for(host: Host, number: int, ready: bool, expected: Outcome) -> None:
    for ballot in host.ballots:
        ballot.cast(number, ready)
    assert host.outcomes() == [expected] * len(host.ballots)
    assert not any(ballot.has_voted for ballot in host.ballots)


@pytest.mark.parametrize("differs", ["first rank", "last rank"])
@pytest.mark.parametrize("number", [0, 4, 6])
def test_one_rank_is_enough_to_refuse(host: Host, differs: str, number: int) -> None:
    different = 0 if differs == "first rank" else host.size - 1
    for rank, ballot in zip(host.ranks, host.ballots, strict=True):
        ballot.cast(number if rank == different else 5, is_ready=True)
    assert host.outcomes() == [Outcome.REFUSED] * len(host.ballots)


def test_one_rank_that_is_not_ready_is_enough(host: Host) -> None:
    for rank, ballot in zip(host.ranks, host.ballots, strict=True):
        ballot.cast(5, is_ready=rank != host.size - 1)
    assert host.outcomes() == [Outcome.AGREED] * len(host.ballots)


def test_hosts_come_to_the_same_outcomes_at_any_speed(host: Host) -> None:
    everywhere, here = random.Random(1), random.Random(host.ranks[0])
    for _ in range(200):
        votes = [everywhere.choice([3, 3, 3, 3, 3, 4]) for _ in range(host.size)]
        for rank, ballot in zip(host.ranks, host.ballots, strict=True):
            if here.random() < 0.05:
                time.sleep(0.001)
                assert ballot.outcome() is None
            ballot.cast(votes[rank])
        expected = Outcome.AGREED if len(set(votes)) == 1 else Outcome.REFUSED
        assert host.outcomes() == [expected] * len(host.ballots)


def test_who_has_not_voted_is_known_within_the_host(host: Host) -> None:
    assert host.ballots[0].missing() == host.ranks
    for ballot in host.ballots:
        ballot.cast(5)
    assert host.ballots[0].missing() == [rank for rank in range(host.size) if rank not in host.ranks]
    host.outcomes()


def test_the_first_rank_is_roused_by_votes_and_the_others_by_the_outcome(host: Host) -> None:
    host.roused.clear()
    for ballot in host.ballots:
        ballot.cast(5)
    votes = [host.ranks[0]] * (len(host.ranks) - 1)
    assert host.roused == votes
    host.outcomes()
    assert host.roused == votes + host.ranks[1:]
