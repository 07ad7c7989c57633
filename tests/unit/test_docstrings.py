"""The docstrings of public names, annotations with a bare Any, and the comments of tuning constants."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import mpistrat

pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

MODULES = ("mpistrat", "mpistrat.tensorflow", "mpistrat.keras", "mpistrat.keras.callbacks",
           "mpistrat.keras.elastic", "mpistrat.tensorflow.elastic")
PACKAGE = Path(mpistrat.__file__).parent


@cache
def public() -> dict[str, Any]:
    """All public objects, by their full names. An object that several modules export is in it once."""
    found: dict[str, Any] = {}
    for module in MODULES:
        for name in importlib.import_module(module).__all__:
            value = getattr(importlib.import_module(module), name)
            if not any(value is other for other in found.values()) and not inspect.ismodule(value):
                found[f"{module}.{name}"] = value
    return found


def is_ours(value: object) -> bool:
    return str(getattr(value, "__module__", "")).split(".")[0] == "mpistrat"


def texts() -> Iterator[tuple[str, str]]:
    """(full name, docstring) of public modules, functions and classes, and of the methods that mpistrat defines."""
    for module in MODULES:
        yield module, inspect.getdoc(importlib.import_module(module)) or ""
    for name, value in public().items():
        if inspect.isclass(value) or inspect.isfunction(value):
            yield name, inspect.getdoc(value) or ""
        members = [member for base in value.__mro__ if is_ours(base) for member in vars(base)] \
            if inspect.isclass(value) else []
        for member in members:
            attribute = inspect.getattr_static(value, member)
            if not member.startswith("_") and (isinstance(attribute, property) or inspect.isroutine(attribute)):
                yield f"{name}.{member}", inspect.getdoc(getattr(value, member)) or ""


@cache
def private_classes() -> set[str]:
    """The names of the classes of mpistrat that are not public, and cannot be taken for a word of English."""
    names = {node.name for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.ClassDef)}
    of_users = {name.rsplit(".", 1)[-1] for name in public()} | {"TensorFlow"}
    return {name for name in names - of_users if re.search(r"[a-z][A-Z]|^[A-Z]{2}|^_|Compressor", name)}


def problems_of(text: str) -> list[str]:
    if not text:
        return ["it is missing"]
    known = {full.rsplit(".", 1)[-1] for full in public()}
    found = [f"it names {word}" for word in set(re.findall(r"\w+", text)) & private_classes()]
    found += [f"it names the module {module}" for module in re.findall(r"\b\w+\.py\b", text)]
    places = (place.rstrip(".") for place in re.findall(r"\b[Ss]ee (?:also )?`?([\w.]+)", text))
    return found + [f"see {place}: no such public name" for place in places
                    if place.rsplit(".", 1)[-1] not in known and not place.startswith(("tf.", "keras."))]


def test_public_docstrings_exist_and_name_nothing_private() -> None:
    assert {name: problems for name, text in texts() if (problems := problems_of(text))} == {}
    assert len(list(texts())) > 80 and problems_of("As GradientReducer.")


PACKAGE = Path(mpistrat.__file__).parent
# The numbers as they are. Lower them when there are fewer; a parameter of any type at all may be an `object`.
MOST_PARAMETERS = 10
MOST_STAR_PARAMETERS = 30


def is_any(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation).strip("'\"").rpartition(".")[2] == "Any"


def test_parameters_of_a_bare_any_become_no_more() -> None:
    found: dict[bool, list[str]] = {False: [], True: []}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                stars = (node.args.vararg, node.args.kwarg)
                for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, *stars):
                    if each is not None and is_any(each.annotation):
                        found[each in stars].append(f"{path.relative_to(PACKAGE)}:{each.lineno} {each.arg}")
    assert 0 < len(found[False]) <= MOST_PARAMETERS, "; ".join(found[False])
    assert 0 < len(found[True]) <= MOST_STAR_PARAMETERS, "; ".join(found[True])


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
