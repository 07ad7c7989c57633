"""The slowest of several ranks, by how long each waits for the others. Pure."""

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
