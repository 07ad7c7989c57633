"""What ranks must agree on when they register process sets."""

import pytest

import mpistrat
from mpistrat.api.registry import disagreement
from mpistrat.core.topology import Topology


@pytest.mark.parametrize("lists, from_comm, text", [
    ([[(0, 1)], [(0, 1)], [(0, 1)]], [False], ""),
    ([[(0, 1)], [(0, 1)], [(0, 2)]], [False], "[0, 1] on ranks [0, 1]; [0, 2] on ranks [2]"),
    ([[(0,)], [(1,)], [(2,)]], [False], "[0] on ranks [0]; [1] on ranks [1]; [2] on ranks [2]"),
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


@pytest.mark.horovod("process-set")
def test_a_set_that_is_not_registered_has_no_size() -> None:
    mpistrat.shutdown()
    process_set = mpistrat.ProcessSet([2, 0])
    assert process_set.ranks == [0, 2]
    assert process_set.size() is process_set.rank() is process_set.included() is None
    assert str(process_set) == "ProcessSet(process_set_id=None, ranks=[0, 2], mpi_comm=None)"
    with pytest.raises(ValueError, match="not been initialized"):
        mpistrat.global_process_set.size()
