"""The slowest of several ranks, by how long each waits for the others, and the words for it. Pure."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

LEAST_COST = 0.05  # A rank is called the slowest if the others wait longer than it does by this share of the time.


class Waits(NamedTuple):
    """How long a rank was in collectives, in seconds."""

    seconds: float = 0.0  # The time in which its collectives are known; 0: they are not recorded.
    waiting: float = 0.0  # The part of it in which the rank waited for other ranks.
    moving: float = 0.0  # The part of it in which it waited for the bytes.
    hidden: float = 0.0  # The part of these two in which the backward pass went on.


def total(waits: Iterable[Waits]) -> Waits:
    """The sums."""
    return Waits(*map(sum, zip(*waits, strict=True)))


def behind(waits: Waits) -> str:
    """The share of the communication that is hidden, in words that follow on it; "" if nothing is."""
    share = waits.hidden / ((waits.waiting + waits.moving) or 1)
    return f"{share:.0%} of it behind the backward pass" if share else ""


def slowest(waiting: Sequence[float]) -> tuple[int, float] | None:
    """The rank for which the others wait, and what that costs them; None if no rank is clearly slower than the others.

    The rank that comes last to the collectives waits for nobody, so it is the one that waits least.

    Args:
        waiting: Of each rank, the share of the time in which it waits. At least two.

    Returns:
        Its index in the sequence, and how much longer the others wait, a mean.
    """
    index = min(range(len(waiting)), key=waiting.__getitem__)
    cost = fmean(share for other, share in enumerate(waiting) if other != index) - waiting[index]
    return None if cost < LEAST_COST else (index, cost)


def shares_of(waits: Sequence[Waits], names: Sequence[str]) -> str:
    """The end of a sentence on how long the ranks' collectives took, and who was the slowest; "" if one is unknown."""
    if not all(each.seconds for each in waits):
        return ""
    share = fmean((each.waiting + each.moving) / each.seconds for each in waits)
    found = slowest([each.waiting / each.seconds for each in waits])
    who = ", and no rank was slower than the others" if found is None else \
        f"; the slowest was {names[found[0]]}, for which the others waited {found[1]:.0%} of their time"
    hidden = behind(total(waits))
    return f"; collectives took {share:.0%} of the time on average{hidden and f' ({hidden})'}{who}"


def figure(number: float | None) -> str:
    """A number with three digits, or as a whole number if it has more: "0.0123", "1,234"; "-" for None."""
    return "-" if number is None else f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
