"""The docstrings of public names: they exist, they are ours, and they refer to nothing that is private."""

import ast
import importlib
import inspect
import re
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
    """What is wrong with a public docstring."""
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
