"""Collects the markers of the tests, and makes the page of them and of rows.txt. Reads files only; imports no test."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
ROWS = Path(__file__).parent / "rows.txt"
PAGE = ROOT / "docs" / "horovod-table.md"
HEAD = """# Horovod's features, and the tests that prove them

What Horovod 0.28.1 has for TensorFlow and Keras, what mpistrat does, and the tests. "same" means that Horovod's scripts
cannot tell the difference. [Coming from Horovod](horovod.md) has the differences that matter when a script moves.

This page is the output of `python -m tests.horovod`: of a list of rows, and of the markers of the tests.
"""
_NO = "no: "


class Row(NamedTuple):
    """A fact about Horovod: its section of the page, its name in markers, the fact, and what mpistrat does."""

    section: str
    name: str
    horovod: str
    ours: str

    @property
    def is_left_out(self) -> bool:
        return self.ours.startswith(_NO)


class Marked(NamedTuple):
    """A test, as file (from the root) and function, and the rows that it proves."""

    file: str
    function: str
    rows: tuple[str, ...]


def read_rows(text: str) -> list[Row]:
    """The rows of rows.txt: a line each, in sections that begin with `# title`; before the first there is prose."""
    rows: list[Row] = []
    section = ""
    for line in text.splitlines():
        if line.startswith("# "):
            section = line[2:]
        elif section and line:
            cells = [cell.strip() for cell in line.split(" | ")]
            if len(cells) != 3 or not all(cells):
                raise ValueError(f"not `name | what Horovod has | what mpistrat does`: {line}")
            if cells[0] in {row.name for row in rows}:
                raise ValueError(f"two rows are called {cells[0]}")
            rows.append(Row(section, *cells))
    return rows


def read_markers(file: str, source: str) -> list[Marked]:
    """The marked tests of one file, in its order.

    Raises:
        ValueError: A marker is on something that pytest does not collect as a test, or has no names or other arguments.
    """
    tree = ast.parse(source)
    found = []
    for function, place in _tests(tree):
        markers = [mark for mark in function.decorator_list if _is_marker(mark)]
        names = [name for mark in markers if isinstance(mark, ast.Call) for name in _names(file, mark)]
        if names:
            found.append(Marked(file, place, tuple(names)))
    used = sum(_is_marker(node) for node in ast.walk(tree) if isinstance(node, ast.Call))
    on_tests = sum(_is_marker(mark) for function, _ in _tests(tree) for mark in function.decorator_list)
    if used != on_tests or (found and not Path(file).name.startswith("test_")):
        raise ValueError(f"{file}: a marker `horovod` is not on a test function")
    return found


def marked_tests() -> list[Marked]:
    return [each for path in sorted((ROOT / "tests").rglob("*.py"))
            for each in read_markers(path.relative_to(ROOT).as_posix(), path.read_text())]


def problems(rows: Sequence[Row], tests: Sequence[Marked]) -> list[str]:
    """What is wrong between rows and tests; nothing if each row has either a test or a reason."""
    proved = {name for test in tests for name in test.rows}
    left_out = {row.name for row in rows if row.is_left_out}
    unknown = [f"{test.file}::{test.function} names a row that does not exist: {name}"
               for test in tests for name in test.rows if name not in {row.name for row in rows}]
    return [*unknown,
            *(f"{row.name}: no test proves it; mark one, or write why it is left out" for row in rows
              if row.name not in proved | left_out),
            *(f"{name}: is left out, but a test proves it" for name in sorted(left_out & proved))]


def page(rows: Sequence[Row], tests: Sequence[Marked]) -> str:
    tests_of: dict[str, list[Marked]] = {}
    for test in tests:
        for name in test.rows:
            tests_of.setdefault(name, []).append(test)
    lines = [HEAD]
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            lines += [f"\n## {section}\n", "| Horovod | mpistrat | test |", "|---|---|---|"]
        lines.append(f"| {row.horovod} | {row.ours} | {_links(tests_of, row.name)} |")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def _links(tests_of: Mapping[str, Sequence[Marked]], row: str) -> str:
    return "<br>".join(f"[{test.file.removeprefix('tests/')}::{test.function}](../{test.file})"
                       for test in tests_of.get(row, ()))


def _tests(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, str]]:
    """The functions that pytest collects, each with its place in the file."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node, node.name
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name.startswith("test_"):
                    yield method, f"{node.name}::{method.name}"


def _is_marker(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.horovod"


def _names(file: str, mark: ast.Call) -> list[str]:
    names = [argument.value for argument in mark.args
             if isinstance(argument, ast.Constant) and isinstance(argument.value, str)]
    if not names or len(names) != len(mark.args) or mark.keywords:
        raise ValueError(f"{file}: {ast.unparse(mark)} does not name rows")
    return names
