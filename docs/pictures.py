"""Draw docs/images/averaging.svg, the picture of the first page, from the table of results in docs/speed.md.

    python docs/pictures.py
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "averaging.svg"
WIDTH, ROW, LEFT, BAR, TOP = 760, 46, 170, 400, 66  # pixels; BAR is the length of Horovod's bar
NAMES = ("Horovod 0.28.1", "mpistrat")


def results() -> list[tuple[str, tuple[str, str]]]:
    """(gradients, milliseconds of each of NAMES) of the rows of the table."""
    table = (ROOT / "docs" / "speed.md").read_text().partition("<!-- results -->")[2].partition("<!-- /results -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", table, re.M)]
    assert rows[0][1:3] == list(NAMES)
    return [(re.sub(r" \(\d+ tensors, (.*)\)", r", \1", row[0]), (row[1], row[2])) for row in rows[2:]]


def draw() -> str:
    """The picture as SVG: for each column two bars, in proportion, with their milliseconds."""
    columns = results()
    height = TOP + ROW * len(columns) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="13" role="img">',
        "  <title>Milliseconds that averaging gradients adds to a step, two processes on one host</title>",
        f'  <rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'  <text x="{LEFT}" y="24" font-weight="bold">Milliseconds that averaging gradients adds to a step</text>',
        f'  <text x="{LEFT}" y="44" fill="#444">two processes on one host; each pair of bars has its own scale</text>']
    for number, (gradients, times) in enumerate(columns):
        y = TOP + ROW * number
        lines.append(f'  <text x="{LEFT - 12}" y="{y + 23}" text-anchor="end">{gradients}</text>')
        for bar, (name, time, color) in enumerate(zip(NAMES, times, ("#b9c0ca", "#2f6db5"), strict=True)):
            length = max(BAR * float(time) / float(times[0]), 2)
            lines += [f'  <rect x="{LEFT}" y="{y + 18 * bar}" width="{length:.0f}" height="16" fill="{color}"/>',
                      f'  <text x="{LEFT + length + 6:.0f}" y="{y + 18 * bar + 13}" fill="#444">{time} ms'
                      f'{f", {name}" if number == 0 else ""}</text>']
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw())
