"""The figures that the pages name and programs measure: docs/figures.json. `python docs/figures.py` writes both anew.

A phrase is a regular expression in which {} stands for a number. In all pages the number in a phrase is the one of the
file. "computed" comes from what the measuring programs have left in the repository, and from the code; a run that left
nothing there is under "once", with its date.
"""

import configparser
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = Path(__file__).with_suffix(".json")
NUMBER = r"(\d[\d,.]*\d|\d)"


def pages() -> list[Path]:
    """The pages that people write. The others are the output of programs."""
    made = {"matrix.md", "horovod-table.md", "settings.md"}
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md",
            *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in made)]


def pattern(phrase: str) -> re.Pattern[str]:
    """What finds a phrase, also across the end of a line."""
    return re.compile(phrase.replace("{}", NUMBER).replace(" ", r"\s+"))


def computed() -> dict[str, str]:
    """Each phrase with its figure."""
    sys.path.insert(0, str(ROOT))
    from mpistrat.core.settings import Settings
    from tests.durations import FILE as DURATIONS
    from tests.durations import Durations
    from tests.gpu.parts import PARTS
    settings = Settings()
    durations = Durations.read(DURATIONS.read_text()).units.values()
    features = re.findall(r"(\d+) of (\d+)", (ROOT / "tests/programs/features/README.md").read_text())
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    pythons = re.findall(r"Python :: (3\.\d+)", config["metadata"]["classifiers"])
    scripts = [*(ROOT / "tests/programs/scripts").glob("*.py")]

    def minutes(seconds: float) -> str:
        return str(math.ceil(seconds / 60))

    return {
        r"{} minutes of tests": str(5 * round(sum(first for first, _ in durations) / 300)),
        r"everything that needs a GPU, in {} minutes": minutes(sum(part.limit_s for part in PARTS)),
        r"trusts the path, in {} minutes": minutes(sum(part.limit_s for part in PARTS if part.is_must)),
        r"(?:reported|report) after {} s\b": f"{settings.stall_warning_s:g}",
        r"ends?(?: the job)? after {} minutes": minutes(settings.stall_abort_s),
        r"(?:rank,|error|found|reported) after {} seconds": f"{settings.deadlock_s:g}",
        r"lists {} features": features[0][1],
        r"{} under `MultiWorkerMirroredStrategy`": features[2][0],
        r"{} under `MirroredStrategy`": features[3][0],
        r"{} under `CentralStorageStrategy`": features[4][0],
        r"{} to 3\.\d+, (?:on Linux|each with)": pythons[0],
        r"3\.\d+ to {}, (?:on Linux|each with)": pythons[-1],
        r"Programs of at most {} lines": str(10 * math.ceil(
            max(len(script.read_text().splitlines()) for script in scripts) / 10)),
    }


def filled(text: str, figures: dict[str, str]) -> Iterator[tuple[int, int, str, str]]:
    """(start, end, number, figure) of each number of a phrase in a page."""
    for phrase, figure in figures.items():
        yield from ((*found.span(1), found[1], figure) for found in pattern(phrase).finditer(text))


def main() -> None:
    """Write the file, and the figures into the pages."""
    figures = json.loads(FILE.read_text())
    figures["computed"] = computed()
    FILE.write_text(json.dumps(figures, indent=1) + "\n")
    for page in pages():
        text = page.read_text()
        for start, end, _, figure in sorted(filled(text, figures["computed"]), reverse=True):
            text = text[:start] + figure + text[end:]
        page.write_text(text)


if __name__ == "__main__":
    main()
