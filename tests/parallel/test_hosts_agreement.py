"""Votes between hosts: each process of this session is a host, whose ranks are objects in it that vote in turn."""

import mmap
import random
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from mpi4py import MPI

from mpistrat.core.arithmetic import IDENTITY, Reduction, Scale
from mpistrat.core.interfaces import Outcome
from mpistrat.core.request import ReduceOp
from mpistrat.core.topology import Topology
from mpistrat.core.tuning import EAGER_MESSAGE_BYTES, PIGGYBACK_MOST_HOSTS
from mpistrat.transport.hierarchical import hosts_agreement
from mpistrat.transport.hierarchical.hosts_agreement import HierarchicalAgreement, Piggyback
from mpistrat.transport.mpi.mpi_data import MpiData
from mpistrat.transport.shm.segment import ASLEEP, HostMemory

from ..support.planes import waits

EACH = 4 * EAGER_MESSAGE_BYTES  # bytes that may go with a vote
LIMIT_S = 30.0  # only a failing test waits for so long


class Host:
    """The ranks of this process, on host number `host` of those with `sizes` ranks. Data may go with the votes."""

    def __init__(self, sizes: Sequence[int], host: int, has_piggyback: bool):
        self.size, self.sizes = sum(sizes), sizes
        self.ranks = list(range(sum(sizes[:host]), sum(sizes[:host + 1])))
        self.woken: list[int] = []
        count = len(self.ranks)
        block = mmap.mmap(-1, HostMemory.size_for(count, Piggyback.memory_bytes(count, EACH)))
        self.memories = [HostMemory(block, i, self.ranks) for i in range(count)]
        self.piggybacks = [Piggyback(memory.data, i, count, EACH) if has_piggyback else None
                         for i, memory in enumerate(self.memories)]
        elsewhere = [rank for rank in range(self.size) if rank not in self.ranks]
        topology = Topology(host, tuple(f"host {h}" for h in range(len(sizes))))
        vote = hosts_agreement.leader_exchange(MPI.COMM_WORLD, topology, self.piggybacks[0])
        self.agreements = [HierarchicalAgreement(memory, self.woken.append, None if i else vote, elsewhere)
                        for i, memory in enumerate(self.memories)]

    def outcomes(self) -> list[Outcome]:
        """Of the round in which all ranks of all hosts have voted, or will."""
        found: dict[int, Outcome] = {}
        end = time.monotonic() + LIMIT_S
        while len(found) < len(self.agreements):
            assert time.monotonic() < end, f"the round does not end: {found}"
            for i, agreement in enumerate(self.agreements):
                outcome = agreement.outcome() if i not in found else None
                if outcome is not None:
                    found[i] = outcome
        return list(found.values())


def made_host(most: int, has_piggyback: bool, most_direct: int = PIGGYBACK_MOST_HOSTS) -> Iterator[Host]:
    """This process's host, of as many hosts as there are processes, which have one rank, two ... `most`, one ..."""
    sizes = [1 + h % most for h in range(MPI.COMM_WORLD.Get_size())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts_agreement, "PIGGYBACK_MOST_HOSTS", most_direct)
        made = Host(sizes, MPI.COMM_WORLD.Get_rank(), has_piggyback)
    yield made
    for agreement in made.agreements:
        agreement.close()


@pytest.fixture(scope="module", params=[(1, 8), (3, 8), (3, 0)],
                ids=["one rank each", "up to three ranks", "as if there were many hosts"])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    """A host, one of a few or, as far as votes between hosts go, one of many."""
    most, most_direct = request.param
    yield from made_host(most, has_piggyback=False, most_direct=most_direct)


@pytest.fixture(scope="module", params=[1, 3], ids=["one rank each", "up to three ranks"])
def loaded(request: pytest.FixtureRequest) -> Iterator[Host]:
    yield from made_host(request.param, has_piggyback=True)


