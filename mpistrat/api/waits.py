"""Measures how long this rank was in collectives during a past time span.

The times come from the engine's records of its last operations. Any thread may call the function.
"""

from ..core.errors import MpistratError
from ..core.slowest import Waits
from ..trace.reports import waits
from . import runtime


def waits_between(began_s: float, ended_s: float, process_set: int = 0) -> Waits:
    """Return how long this rank waited for its collectives of a process set in a time span. Local.

    `seconds` is less than the span if the records of its first operations were dropped, and 0 if there are no records.

    Args:
        began_s, ended_s: The span, in seconds of `time.perf_counter`. The records have the same clock, CLOCK_MONOTONIC.
        process_set: The id of the process set.
    """
    try:
        traced = runtime.group_of("waits_between", process_set).traced
    except MpistratError:  # After shutdown(), or the process set was removed.
        return Waits()
    began, ended = int(began_s * 1e9), int(ended_s * 1e9)
    kept = traced.ring.since(0)
    operations = [each for each in kept if began < each.delivered and each.agreed < ended]
    if not operations:
        return Waits()
    if kept[0].serial:  # Earlier records were dropped.
        began = max(began, kept[0].delivered)
    if began >= ended:
        return Waits()
    return waits(operations, (), (began, ended))
