"""The slowest of several ranks, by how long each waits for the others, and the words for it. Pure."""

from collections.abc import Sequence
from statistics import fmean

LEAST_COST = 0.05  # A rank is called the slowest if the others wait longer than it does by this share of the time.


def slowest(waiting: Sequence[float]) -> tuple[int, float] | None:
    """The rank for which the others wait, and what that costs them; None if no rank is clearly slower than the others.

    The rank that comes last to the collectives waits for nobody, so it is the one that waits least.

    Args:
        waiting: Of each rank, the share of the time in which it waits. At least two.

    Returns:
        Its place in the sequence, and how much longer the others wait, a mean.
    """
    place = min(range(len(waiting)), key=waiting.__getitem__)
    cost = fmean(share for other, share in enumerate(waiting) if other != place) - waiting[place]
    return None if cost < LEAST_COST else (place, cost)


def shares_of(waits: Sequence[tuple[float, float, float]], names: Sequence[str], hidden: Sequence[float] = ()) -> str:
    """The end of a sentence on how long collectives took, and which rank was the slowest; "" if some rank is unknown.

    Args:
        waits: Of each rank the seconds that are known, and those of them in which it waited for other ranks, and for
            the bytes.
        names: Of the ranks.
        hidden: Of each rank the seconds of the collectives in which it went on to compute; (): that is not known.
    """
    if not all(seconds for seconds, *_ in waits):
        return ""
    share = fmean((waiting + moving) / seconds for seconds, waiting, moving in waits)
    found = slowest([waiting / seconds for seconds, waiting, _ in waits])
    who = "and no rank was slower than the others" if found is None else \
        f"a mean over the ranks: the others waited for {names[found[0]]} for {found[1]:.0%} of theirs"
    behind = sum(hidden) / sum(waiting + moving for _, waiting, moving in waits) if any(hidden) else 0.0
    what = f" ({behind:.0%} of it behind the backward pass)" if behind else ""
    return f"; collectives took {share:.0%} of the time{what}, {who}"


def figure(number: float | None) -> str:
    """A number with three digits, or as a whole number if it has more: "0.0123", "1,234"; "-" for None."""
    return "-" if number is None else f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
