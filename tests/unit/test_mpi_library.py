"""Groups of MPI, which have to be freed: with communicators that count them."""

from types import SimpleNamespace
from typing import Any

from mpistrat.transport.mpi import mpi_library


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
