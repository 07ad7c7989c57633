"""Spans of time: (begin, end) in nanoseconds. Pure functions."""

from collections.abc import Iterable, Sequence

Span = tuple[int, int]


def union(spans: Iterable[Span], within: Span | None = None) -> list[Span]:
    """The same time as disjoint spans in order, and only what is `within` a span."""
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
    """What computing gradients hides of the operations of steps, from their submission to the result, as a union.

    A step computes gradients until it has submitted the last ones. What is outstanding later is exposed.
    """
    return union((begin, min(end, max(some)[0])) for some in steps for begin, end in some)


def length(disjoint: Sequence[Span]) -> int:
    """The nanoseconds of spans that do not overlap."""
    return sum(end - begin for begin, end in disjoint)
