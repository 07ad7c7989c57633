"""How long this rank has waited for others, and for bytes, in a span of time that is over; and what it has hidden.

Read from what the engine has recorded of its last operations. Any thread may call it.
"""

from ..core.errors import MpistratError
from ..trace.status import hidden, shares
from . import runtime

_NOTHING = 0.0, 0.0, 0.0, 0.0


def time_shares(process_set: int, began_s: float, ended_s: float) -> tuple[float, float, float, float]:
    """Seconds of this rank in its collectives of a process set. Local.

    Args:
        process_set: Its id.
        began_s, ended_s: The span, as `time.perf_counter` has it, whose clock is that of the records (CLOCK_MONOTONIC).

    Returns:
        (observed, waiting for ranks, moving bytes, outstanding while the backward pass went on). `observed` is less
        than the span if its first operations are not kept any more, and 0 if nothing is recorded.
    """
    try:
        traced = runtime.group_of("time_shares", process_set).traced
    except MpistratError:  # shutdown(), or a process set that was removed.
        return _NOTHING
    began, ended = int(began_s * 1e9), int(ended_s * 1e9)
    kept = traced.ring.since(0)
    operations = [each for each in kept if began < each.delivered and each.agreed < ended]
    if not operations:
        return _NOTHING
    if kept[0].serial:  # Earlier ones are gone.
        began = max(began, kept[0].delivered)
    _, waiting, moving = shares(operations, (), (began, ended))
    seconds = max(ended - began, 0) / 1e9
    return seconds, waiting * seconds, moving * seconds, hidden(operations, (began, ended)) * seconds
