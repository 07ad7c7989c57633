"""The commands of docs/transcript.md print what the page shows."""

import os
import re
import sys
from pathlib import Path

import pytest

from ..support.jobs import ROOT, needs_mpirun, run_limited
from ..support.levels import sample

PAGE = (ROOT / "docs" / "transcript.md").read_text()
README = (ROOT / "README.md").read_text()
SCRIPT = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
COMMANDS = dict(re.findall(r"^```text\n\$ ([^\n]*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
TRAINS = "mpistrat run -np 2 python train.py"
# A change of the script, and what the command then prints.
MISTAKES = re.findall(r"^```diff\n(.*?)^```\n\n```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def assert_prints(command: str, shown: str, code: int, directory: Path) -> None:
    """Run a command of the page; white space and what `...` stands for do not matter."""
    # As after `source .venv/bin/activate`.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    job = run_limited(["sh", "-c", f'cd "$0" && MPISTRAT_DEADLOCK_S=3 {command}', str(directory)], env={"PATH": path})
    assert (job.code, job.left) == (code, ()), job.output
    pattern = ".*".join(re.escape("".join(part.split())) for part in shown.split("..."))
    assert re.search(pattern, "".join(job.output.split())), job.output


@needs_mpirun
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_what_the_page_shows(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    assert_prints(command, COMMANDS[command], 0, tmp_path)


@needs_mpirun
@sample(("change", "shown"), MISTAKES, ids=[change.splitlines()[-1] for change, _ in MISTAKES])
def test_a_mistake_looks_as_the_page_shows(change: str, shown: str, tmp_path: Path) -> None:
    before, after = ("".join(line[1:] for line in change.splitlines(keepends=True) if line[0] in f" {sign}")
                     for sign in "-+")
    assert before in SCRIPT
    (tmp_path / "train.py").write_text(SCRIPT.replace(before, after))
    assert_prints(TRAINS, shown, 1, tmp_path)


def test_the_page_has_the_script_and_the_extras_of_the_readme() -> None:
    assert len(COMMANDS) == 2 and TRAINS in COMMANDS and len(MISTAKES) == 4
    assert f"```python\n{SCRIPT}```" in README
    extras = re.findall(r"pip install '\.\[[a-z,]+\]'", PAGE)
    assert len(extras) == 1 and extras[0] in README
