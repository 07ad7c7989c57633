"""`mpistrat timeline FILE`: where each rank's time went, which ranks the others awaited, what was not fused and why.

The result is text and, with --html, one HTML page with inline SVG. The page has no script and loads nothing from the
network. Called by main.py.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..core.errors import LaunchError
from ..core.topology import rank_list
from ..trace.analysis import Analysis, Rate, Unfinished, Unfused, analyse, last_submissions
from ..trace.records import NO_STEP, Record, arrival_of, by_operation
from ..trace.timeline import places_in, records_in
from .arguments import Parser, counted
from .main import EXIT_WRONG_INPUT

# -- the command ------------------------------------------------------------------------------------------------------

_EPILOG = """\
The exit code is 0 if the file is complete; 2 if its end is missing (the job was killed), or if it is not a timeline.

examples:
  MPISTRAT_TIMELINE=steps.json MPISTRAT_TIMELINE_STEPS=100:120 mpistrat run -np 2 python train.py
  mpistrat timeline steps.json
  mpistrat timeline steps.json --html steps.html
  mpistrat run -np 2 -- mpistrat bench 16MB --json bench.json && mpistrat timeline steps.json --bench bench.json
"""


def main(argv: list[str]) -> int:
    """Run the subcommand and return the exit code.

    Raises LaunchError: The file cannot be read, or is not a timeline; or the page cannot be written.
    """
    parser = Parser("timeline", "Summarise a timeline, the file of MPISTRAT_TIMELINE or of start_timeline().", _EPILOG)
    parser.add_argument("file", metavar="FILE", help="a timeline")
    parser.add_argument("--bench", metavar="FILE", help="compare with the file of `mpistrat bench --json FILE`")
    parser.add_argument("--html", metavar="OUT", help="write a page with charts to OUT; the page needs no network")
    options = parser.parse_args(argv)
    try:
        records, is_cut = records_in(options.file)
    except (OSError, ValueError) as error:
        raise LaunchError(f"{options.file} cannot be read as a timeline: {error}") from error
    analysis = analyse(records)
    print(_text_of(analysis, options.file, _measured(options.bench) if options.bench else ()))
    if options.html:
        try:
            made = _page(analysis, records, places_in(options.file), Path(options.file).name)
            Path(options.html).write_text(made, encoding="utf-8")
        except OSError as error:
            raise LaunchError(f"the page cannot be written: {error}") from error
    if is_cut:
        print(f"mpistrat timeline: the end of {options.file} is missing: the job was killed, or it still runs.",
              file=sys.stderr)
        return EXIT_WRONG_INPUT
    return 0


def _measured(path: str) -> list[dict[str, Any]]:
    """Return the results in a file of `mpistrat bench --json`. Raises LaunchError: The file is not of that kind."""
    try:
        points = json.loads(Path(path).read_bytes())
        return [{key: point[key] for key in ("case", "operation", "nbytes", "mpistrat_s")} for point in points]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(f"--bench {path} is not a file of mpistrat bench --json: {error!r}") from error


# -- text -------------------------------------------------------------------------------------------------------------

_MOST_NAMES, _MOST_UNFINISHED = 3, 8
_LEAST_COST = 0.01  # A rank is listed if others have waited for it for more than this share of the time.
_MEANINGS = {
    "computing": "no operation was outstanding", "waiting": "the rank waited for the rank that came last",
    "agreeing": "all ranks had submitted the operation, and nothing was reduced yet",
    "moving": "bytes were reduced or gathered",
    "hidden": "share of a step's operations that ran while the step still computed gradients"}


def _text_of(analysis: Analysis, path: str, measured: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the text that the command prints. `measured`: The results of `mpistrat bench --json`, for comparison."""
    steps = f", {counted(analysis.steps, 'step')}" if analysis.steps else ""
    lines = [f"{path}: {counted(analysis.operations, 'operation')} on {counted(len(analysis.ranks), 'rank')} in "
             f"{analysis.seconds:.3g} s{steps}", "", "rank" + "".join(f"{title:>11}" for title in _MEANINGS)]
    lines += [f"{each.rank:>4}" + "".join(f"{_shown(getattr(each, title)):>11}" for title in _MEANINGS)
              for each in analysis.ranks]
    lines += ["", *(f"{title:>10}: {meaning}" for title, meaning in _MEANINGS.items()), ""]
    lines += [*_stragglers_of(analysis), ""]
    if analysis.unfinished:
        lines += [*map(_unfinished, analysis.unfinished[:_MOST_UNFINISHED]), ""]
    if analysis.unfused:
        lines += ["Operations that were not fused with another operation:", *map(_unfused, analysis.unfused), ""]
    lines.append("Reductions and gathers of the tensors of one rank:")
    lines += [_rate(rate, measured) for rate in analysis.rates]
    return "\n".join(lines)