@pytest.mark.parametrize("number", [1, 2**61 - 1])
@pytest.mark.parametrize("ready, expected", [(True, Outcome.ALL_READY), (False, Outcome.AGREED)])
def test_all_hosts_agree_on_what_all_vote_for(host: Host, number: int, ready: bool, expected: Outcome) -> None:
    for agreement in host.agreements:
        agreement.vote(number, ready)
    assert host.outcomes() == [expected] * len(host.agreements)
    assert not any(agreement.has_voted for agreement in host.agreements)


@pytest.mark.parametrize("differs", ["first rank", "last rank"])
@pytest.mark.parametrize("number", [0, 4, 6])
def test_one_rank_is_enough_to_refuse(host: Host, differs: str, number: int) -> None:
    different = 0 if differs == "first rank" else host.size - 1
    for rank, agreement in zip(host.ranks, host.agreements, strict=True):
        agreement.vote(number if rank == different else 5, is_ready=True)
    assert host.outcomes() == [Outcome.REFUSED] * len(host.agreements)


def test_one_rank_that_is_not_ready_is_enough(host: Host) -> None:
    for rank, agreement in zip(host.ranks, host.agreements, strict=True):
        agreement.vote(5, is_ready=rank != host.size - 1)
    assert host.outcomes() == [Outcome.AGREED] * len(host.agreements)


def test_hosts_come_to_the_same_outcomes_at_any_speed(host: Host) -> None:
    everywhere, here = random.Random(1), random.Random(host.ranks[0])
    for _ in range(200):
        votes = [everywhere.choice([3, 3, 3, 3, 3, 4]) for _ in range(host.size)]
        for rank, agreement in zip(host.ranks, host.agreements, strict=True):
            if here.random() < 0.05:
                time.sleep(0.001)
                assert agreement.outcome() is None
            agreement.vote(votes[rank])
        expected = Outcome.AGREED if len(set(votes)) == 1 else Outcome.REFUSED
        assert host.outcomes() == [expected] * len(host.agreements)


def test_who_has_not_voted_is_known_within_the_host(host: Host) -> None:
    assert host.agreements[0].missing() == host.ranks
    for agreement in host.agreements:
        agreement.vote(5)
    assert host.agreements[0].missing() == [rank for rank in range(host.size) if rank not in host.ranks]
    host.outcomes()


def test_the_first_rank_is_woken_by_votes_and_the_others_by_the_outcome(host: Host) -> None:
    host.woken.clear()
    for memory in host.memories:
        memory.post(1, ASLEEP)
    for agreement in host.agreements:
        agreement.vote(5)
    votes = [host.ranks[0]] * (len(host.ranks) - 1)
    assert host.woken == votes
    host.outcomes()
    assert host.woken == votes + host.ranks[1:]


# -- what goes with the votes -----------------------------------------------------------------------------------------

