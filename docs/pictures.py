"""Draw the picture of the system, and averaging.svg and slow-networks.svg from the tables of results of their pages.

    python docs/pictures.py
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("Horovod 0.28.1", "mpistrat")
TOP = 66  # pixels above the bars
BLUE, GREY, DARK = "#2f6db5", "#b9c0ca", "#7a8594"


def table(page: str) -> list[list[str]]:
    """The cells of the table of results of a page of docs: the head, and the rows."""
    text = (ROOT / "docs" / page).read_text().partition("<!-- results -->")[2].partition("<!-- /results -->")[0]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")]
                      for line in re.findall(r"^\|.*\|$", text, re.M))
    return [head, *rows]


def svg(width: int, height: int, left: int, title: str, heading: str, lines: list[str]) -> str:
    """A picture of these elements, with a title for who cannot see it, and a heading at `left`. In pixels."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="13" role="img">',
        f"  <title>{title}</title>",
        f'  <rect width="{width}" height="{height}" fill="#fff"/>',
        f'  <text x="{left}" y="24" font-weight="bold">{heading}</text>', *lines, "</svg>", ""])


def averaging() -> str:
    """For each gradients of the table two bars, in proportion, with their milliseconds."""
    head, *rows = table("speed.md")
    assert head[1:3] == list(NAMES)
    row_height, left, most = 46, 170, 400  # `most`: the length of Horovod's bar
    lines = [f'  <text x="{left}" y="44" fill="#444">two processes on one host; each pair of bars has its own scale'
             '</text>']
    for number, (gradients, *times) in enumerate(rows):
        y = TOP + row_height * number
        gradients = re.sub(r" \(\d+ tensors, (.*)\)", r", \1", gradients)
        lines.append(f'  <text x="{left - 12}" y="{y + 23}" text-anchor="end">{gradients}</text>')
        for bar, (name, time, color) in enumerate(zip(NAMES, times, (GREY, BLUE), strict=False)):
            length = max(most * float(time) / float(times[0]), 2)
            lines += [f'  <rect x="{left}" y="{y + 18 * bar}" width="{length:.0f}" height="16" fill="{color}"/>',
                      f'  <text x="{left + length + 6:.0f}" y="{y + 18 * bar + 13}" fill="#444">{time} ms'
                      f'{f", {name}" if number == 0 else ""}</text>']
    return svg(760, TOP + row_height * len(rows) + 8, left,
               "Milliseconds that averaging gradients adds to a step, two processes on one host",
               "Milliseconds that averaging gradients adds to a step", lines)


def slow_networks() -> str:
    """For each way a bar for each link, in proportion to the rows per second."""
    head, *rows = table("slow-networks.md")
    links = [found[1] for cell in head if (found := re.search(r"at (\d+ Mbit/s)", cell))]
    speeds = [[float(cell.replace(",", "")) for cell in row[1:1 + len(links)]] for row in rows]
    fastest = max(map(max, speeds))
    row_height, left, most, lines = 40, 360, 360, []
    colors = (BLUE, GREY, DARK)[:len(links)]
    for place, (link, color) in enumerate(zip(links, colors, strict=True)):
        lines += [f'  <rect x="{left + 150 * place}" y="36" width="12" height="12" fill="{color}"/>',
                  f'  <text x="{left + 150 * place + 18}" y="47" fill="#444">{link}</text>']
    for number, (row, of_way) in enumerate(zip(rows, speeds, strict=True)):
        y, thick = TOP + row_height * number, 32 // len(links)
        way = row[0].replace("`", "").replace('"', "&quot;")
        lines.append(f'  <text x="{left - 12}" y="{y + 20}" text-anchor="end">{way}</text>')
        for bar, (speed, color) in enumerate(zip(of_way, colors, strict=True)):
            length = max(most * speed / fastest, 2)
            lines += [f'  <rect x="{left}" y="{y + thick * bar}" width="{length:.0f}" height="{thick - 2}" '
                      f'fill="{color}"/>',
                      f'  <text x="{left + length + 6:.0f}" y="{y + thick * bar + 12}" fill="#444">{speed:,.0f}</text>']
    return svg(830, TOP + row_height * len(rows) + 8, left,
               "Rows per second of training on two hosts with a slow network between them",
               "Rows per second on two hosts of two ranks", lines)


def box(x: int, y: int, width: int, height: int, color: str, *texts: str) -> list[str]:
    """A rectangle with lines of text in its middle; white text on what is filled with a strong colour."""
    ink = "#fff" if color in (BLUE, DARK) else "#222"
    first = y + height / 2 + 5 - 8 * (len(texts) - 1)
    return [f'  <rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{color}" stroke="{DARK}"/>',
            *(f'  <text x="{x + width / 2:.0f}" y="{first + 16 * place:.0f}" text-anchor="middle" fill="{ink}">'
              f'{text}</text>' for place, text in enumerate(texts))]


def arrow(x: int, y: int, to_x: int, to_y: int, text: str = "") -> list[str]:
    """A line with a head at both ends, and a text to the right of its middle."""
    lines = [f'  <line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{DARK}" stroke-width="1.5" '
             'marker-start="url(#a)" marker-end="url(#a)"/>']
    if text:
        lines.append(f'  <text x="{(x + to_x) / 2 + 8:.0f}" y="{(y + to_y) / 2 + 4:.0f}" fill="#444">{text}</text>')
    return lines


def system() -> str:
    """Two hosts of two ranks: script, strategy and callback, engine thread, and the transports between the ranks."""
    lines = ['  <defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
             f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{DARK}"/></marker></defs>']
    for host in range(2):
        left = 16 + 408 * host
        lines += [f'  <rect x="{left}" y="40" width="388" height="312" rx="8" fill="#f3f6fa" stroke="{GREY}"/>',
                  f'  <text x="{left + 12}" y="60" fill="#444">host {"AB"[host]}</text>']
        for place in range(2):
            rank, x = 2 * host + place, left + 12 + 188 * place
            lines += box(x, 70, 176, 40, "#fff", f"rank {rank}: {'chief, writes files' if rank == 0 else 'worker'}",
                         "train.py")
            lines += box(x, 124, 176, 40, GREY, "MPIStrategy, or optimizer", "and broadcast callback")
            lines += arrow(x + 88, 164, x + 88, 196, "gradients")
            lines += box(x, 196, 176, 40, BLUE, "engine thread:", "negotiates, fuses")
            lines += arrow(x + 88, 236, x + 88, 262)
        lines += box(left + 12, 262, 364, 28, "#fff", "shared memory of the host, or NCCL between its GPUs")
        lines += arrow(left + 194, 290, left + 194, 320)
    lines += box(28, 320, 772, 24, DARK, "between hosts: MPI, or NCCL")
    return svg(828, 364, 16, "Ranks, their engine threads, and the transports between them",
               "mpistrat run -np 4 -H A:2,B:2 python train.py", lines)


PICTURES = {ROOT / "docs" / "images" / "system.svg": system,
            ROOT / "docs" / "images" / "averaging.svg": averaging,
            ROOT / "docs" / "images" / "slow-networks.svg": slow_networks}

if __name__ == "__main__":
    for path, draw in PICTURES.items():
        path.write_text(draw())