def _shown(share: float | None) -> str:
    """Return a share in percent as text; "-" for None."""
    return "-" if share is None else f"{share * 100:.1f} %"


def _stragglers_of(analysis: Analysis) -> list[str]:
    """Return a sentence on each rank for which others have waited long, or a sentence that there is no such rank."""
    return [f"Rank {each.rank} came last in {each.operations} of {counted(analysis.operations, 'operation')}, "
            f"{each.late_s * 1e3:.3g} ms after the first (median): others waited {each.cost_s:.3g} s for it, "
            f"{_shown(each.cost_s / analysis.seconds)} of the time."
            for each in analysis.stragglers if each.cost_s > _LEAST_COST * analysis.seconds
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
    return f"{line}: {_shown(rate.bytes_per_s / at_best)} of {_speed(at_best)}, the rate of bench for {nearest['case']}"


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"


# -- the page ---------------------------------------------------------------------------------------------------------

_COLOURS = {"computing": "#4c9f70", "waiting": "#d1495b", "agreeing": "#edae49", "moving": "#30638e"}
_WIDTH, _LEFT, _ROW, _BAR = 960, 70, 26, 18
_SPAN = _WIDTH - _LEFT - 30  # the length of an axis
_MOST_SPANS = 600  # the most operations that are drawn for a rank
_SHOWN_NS = 500_000_000
_NEAR_NS = 1_500_000_000  # Ranks record their place in the script once a second.
_Place = tuple[int, int, str]  # a rank, a time in nanoseconds, and the rank's place in the script at that time
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #222 }
svg { width: 100%; height: auto; background: #fafafa; border: 1px solid #ddd }
svg text { font: 12px system-ui, sans-serif; fill: #333 }
svg text.in { fill: #fff }
svg line { stroke: #bbb }
pre { background: #f4f4f4; padding: 1em; overflow-x: auto }
.key span { display: inline-block; width: .9em; height: .9em; margin: 0 .3em 0 1em; vertical-align: -.1em }
"""


def _page(analysis: Analysis, records: Sequence[Record], places: Sequence[_Place], title: str) -> str:
    keys = "".join(f'<span style="background:{colour}"></span>{name}: {escape(_MEANINGS[name])}'
                   for name, colour in _COLOURS.items())
    slow = "".join(f"<p>{escape(sentence)}</p>" for sentence in _stragglers_of(analysis))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<h2>Where the time went</h2>
{_shares(analysis)}
<p class="key">{keys}</p>
<h2>Who came last</h2>
{slow}
{_lateness(records)}
<p>Each dot is an operation: the time from the first to the last rank that submitted the operation.</p>
<h2>The longest wait</h2>
{_operations(records)}
<p>{escape(_wait_of(records, places))}</p>
<p>The operations around the longest wait, each from its submission to its result.</p>
<h2>All figures</h2>
<pre>{escape(_text_of(analysis, title))}</pre>
</body></html>
"""


def _shares(analysis: Analysis) -> str:
    shapes: list[str] = []
    for row, rank in enumerate(analysis.ranks):
        left, top = float(_LEFT), row * _ROW + 4
        shapes.append(_label(rank.rank, top))
        for name, colour in _COLOURS.items():
            share = getattr(rank, name)
            width = share * _SPAN
            shapes.append(_rectangle(left, top, width, colour, f"rank {rank.rank}, {name}: {_shown(share)}"))
            if width > 45:
                shapes.append(f'<text x="{left + 5:.1f}" y="{top + 14}" class="in">{_shown(share)}</text>')
            left += width
    return _chart(len(analysis.ranks) * _ROW + 4, shapes, 0.0, 100.0, "%")


def _lateness(records: Sequence[Record]) -> str:
    late = [(arrival.last, (arrival.last - arrival.first) / 1e6, arrival.rank)
            for some in by_operation(records).values() if (arrival := arrival_of(some)) is not None]
    if not late:
        return "<p>The timeline has no operation of several ranks.</p>"
    begin, end = min(late)[0], max(late)[0]
    start = min(each.submitted or each.agreed for each in records)
    highest, height = max(each[1] for each in late) or 1.0, 180
    ranks = sorted({rank for *_, rank in late})
    colours = {rank: f"hsl({360 * place // len(ranks)} 65% 45%)" for place, rank in enumerate(ranks)}
    shapes = [f'<text x="4" y="16">{highest:.3g} ms</text><text x="4" y="{height - 6}">0</text>']
    for at, late_ms, rank in late[:: len(late) // (4 * _MOST_SPANS) + 1]:
        x = _LEFT + (at - begin) / max(end - begin, 1) * _SPAN
        y = height - 10 - late_ms / highest * (height - 20)
        shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colours[rank]}">'
                      f"<title>rank {rank}: {late_ms:.3g} ms</title></circle>")
    keys = "".join(f'<span style="background:{colours[rank]}"></span>rank {rank} was last' for rank in ranks)
    chart = _chart(height, shapes, (begin - start) / 1e9, (end - start) / 1e9, "s")
    return f'{chart}<p class="key">{keys}</p>'


def longest_wait(records: Sequence[Record]) -> Record:
    """Return the record of the operation with the longest time from submission to the agreement of all ranks."""
    return max(records, key=lambda each: each.agreed - (each.submitted or each.agreed))


def _wait_of(records: Sequence[Record], places: Sequence[_Place]) -> str:
    """Return a sentence on the longest wait: who waited for which rank, in which step, and what code that rank ran."""
    longest = longest_wait(records)
    arrival = arrival_of(by_operation(records)[longest.process_set, longest.number])
    step = "" if longest.step == NO_STEP else f" in step {longest.step}"
    waited = f"Rank {longest.rank} waited {(longest.agreed - (longest.submitted or longest.agreed)) / 1e6:.3g} ms"
    if arrival is None or arrival.rank == longest.rank:
        return f"{waited}{step}, for {longest.name}."
    middle = (longest.submitted + longest.agreed) // 2
    near = min(((abs(at - middle), where) for rank, at, where in places
                if rank == arrival.rank and abs(at - middle) < _NEAR_NS), default=None)
    return (f"{waited} for rank {arrival.rank}{step}, for {longest.name}."
            + (f" Rank {arrival.rank} was {near[1]}" if near else ""))


def _operations(records: Sequence[Record]) -> str:
    """Draw, as SVG, the operations of all ranks around the longest wait."""
    longest = longest_wait(records)
    since = longest.submitted or longest.agreed
    start = min(each.submitted or each.agreed for each in records)
    shown_ns = max(_SHOWN_NS, 2 * (longest.agreed - since))
    begin = since - shown_ns // 8
    end = begin + shown_ns
    ranks = sorted({each.rank for each in records})
    last = last_submissions(records)
    shapes: list[str] = []
    for row, rank in enumerate(ranks):
        top = row * _ROW + 4
        shapes.append(_label(rank, top))
        shown_here = [each for each in records if each.rank == rank and each.delivered > begin
                      and (each.submitted or each.agreed) < end]
        for each in shown_here[:_MOST_SPANS]:
            came = min(last[each.process_set, each.number], each.agreed)
            for name, first, until in (("waiting", each.submitted or came, came), ("agreeing", came, each.began),
                                       ("moving", each.began, each.ended)):
                first, until = max(first, begin), min(until, end)
                if until > first:
                    scale = _SPAN / (end - begin)
                    shapes.append(_rectangle(_LEFT + (first - begin) * scale, top, max((until - first) * scale, 0.5),
                                             _COLOURS[name], f"{each.name} on rank {rank}, {name}: "
                                             f"{(until - first) / 1e6:.3g} ms"))
    return _chart(len(ranks) * _ROW + 4, shapes, (begin - start) / 1e6, (end - start) / 1e6, "ms")


def _chart(height: int, shapes: Sequence[str], first: float, last: float, unit: str) -> str:
    """Return an SVG with the shapes, and below them an axis from `first` to `last` with about five round numbers."""
    axis = ""
    if last > first:
        step = 10.0 ** math.floor(math.log10((last - first) / 2))
        step *= next(factor for factor in (1, 2, 5, 10) if (last - first) / (factor * step) <= 7)
        axis = f'<line x1="{_LEFT}" y1="{height}" x2="{_LEFT + _SPAN}" y2="{height}"/>'
        for mark in (number * step for number in range(math.ceil(first / step), math.floor(last / step) + 1)):
            x = _LEFT + (mark - first) / (last - first) * _SPAN
            axis += (f'<line x1="{x:.1f}" y1="{height}" x2="{x:.1f}" y2="{height + 5}"/>'
                     f'<text x="{x:.1f}" y="{height + 18}" text-anchor="middle">{mark:g} {unit}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {height + 22}" role="img">{"".join(shapes)}{axis}</svg>'


def _label(rank: int, top: int) -> str:
    return f'<text x="4" y="{top + 14}">rank {rank}</text>'


def _rectangle(left: float, top: int, width: float, colour: str, title: str) -> str:
    return (f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{colour}">'
            f"<title>{escape(title)}</title></rect>")
