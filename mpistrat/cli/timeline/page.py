"""The analysis of a timeline as one HTML page: inline SVG, no script, nothing from the network. Pure functions."""

from collections.abc import Iterable, Sequence
from html import escape

from ...trace.analysis import Analysis, last_submissions
from ...trace.records import Record, arrival_of, by_operation
from .text import MEANINGS, shown, stragglers_of, text_of

_COLOURS = {"computing": "#4c9f70", "waiting": "#d1495b", "agreeing": "#edae49", "moving": "#30638e"}
_WIDTH, _LEFT, _ROW, _BAR = 960, 70, 26, 18
_MOST_SPANS = 600  # of operations that are drawn on a rank
_SHOWN_NS = 500_000_000
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #222 }
svg { width: 100%; height: auto; background: #fafafa; border: 1px solid #ddd }
svg text { font: 12px system-ui, sans-serif; fill: #333 }
pre { background: #f4f4f4; padding: 1em; overflow-x: auto }
.key span { display: inline-block; width: .9em; height: .9em; margin: 0 .3em 0 1em; vertical-align: -.1em }
"""


def page(analysis: Analysis, records: Sequence[Record], title: str) -> str:
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
<p>Each dot is an operation: how long after the first rank the last one has submitted it.</p>
<h2>The longest wait</h2>
{_operations(records)}
<p>The operations around the longest wait, from the submission to the result of each.</p>
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
            width = getattr(rank, name) * (_WIDTH - _LEFT - 10)
            shapes.append(_rectangle(left, top, width, colour, f"rank {rank.rank}, {name}: "
                                     f"{shown(getattr(rank, name))}"))
            left += width
    return _svg(len(analysis.ranks) * _ROW + 8, shapes)


def _lateness(records: Sequence[Record]) -> str:
    late = [(arrival.last, (arrival.last - arrival.first) / 1e6, arrival.rank)
            for some in by_operation(records).values() if (arrival := arrival_of(some)) is not None]
    if not late:
        return "<p>The timeline has no operation of several ranks.</p>"
    begin, end = min(late)[0], max(late)[0]
    highest, height = max(each[1] for each in late) or 1.0, 180
    ranks = sorted({rank for *_, rank in late})
    shapes = [f'<text x="4" y="16">{highest:.3g} ms</text><text x="4" y="{height - 6}">0</text>']
    for at, late_ms, rank in late[:: len(late) // (4 * _MOST_SPANS) + 1]:
        x = _LEFT + (at - begin) / max(end - begin, 1) * (_WIDTH - _LEFT - 10)
        y = height - 10 - late_ms / highest * (height - 20)
        shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{_colour_of(rank, ranks)}">'
                      f"<title>rank {rank}: {late_ms:.3g} ms</title></circle>")
    keys = "".join(f'<span style="background:{_colour_of(rank, ranks)}"></span>rank {rank} was last' for rank in ranks)
    return f'{_svg(height, shapes)}<p class="key">{keys}</p>'


def _operations(records: Sequence[Record]) -> str:
    """The operations of all ranks around the longest wait."""
    longest = max(records, key=lambda each: each.agreed - (each.submitted or each.agreed))
    since = longest.submitted or longest.agreed
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
                    scale = (_WIDTH - _LEFT - 10) / (end - begin)
                    shapes.append(_rectangle(_LEFT + (first - begin) * scale, top, max((until - first) * scale, 0.5),
                                             _COLOURS[name], f"{each.name} on rank {rank}, {name}: "
                                             f"{(until - first) / 1e6:.3g} ms"))
    shapes.append(f'<text x="{_LEFT}" y="{len(ranks) * _ROW + 18}">{(end - begin) / 1e6:.0f} ms in all</text>')
    return _svg(len(ranks) * _ROW + 26, shapes)


def _colour_of(rank: int, ranks: Sequence[int]) -> str:
    return f"hsl({360 * ranks.index(rank) // len(ranks)} 65% 45%)"


def _label(rank: int, top: int) -> str:
    return f'<text x="4" y="{top + 14}">rank {rank}</text>'


def _rectangle(left: float, top: int, width: float, colour: str, title: str) -> str:
    return (f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{colour}">'
            f"<title>{escape(title)}</title></rect>")


def _svg(height: int, shapes: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(shapes)}</svg>'