SIZES = [0, 1, 1000, EAGER_MESSAGE_BYTES // 4 - 16, EAGER_MESSAGE_BYTES // 4, EACH // 4]


def values(rank: int, elements: int, step: int = 0, dtype: type[np.generic] = np.float32) -> np.ndarray:
    """What a rank brings: numbers of which the sum depends on the order."""
    return np.random.default_rng([rank, elements, step]).normal(size=elements).astype(dtype)


def expected(host: Host, elements: int, step: int = 0) -> np.ndarray:
    """The sum over the ranks of each host in their order, and over the hosts in theirs."""
    ranks, sums = iter(range(host.size)), []
    for size in host.sizes:
        total = values(next(ranks), elements, step)
        for _ in range(size - 1):
            total = total + values(next(ranks), elements, step)
        sums.append(total)
    total = sums[0]
    for other in sums[1:]:
        total = total + other
    return total


def vote_for(host: Host, arrays: Sequence[np.ndarray], op: ReduceOp = ReduceOp.SUM, prescale: float = 1.0,
             scale: Scale = IDENTITY, unready: int = -1, number: int = 5, whole: bool = False,
             ) -> tuple[list[Outcome], list[np.ndarray]]:
    """Let the ranks of this host vote with one array each that travels with the vote. Returns what each of them gets.

    `unready` brings nothing. Without `whole` the array is in two pieces, since what is packed is a stream.
    """
    targets, loads = [np.empty_like(array) for array in arrays], {}
    for i, (agreement, piggyback) in enumerate(zip(host.agreements, host.piggybacks, strict=True)):
        assert piggyback is not None
        if host.ranks[i] != unready:
            cut = arrays[i].size // 2
            sources = [arrays[i]] if whole else [arrays[i][:cut], arrays[i][cut:]]
            loads[i] = piggyback.pack(MpiData(MPI.COMM_WORLD, waits()), sources, [targets[i]],
                                      Reduction(op, prescale, scale), arrays[i].size)
        agreement.vote(number, is_ready=i in loads)
    outcomes = host.outcomes()
    first = host.piggybacks[0]
    assert first is not None and first._latest is None, "what was packed, and its targets, are kept alive"
    if outcomes[0] is Outcome.ALL_READY:
        for load in loads.values():
            load.finish(all_packed=True)
    return outcomes, targets


@pytest.mark.parametrize("elements", SIZES)
def test_what_goes_with_votes_is_summed_in_the_order_of_ranks_and_hosts(loaded: Host, elements: int) -> None:
    for step in range(6):
        arrays = [values(rank, elements, step) for rank in loaded.ranks]
        outcomes, results = vote_for(loaded, arrays, whole=step % 2 == 1)
        assert outcomes == [Outcome.ALL_READY] * len(results)
        for result in results:
            np.testing.assert_array_equal(result, expected(loaded, elements, step))


@pytest.mark.parametrize("whole", [False, True])
def test_what_goes_with_votes_is_scaled_before_and_after(loaded: Host, whole: bool) -> None:
    _, results = vote_for(loaded, [np.full(100, rank, np.int32) for rank in loaded.ranks], prescale=2.0,
                          scale=Scale(1.0, loaded.size), whole=whole)
    _, largest = vote_for(loaded, [np.full(100, rank, np.float64) for rank in loaded.ranks], ReduceOp.MAX)
    for result, most in zip(results, largest, strict=True):
        np.testing.assert_array_equal(result, np.full(100, sum(range(loaded.size)) * 2 // loaded.size))
        np.testing.assert_array_equal(most, np.full(100, loaded.size - 1.0))


def test_halves_that_go_with_votes_are_summed_in_float32(loaded: Host) -> None:
    large = np.full(100, 30000, np.float16)
    _, results = vote_for(loaded, [large] * len(loaded.ranks), prescale=1 / loaded.size)
    for result in results:
        np.testing.assert_allclose(result, large, rtol=2e-3)


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("unready", ["first rank", "last rank"])
def test_what_some_hosts_have_sent_in_vain_is_in_nobodys_way(loaded: Host, elements: int, unready: str) -> None:
    lazy = 0 if unready == "first rank" else loaded.size - 1
    for step in range(4):
        arrays = [values(rank, elements, step) for rank in loaded.ranks]
        outcomes, _ = vote_for(loaded, arrays, unready=lazy)
        assert outcomes == [Outcome.AGREED] * len(arrays)
        outcomes, results = vote_for(loaded, arrays)
        assert outcomes == [Outcome.ALL_READY] * len(arrays)
        np.testing.assert_array_equal(results[-1], expected(loaded, elements, step))


def test_hosts_that_vote_for_different_things_may_send_different_amounts(loaded: Host) -> None:
    if len(loaded.sizes) == 1:
        pytest.skip("needs two hosts")
    host = MPI.COMM_WORLD.Get_rank()
    for step in range(4):
        outcomes, _ = vote_for(loaded, [values(rank, SIZES[host % len(SIZES)]) for rank in loaded.ranks],
                               number=5 + host)
        assert outcomes == [Outcome.REFUSED] * len(loaded.ranks)
        _, results = vote_for(loaded, [values(rank, 1000, step) for rank in loaded.ranks])
        np.testing.assert_array_equal(results[0], expected(loaded, 1000, step))
