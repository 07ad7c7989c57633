"""Finds the slowest of several ranks, from how long each rank waits for the others, and describes it. Pure."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

LEAST_COST = 0.05  # A rank is the slowest if the other ranks wait longer than this rank by this share of the time.


class Waits(NamedTuple):
    """The time that a rank spent in collectives, in seconds."""

    seconds: float = 0.0  # The length of the time span with records of the rank's collectives; 0: no records.
    waiting: float = 0.0  # The part of the span in which the rank waited for other ranks.
    moving: float = 0.0  # The part of the span in which the rank waited for data to be transferred.
    hidden: float = 0.0  # The part of `waiting` and `moving` in which the backward pass was running.


def total(waits: Iterable[Waits]) -> Waits:
    return Waits(*map(sum, zip(*waits, strict=True)))


def behind(waits: Waits) -> str:
    """Return which share of the waits fell into the backward pass: "12% of it during the backward pass"; "" for 0."""
    share = waits.hidden / ((waits.waiting + waits.moving) or 1)
    return f"{share:.0%} of it during the backward pass" if share else ""


def slowest(waiting: Sequence[float]) -> tuple[int, float] | None:
    """Return the index of the slowest rank, and its cost for the others; None if no rank is clearly slower.

    `waiting[r]`: The share of the time in which rank r waits. There are at least two ranks. The slowest rank comes last
    to the collectives, and so waits least. Its cost is the mean share of the other ranks minus its own share.
    """
    index = min(range(len(waiting)), key=waiting.__getitem__)
    cost = fmean(share for other, share in enumerate(waiting) if other != index) - waiting[index]
    return None if cost < LEAST_COST else (index, cost)


def shares_of(waits: Sequence[Waits], names: Sequence[str]) -> str:
    """Return a clause on the time in collectives and the slowest rank; "" if a rank has recorded no collectives."""
    if not all(each.seconds for each in waits):
        return ""
    share = fmean((each.waiting + each.moving) / each.seconds for each in waits)
    found = slowest([each.waiting / each.seconds for each in waits])
    who = ", and no rank was slower than the others" if found is None else \
        f"; the slowest was {names[found[0]]}, for which the others waited {found[1]:.0%} of their time"
    hidden = behind(total(waits))
    return f"; collectives took {share:.0%} of the time on average{hidden and f' ({hidden})'}{who}"


def figure(number: float | None) -> str:
    """Return a number with three significant digits, or from 100 on as an integer: "0.0123", "1,234"; "-" for None."""
    return "-" if number is None else f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
