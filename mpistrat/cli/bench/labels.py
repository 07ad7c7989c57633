"""Places labels of points in a plot where they lie neither on a curve nor on another label. Called by plot.py."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

# Distances from the point in typographic points, best first, and how the text is aligned there.
_PLACES = [(x, y, {-1: "right", 0: "center", 1: "left"}[int(np.sign(x))],
            {-1: "top", 0: "center", 1: "bottom"}[int(np.sign(y))])
           for distance in (8, 20, 34, 50) for x, y in [(0, -distance), (0, distance), (distance, 0), (-distance, 0),
                                                        (distance, -distance), (-distance, -distance),
                                                        (distance, distance), (-distance, distance)]]
_STEPS = 100  # A segment of a curve is looked at in so many places.
_MARGIN = 3.0  # pixels around a label


class Label(NamedTuple):
    """A text and the point that it belongs to, in the units of the axes."""

    text: str
    x: float
    y: float


def place(axes: "Axes", labels: Sequence[Label], colour: str) -> "list[Annotation]":
    """Draw the labels. Call it when everything else is drawn and the limits of the axes are set."""
    axes.figure.canvas.draw()  # which fixes the layout
    curves = _pixels_of_curves(axes)
    legend = axes.get_legend()
    taken = [legend.get_window_extent()] if legend is not None else []
    drawn = []
    for label in labels:
        note = axes.annotate(label.text, (label.x, label.y), xytext=(0, 0), textcoords="offset points",
                             fontsize="x-small", color=colour)
        note.set_in_layout(False)
        costs = []
        for number, chosen in enumerate(_PLACES):
            _move(note, chosen)
            costs.append((_cost(note.get_window_extent(), axes.get_window_extent(), taken, curves), number))
        _move(note, _PLACES[min(costs)[1]])
        taken.append(note.get_window_extent())
        drawn.append(note)
    return drawn


def _move(note: "Annotation", chosen: tuple[int, int, str, str]) -> None:
    x, y, horizontal, vertical = chosen
    note.set_position((x, y))
    note.set(ha=horizontal, va=vertical)


def _cost(box: "Bbox", inside: "Bbox", taken: "Sequence[Bbox]", curves: np.ndarray) -> int:
    """How much a label in this box hides: 0 if nothing."""
    box = box.padded(_MARGIN)
    is_hidden = not (inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1)
    within = (curves > (box.x0, box.y0)) & (curves < (box.x1, box.y1))
    return int(within.all(axis=1).sum()) + 10 * _STEPS * (is_hidden + sum(map(box.overlaps, taken)))


def _pixels_of_curves(axes: "Axes") -> np.ndarray:
    """Pixels along all curves and marks, in rows of x and y."""
    found = []
    for line in axes.get_lines():
        corners = axes.transData.transform(np.array(line.get_xydata(), float))
        found.append(corners)
        if line.get_linestyle() not in ("None", ""):
            steps = np.linspace(0, 1, _STEPS)[:, None, None]
            found.append((corners[:-1] + steps * (corners[1:] - corners[:-1])).reshape(-1, 2))
    return np.concatenate(found)
