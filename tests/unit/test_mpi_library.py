"""Groups of MPI, which have to be freed: with communicators that count them."""

from mpistrat.transport.mpi import library


class CountedGroup:
    """A group of so many processes. `open` has all that are not freed."""

    def __init__(self, size: int, open_groups: list["CountedGroup"]):
        self._size, self._open = size, open_groups
        open_groups.append(self)

    def Free(self) -> None:  # noqa: N802
        self._open.remove(self)

    def Get_size(self) -> int:  # noqa: N802
        return self._size

    def Incl(self, ranks: list[int]) -> "CountedGroup":  # noqa: N802
        return CountedGroup(len(ranks), self._open)

    def Translate_ranks(self, ranks: list[int], other: "CountedGroup") -> list[int]:  # noqa: N802
        return [rank if rank < other._size else -1 for rank in ranks]


class CountedComm:
    """A communicator of so many ranks."""

    def __init__(self, size: int, open_groups: list[CountedGroup]):
        self._size, self._open = size, open_groups

    def Get_group(self) -> CountedGroup:  # noqa: N802
        return CountedGroup(self._size, self._open)

    def Create_group(self, group: CountedGroup) -> int:  # noqa: N802
        return group._size


def test_groups_are_freed() -> None:
    open_groups: list[CountedGroup] = []
    small, large = CountedComm(2, open_groups), CountedComm(3, open_groups)
    assert library.ranks_in(large, small) == [0, 1, -1]  # type: ignore[arg-type]
    assert library.subset(large, [0, 2]) == 2  # type: ignore[arg-type]
    assert open_groups == []
