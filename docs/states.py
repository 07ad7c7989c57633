"""Draw the pictures of the state machines in docs/internals.md: boxes, and arrows with what happens.

    python docs/states.py
"""

from dataclasses import dataclass
from pathlib import Path

IMAGES = Path(__file__).resolve().parent / "images"
WIDTH, HEIGHT = 150, 46  # of a box
STYLE = """  <style>
    .box { fill: #eef3fa; stroke: #4a6fa5; }
    .end { fill: #eef8ee; stroke: #4f8a4f; }
    .bad { fill: #fdeeee; stroke: #b04a4a; }
    .name { font-weight: bold; }
    .note { font-size: 12px; fill: #444; }
    .arrow { stroke: #555; fill: none; marker-end: url(#head); }
  </style>
  <defs><marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">\
<path d="M0,0 L9,4 L0,8 z" fill="#555"/></marker></defs>"""


@dataclass(frozen=True)
class State:
    """A box: its name, the left upper corner in pixels, a note, and its kind in the style."""

    name: str
    x: int
    y: int
    note: str = ""
    kind: str = "box"

    def at(self, side: str, shift: int = 0) -> tuple[float, float]:
        """A point of the edge: of the left, right, upper (u) or lower (d) side, moved along it from the middle."""
        return {"l": (self.x, self.y + HEIGHT / 2 + shift), "r": (self.x + WIDTH, self.y + HEIGHT / 2 + shift),
                "u": (self.x + WIDTH / 2 + shift, self.y), "d": (self.x + WIDTH / 2 + shift, self.y + HEIGHT)}[side]


@dataclass(frozen=True)
class Arrow:
    """From a side of a state to a side of another one, with lines of text at a distance from its middle."""

    source: str
    sides: str
    target: str
    text: str
    dx: int = 0
    dy: int = -6
    shift: int = 0


@dataclass(frozen=True)
class Picture:
    """A picture: its title for readers who do not see it, its size, and what is in it."""

    title: str
    size: tuple[int, int]
    states: tuple[State, ...]
    arrows: tuple[Arrow, ...]

    def svg(self) -> str:
        """The picture as SVG."""
        width, height = self.size
        lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
                 'font-size="14" role="img">', f"  <title>{self.title}</title>", STYLE,
                 f'  <rect width="{width}" height="{height}" fill="#fff"/>', '  <g text-anchor="middle">']
        known = {state.name: state for state in self.states}
        for arrow in self.arrows:
            x1, y1 = known[arrow.source].at(arrow.sides[0], arrow.shift)
            x2, y2 = known[arrow.target].at(arrow.sides[1], arrow.shift)
            lines.append(f'    <path class="arrow" d="M{x1:g},{y1:g} L{x2:g},{y2:g}"/>')
            for number, text in enumerate(arrow.text.split("\n")):
                lines.append(f'    <text class="note" x="{(x1 + x2) / 2 + arrow.dx:g}" '
                             f'y="{(y1 + y2) / 2 + arrow.dy + 14 * number:g}">{text}</text>')
        for state in self.states:
            middle = state.x + WIDTH / 2
            lines += [f'    <rect class="{state.kind}" x="{state.x}" y="{state.y}" width="{WIDTH}" height="{HEIGHT}" '
                      'rx="5"/>',
                      f'    <text class="name" x="{middle:g}" y="{state.y + 20}">{state.name}</text>',
                      f'    <text class="note" x="{middle:g}" y="{state.y + 37}">{state.note}</text>']
        return "\n".join([*lines, "  </g>", "</svg>", ""])


REQUEST = Picture(
    "The states of a request on one rank, from its submission to its result", (760, 330),
    (State("queued", 20, 40, "TensorQueue"), State("voted for", 300, 40, "FastPath"),
     State("executed", 590, 40, "Executor", "end"), State("announced", 20, 190, "Subtree"),
     State("decided", 300, 190, "Root, on rank 0"), State("failed", 300, 270, "its handle has the error", "bad")),
    (Arrow("queued", "rl", "voted for", "a vote is open, and a\ncaller waits for it alone", dy=-26),
     Arrow("voted for", "rl", "executed", "all ranks have\nvoted for the same", dy=-26),
     Arrow("queued", "du", "announced", "otherwise", dx=36, dy=-14),
     Arrow("voted for", "du", "announced", "a rank has voted\nfor another", dx=86, dy=4),
     Arrow("announced", "rl", "decided", "each rank has it, or\nhas joined", dy=-22),
     Arrow("decided", "rd", "executed", "in the order of\nthe decisions", dx=66, dy=14),
     Arrow("announced", "rl", "failed", "the ranks differ, wait too long,\nor wait for each other", dx=-60, dy=24)))
GENERATION = Picture(
    "The states of a generation of an elastic job, as its supervisor sees it", (760, 410),
    (State("waits", 20, 40, "for hosts, or back-off"), State("starts", 300, 40, "ranks in init()"),
     State("runs", 590, 40, "commits are kept"), State("leaves", 300, 190, "at the next commit"),
     State("has a loss", 590, 190, "a rank died, a host is lost"), State("stopped", 590, 330, "mpirun is ended", "bad"),
     State("over", 20, 190, "mpirun has ended"), State("done", 20, 340, "the job's exit code", "end")),
    (Arrow("waits", "rl", "starts", "enough slots:\nStart", dy=-22),
     Arrow("starts", "rl", "runs", "all ranks have\nleft init()", dy=-22),
     Arrow("runs", "du", "leaves", "room for more, a host\ngoes, SIGTERM: Leave", dx=-50, dy=-30, shift=-30),
     Arrow("runs", "du", "has a loss", "the agent\ntells", dx=-38, dy=12),
     Arrow("has a loss", "ud", "runs", "mended", dx=26, dy=4, shift=40),
     Arrow("has a loss", "du", "stopped", "a host, or not mended\nin time: Stop", dx=-70, dy=4),
     Arrow("starts", "dr", "over", "a rank has ended\nbefore init()", dx=-60, dy=-24),
     Arrow("leaves", "lr", "over", "all have\nleft", dy=16),
     Arrow("stopped", "lr", "over", "", shift=14),
     Arrow("over", "ud", "waits", "failed, or to\nbegin anew", dx=44, dy=0),
     Arrow("over", "du", "done", "all have ended with 0, too\nmany failures, or an order", dx=84, dy=4)))
PICTURES = {"states-request.svg": REQUEST, "states-generation.svg": GENERATION}

if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (IMAGES / name).write_text(picture.svg())
