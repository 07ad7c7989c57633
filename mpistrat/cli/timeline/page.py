"""The analysis of a timeline as one HTML page: inline SVG, no script, nothing from the network. Pure functions."""

import math
from collections.abc import Iterable, Sequence
from html import escape

from ...trace.analysis import Analysis, last_submissions
from ...trace.records import NO_STEP, Record, arrival_of, by_operation
from .text import MEANINGS, shown, stragglers_of, text_of

_COLOURS = {"computing": "#4c9f70", "waiting": "#d1495b", "agreeing": "#edae49", "moving": "#30638e"}
_WIDTH, _LEFT, _ROW, _BAR = 960, 70, 26, 18
_SPAN = _WIDTH - _LEFT - 30  # the length of an axis
_MOST_SPANS = 600  # the most operations that are drawn for a rank
_SHOWN_NS = 500_000_000
_NEAR_NS = 1_500_000_000  # Ranks record their place in the script once a second.
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #222 }
svg { width: 100%; height: auto; background: #fafafa; border: 1px solid #ddd }
svg text { font: 12px system-ui, sans-serif; fill: #333 }
svg text.in { fill: #fff }
svg line { stroke: #bbb }
pre { background: #f4f4f4; padding: 1em; overflow-x: auto }
.key span { display: inline-block; width: .9em; height: .9em; margin: 0 .3em 0 1em; vertical-align: -.1em }
"""


Place = tuple[int, int, str]  # rank, time in nanoseconds, place in the script where the rank was


def page(analysis: Analysis, records: Sequence[Record], places: Sequence[Place], title: str) -> str:
    keys = "".join(f'<span style="background:{colour}"></span>{name}: {escape(MEANINGS[name])}'
                   for name, colour in _COLOURS.items())
    slow = "".join(f"<p>{escape(sentence)}</p>" for sentence in stragglers_of(analysis))
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
<p>{escape(wait_of(records, places))}</p>
<p>The operations around the longest wait, each from its submission to its result.</p>
<h2>All figures</h2>
<pre>{escape(text_of(analysis, title))}</pre>
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
            shapes.append(_rectangle(left, top, width, colour, f"rank {rank.rank}, {name}: {shown(share)}"))
            if width > 45:
                shapes.append(f'<text x="{left + 5:.1f}" y="{top + 14}" class="in">{shown(share)}</text>')
            left += width
    bottom = len(analysis.ranks) * _ROW + 4
    return _svg(bottom + 22, [*shapes, *_axis(bottom, 0.0, 100.0, "%")])


def _lateness(records: Sequence[Record]) -> str:
    late = [(arrival.last, (arrival.last - arrival.first) / 1e6, arrival.rank)
            for some in by_operation(records).values() if (arrival := arrival_of(some)) is not None]
    if not late:
        return "<p>The timeline has no operation of several ranks.</p>"
    begin, end = min(late)[0], max(late)[0]
    start = min(each.submitted or each.agreed for each in records)
    highest, height = max(each[1] for each in late) or 1.0, 180
    ranks = sorted({rank for *_, rank in late})
    shapes = [f'<text x="4" y="16">{highest:.3g} ms</text><text x="4" y="{height - 6}">0</text>']
    for at, late_ms, rank in late[:: len(late) // (4 * _MOST_SPANS) + 1]:
        x = _LEFT + (at - begin) / max(end - begin, 1) * _SPAN
        y = height - 10 - late_ms / highest * (height - 20)
        shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{_colour_of(rank, ranks)}">'
                      f"<title>rank {rank}: {late_ms:.3g} ms</title></circle>")
    keys = "".join(f'<span style="background:{_colour_of(rank, ranks)}"></span>rank {rank} was last' for rank in ranks)
    shapes += _axis(height, (begin - start) / 1e9, (end - start) / 1e9, "s")
    return f'{_svg(height + 22, shapes)}<p class="key">{keys}</p>'


def longest_wait(records: Sequence[Record]) -> Record:
    """Return the record with the longest wait, for other ranks or for the agreement of all ranks."""
    return max(records, key=lambda each: each.agreed - (each.submitted or each.agreed))


def wait_of(records: Sequence[Record], places: Sequence[Place]) -> str:
    """Return a sentence on the longest wait: the two ranks, the step, and where the late rank was in the script."""
    longest = longest_wait(records)
    together = [each for each in records if (each.process_set, each.number) == (longest.process_set, longest.number)]
    arrival = arrival_of(together)
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
    """Draw the operations of all ranks around the longest wait."""
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
    bottom = len(ranks) * _ROW + 4
    return _svg(bottom + 22, [*shapes, *_axis(bottom, (begin - start) / 1e6, (end - start) / 1e6, "ms")])


def _axis(top: int, first: float, last: float, unit: str) -> list[str]:
    """Draw an axis from `first` to `last` below the shapes, with about five round numbers."""
    if last <= first:
        return []
    step = 10.0 ** math.floor(math.log10((last - first) / 2))
    step *= next(factor for factor in (1, 2, 5, 10) if (last - first) / (factor * step) <= 7)
    marks = [number * step for number in range(math.ceil(first / step), math.floor(last / step) + 1)]
    places = [(mark, _LEFT + (mark - first) / (last - first) * _SPAN) for mark in marks]
    return [f'<line x1="{_LEFT}" y1="{top}" x2="{_LEFT + _SPAN}" y2="{top}"/>',
            *(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + 5}"/>'
              f'<text x="{x:.1f}" y="{top + 18}" text-anchor="middle">{mark:g} {unit}</text>' for mark, x in places)]


def _colour_of(rank: int, ranks: Sequence[int]) -> str:
    return f"hsl({360 * ranks.index(rank) // len(ranks)} 65% 45%)"


def _label(rank: int, top: int) -> str:
    return f'<text x="4" y="{top + 14}">rank {rank}</text>'


def _rectangle(left: float, top: int, width: float, colour: str, title: str) -> str:
    return (f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{colour}">'
            f"<title>{escape(title)}</title></rect>")


def _svg(height: int, shapes: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(shapes)}</svg>'
