"""Parameters that are annotated with a bare Any, of which mypy checks nothing, become no more."""

import ast
from collections.abc import Iterator
from pathlib import Path

import mpistrat

PACKAGE = Path(mpistrat.__file__).parent
# The numbers as they are. Lower them when there are fewer; a parameter of any type at all may be an `object`.
MOST_PARAMETERS = 10
MOST_STAR_PARAMETERS = 30


def is_any(annotation: ast.expr | None) -> bool:
    """Whether it is a bare Any, quoted or not."""
    return annotation is not None and ast.unparse(annotation).strip("'\"").rpartition(".")[2] == "Any"


def bare(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """(line, name, whether it has a star) of the parameters of a module that are annotated with a bare Any."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            named = node.args
            for each in (*named.posonlyargs, *named.args, *named.kwonlyargs):
                if is_any(each.annotation):
                    yield each.lineno, each.arg, False
            for star in (named.vararg, named.kwarg):
                if star is not None and is_any(star.annotation):
                    yield star.lineno, star.arg, True


def test_every_kind_of_parameter_is_counted() -> None:
    code = """
def f(a: Any, /, b: typing.Any, c: list[Any], d: int, e, *f: Any, g: "Any", **h: Any) -> Any:
    def i(j: Any = 1): pass
    lambda k: k
async def l(m: Any, n: Any | None): pass
"""
    assert sorted((name, has_star) for _, name, has_star in bare(ast.parse(code))) == [
        ("a", False), ("b", False), ("f", True), ("g", False), ("h", True), ("j", False), ("m", False)]


def test_parameters_of_a_bare_any_become_no_more() -> None:
    found: dict[bool, list[str]] = {False: [], True: []}
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, name, has_star in bare(ast.parse(path.read_text())):
            found[has_star].append(f"{path.relative_to(PACKAGE)}:{line} {name}")
    assert len(found[False]) <= MOST_PARAMETERS, "; ".join(found[False])
    assert len(found[True]) <= MOST_STAR_PARAMETERS, "; ".join(found[True])
