"""The analysis of a timeline as text. Pure functions."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.topology import rank_list
from ...trace.analysis import Analysis, Rate, Unfinished, Unfused
from ..arguments import counted

_MOST_NAMES, _MOST_UNFINISHED = 3, 8
# A rank is listed if others have waited for it for more than this share of the time.
LEAST_COST = 0.01
MEANINGS = {
    "computing": "no operation was outstanding",
    "waiting": "the rank waited for the rank that came last",
    "agreeing": "all ranks had submitted the operation, and nothing was reduced yet",
    "moving": "bytes were reduced or gathered",
    "hidden": "share of a step's operations that ran while the step still computed gradients",
}


def text_of(analysis: Analysis, path: str, measured: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the output of the command. `measured`: the points of `mpistrat bench --json`, for comparison."""
    steps = f", {counted(analysis.steps, 'step')}" if analysis.steps else ""
    lines = [f"{path}: {counted(analysis.operations, 'operation')} on {counted(len(analysis.ranks), 'rank')} in "
             f"{analysis.seconds:.3g} s{steps}", "", "rank" + "".join(f"{title:>11}" for title in MEANINGS)]
    lines += [f"{each.rank:>4}" + "".join(f"{shown(getattr(each, title)):>11}" for title in MEANINGS)
              for each in analysis.ranks]
    lines += ["", *(f"{title:>10}: {meaning}" for title, meaning in MEANINGS.items()), ""]
    lines += [*stragglers_of(analysis), ""]
    if analysis.unfinished:
        lines += [*map(_unfinished, analysis.unfinished[:_MOST_UNFINISHED]), ""]
    if analysis.unfused:
        lines += ["Operations that were not fused with another operation:", *map(_unfused, analysis.unfused), ""]
    lines.append("Reductions and gathers of the tensors of one rank:")
    lines += [_rate(rate, measured) for rate in analysis.rates]
    return "\n".join(lines)


def shown(share: float | None) -> str:
    """Return a share in percent as text; "-" for None."""
    return "-" if share is None else f"{share * 100:.1f} %"


def stragglers_of(analysis: Analysis) -> list[str]:
    """Return a sentence on each rank for which others have waited long."""
    return [f"Rank {each.rank} came last in {each.operations} of {counted(analysis.operations, 'operation')}, "
            f"{each.late_s * 1e3:.3g} ms after the first (median): others waited {each.cost_s:.3g} s for it, "
            f"{shown(each.cost_s / analysis.seconds)} of the time."
            for each in analysis.stragglers if each.cost_s > LEAST_COST * analysis.seconds
            ] or ["No rank has kept the others waiting for long."]


def _unfinished(unfinished: Unfinished) -> str:
    missing = f", and ranks {rank_list(unfinished.missing)} had not called it" if unfinished.missing else ""
    absent = f"; the file has nothing of {counted(unfinished.absent, 'other rank')}" if unfinished.absent else ""
    return (f"{unfinished.name} was not complete: ranks {rank_list(unfinished.waiting)} had waited for "
            f"{unfinished.seconds:.3g} s{missing}{absent}.")


def _unfused(unfused: Unfused) -> str:
    names = ", ".join(unfused.names[:_MOST_NAMES])
    more = f" and {len(unfused.names) - _MOST_NAMES} more" if len(unfused.names) > _MOST_NAMES else ""
    return f"{unfused.operations:>8}  {unfused.reason}: {names}{more}"


def _rate(rate: Rate, measured: Sequence[Mapping[str, Any]]) -> str:
    mean = rate.nbytes / rate.operations
    line = (f"{rate.operations:>8}  {rate.what}: {rate.nbytes / 1e6:.3g} MB at {_speed(rate.bytes_per_s)}, in "
            f"operations of {mean / 1e6:.3g} MB")
    alike = [point for point in measured if rate.what.lower().endswith(f"_{point['operation']}")]
    if not alike:
        return line
    nearest = min(alike, key=lambda point: abs(math.log(point["nbytes"] / mean)))
    at_best = nearest["nbytes"] / nearest["mpistrat_s"]
    return f"{line}: {shown(rate.bytes_per_s / at_best)} of {_speed(at_best)}, the rate of bench for {nearest['case']}"


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"
