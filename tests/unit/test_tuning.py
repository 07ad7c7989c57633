"""Every tuning constant is explained where it is defined, and used somewhere else."""

import re
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
