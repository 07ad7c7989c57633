"""What ranks must agree on when they register process sets, and what a set knows about the job."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpistrat
from mpistrat.api.process_sets import disagreement
from mpistrat.core.errors import InvalidRequestError, MessageError
from mpistrat.core.rows import received_rows
from mpistrat.core.topology import Topology
from mpistrat.negotiation.coordinator import Coordinator
from mpistrat.transport.mpi import mpi_library
from tests.support.thread_group import ThreadGroup

from ..support.engines import make_engine


@pytest.mark.parametrize("lists, from_comm, text", [
    ([[(0, 1)], [(0, 1)], [(0, 1)]], [False], ""),
    ([[(0, 1)], [(0, 1)], [(0, 2)]], [False], "[0, 1] on ranks [0, 1]; [0, 2] on ranks [2]"),
    ([[(0, 2)], [(1,)], [(0, 2)]], [True], ""),
    ([[(0, 1)], [(1,)], [(0, 2)]], [True], "disagree"),
    ([[(0, 1)], [], [(0, 1)]], [False], "different numbers of process sets: 1 on ranks [0, 2]; 0 on ranks [1]"),
    ([[], [], []], [], ""),
])
def test_ranks_agree_on_the_sets_that_they_register(lists: list, from_comm: list, text: str) -> None:
    found = disagreement(lists, from_comm)
    assert text in found and bool(text) == bool(found)


def test_the_topology_of_a_set_knows_the_ranks_of_the_job() -> None:
    job = Topology(4, ("a", "a", "b", "b", "c"))
    subset = job.subset((1, 3, 4))
    assert (subset.rank, subset.host_of, subset.job_ranks) == (2, ("a", "b", "c"), (1, 3, 4))
    assert subset.listed([0, 2]) == "[1, 4]"
    assert job.listed([0, 2]) == "[0, 2]"


def test_errors_in_a_set_name_ranks_of_the_job() -> None:
    topology = Topology(0, ("", ""), (4, 6))
    with pytest.raises(InvalidRequestError, match="the splits of rank 6 are negative"):
        received_rows("x", np.array([[2, 1, 1], [2, -1, 1]]), topology)
    with pytest.raises(InvalidRequestError, match=r"the splits of rank 4, .* add up to more"):
        received_rows("x", np.array([[1, 1, 1], [2, 1, 1]]), topology)
    with pytest.raises(MessageError, match=r"^rank 6 sent 1 bytes that are no Announcement"):
        Coordinator(topology, 0).receive(1, b"?", 0.0)
    group = ThreadGroup(1)
    engine = make_engine(0, 1, group.control(0), group.data(0), members=(6,))
    engine.controller.life.fail(OSError("on purpose"))
    assert str(engine.controller.life.error).startswith("The engine of rank 6 failed: OSError('on purpose')")


@pytest.mark.horovod("process-set")
def test_a_set_that_is_not_registered_has_no_size() -> None:
    mpistrat.shutdown()
    process_set = mpistrat.ProcessSet([2, 0])
    assert process_set.ranks == [0, 2]
    assert process_set.size() is process_set.rank() is process_set.included() is None
    assert str(process_set) == "ProcessSet(process_set_id=None, ranks=[0, 2], mpi_comm=None)"
    with pytest.raises(ValueError, match="not been initialized"):
        mpistrat.global_process_set.size()


def test_a_deep_copy_of_a_set_is_the_set() -> None:
    mpistrat.init()
    for process_set in (mpistrat.global_process_set, mpistrat.ProcessSet([0])):
        assert copy.deepcopy({"in a callback": process_set})["in a callback"] is process_set


class Group:
    def __init__(self, size: int):
        self.size = size
        not_freed.append(self)

    def Free(self) -> None:  # noqa: N802
        not_freed.remove(self)

    def Get_size(self) -> int:  # noqa: N802
        return self.size

    def Incl(self, ranks: list[int]) -> "Group":  # noqa: N802
        return Group(len(ranks))

    def Translate_ranks(self, ranks: list[int], other: "Group") -> list[int]:  # noqa: N802
        return [rank if rank < other.size else -1 for rank in ranks]


not_freed: list[Group] = []


def communicator(size: int) -> Any:
    return SimpleNamespace(Get_group=lambda: Group(size), Create_group=lambda group: group.size)


def test_groups_are_freed() -> None:
    assert mpi_library.ranks_in(communicator(3), communicator(2)) == [0, 1, -1]
    assert mpi_library.subset(communicator(3), [0, 2]) == 2
    assert not_freed == []
