"""How long this rank was in collectives in a span of time that is over.

Read from what the engine has recorded of its last operations. Any thread may call it.
"""

from ..core.errors import MpistratError
from ..core.slowest import Waits
from ..trace.status import waits
from . import runtime


def waits_between(began_s: float, ended_s: float, process_set: int = 0) -> Waits:
    """The waits of this rank for its collectives of a process set. Local.

    `seconds` is less than the span if its first operations are not kept any more, and 0 if nothing is recorded.

    Args:
        began_s, ended_s: The span, as `time.perf_counter` has it, whose clock is that of the records (CLOCK_MONOTONIC).
        process_set: Its id.
    """
    try:
        traced = runtime.group_of("waits_between", process_set).traced
    except MpistratError:  # shutdown(), or a process set that was removed.
        return Waits()
    began, ended = int(began_s * 1e9), int(ended_s * 1e9)
    kept = traced.ring.since(0)
    operations = [each for each in kept if began < each.delivered and each.agreed < ended]
    if not operations:
        return Waits()
    if kept[0].serial:  # Earlier ones are gone.
        began = max(began, kept[0].delivered)
    if began >= ended:
        return Waits()
    return waits(operations, (), (began, ended))
