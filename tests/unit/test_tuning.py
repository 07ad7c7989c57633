"""Every tuning constant is explained where it is defined, and used somewhere else."""

import re
import subprocess
import sys
from pathlib import Path

import mpistrat

PACKAGE = Path(mpistrat.__file__).parent
TUNING = PACKAGE / "core" / "tuning.py"
# A block is two or more lines of comment, and then constants.
BLOCKS = [block.splitlines() for block in TUNING.read_text().split("\n\n") if re.search(r"^[A-Z]\w+ = ", block, re.M)]


def test_every_constant_has_what_it_decides_and_a_measurement_or_reason() -> None:
    for block in BLOCKS:
        comment = [line for line in block if line.startswith("# ")]
        assert block[:len(comment)] == comment and len(comment) >= 2, block


def test_every_constant_is_used() -> None:
    names = {line.split(" = ")[0] for block in BLOCKS for line in block if not line.startswith("#")}
    used = {word for path in PACKAGE.rglob("*.py") if path != TUNING for word in re.findall(r"\w+", path.read_text())}
    assert names and not names - used


def test_a_program_runs_with_another_value_of_a_constant(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys\nfrom mpistrat.transport.shm import two_shot\n"
                       "print(two_shot.TwoShotData.one_shot_bytes, sys.argv[1:])\n")

    def run(assignment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "tests.tuned", assignment, str(program), "a=b"], text=True,
                              cwd=PACKAGE.parent, capture_output=True, timeout=60, check=False)

    assert run("SHM_ONE_SHOT_BYTES=2*1024").stdout == "2048 ['a=b']\n"
    assert "has no constant SHM_ONE" in run("SHM_ONE=1").stderr
