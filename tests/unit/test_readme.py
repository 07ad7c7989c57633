"""What the README promises can be checked without running it: settings, extras, names, files."""

import ast
import configparser
import re
from pathlib import Path

from mpistrat.settings import Settings

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The README's code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_the_settings_table_is_that_of_the_code() -> None:
    rows = [f"| `{name}` | {default} | {doc} |" for name, default, doc in Settings.table()]
    table = README[README.index("<!-- settings -->"):README.index("<!-- /settings -->")]
    assert [line for line in table.splitlines() if line.startswith("| `")] == rows


def test_the_extras_in_commands_exist() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    groups = re.findall(r"(?:mpistrat|\.)\[([a-z,]+)\]", README)
    named = {extra for group in groups for extra in group.split(",")}
    assert named
    assert named <= set(config["options.extras_require"])


def test_python_blocks_parse_and_use_names_that_exist() -> None:
    import mpistrat
    for block in blocks("python"):
        ast.parse(block)
        for name in re.findall(r"\bmpistrat\.([a-z_]+)\(", block):
            assert name in mpistrat.__all__


def test_ci_runs_the_command_below_the_test_mark() -> None:
    after = README[README.index("<!-- test -->"):]
    command = re.search(r"^```bash\n(.*?)^```$", after, re.DOTALL | re.MULTILINE)
    assert command and command.group(1).rstrip().endswith("-m pytest")
    assert "<!-- test -->" in (ROOT / ".ci" / "run").read_text()


def test_files_that_are_named_exist() -> None:
    for path in re.findall(r"\b((?:examples|hostfiles|tests)/[\w./]*\w)", README):
        assert (ROOT / path).exists(), path
