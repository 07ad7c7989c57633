"""Spans of time: (begin, end) in nanoseconds. Pure functions."""

from collections.abc import Iterable, Sequence

Span = tuple[int, int]


def union(spans: Iterable[Span], within: Span | None = None) -> list[Span]:
    """The union of `spans` as disjoint spans in order, clipped to the span `within` if it is given."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if within is not None:
            begin, end = max(begin, within[0]), min(end, within[1])
        if end <= begin:
            continue
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def hidden(steps: Iterable[Sequence[Span]]) -> list[Span]:
    """The union of the times in which operations were outstanding while their step still computed gradients.

    `steps`: For each step the spans of its operations, from submission to result. The last submission ends computing.
    """
    return union((begin, min(end, max(some)[0])) for some in steps for begin, end in some)


def length(disjoint: Sequence[Span]) -> int:
    """The nanoseconds of spans that do not overlap."""
    return sum(end - begin for begin, end in disjoint)
