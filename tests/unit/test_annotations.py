"""Parameters that are annotated with a bare Any, of which mypy checks nothing, become no more."""

import ast
from pathlib import Path

import mpistrat

PACKAGE = Path(mpistrat.__file__).parent
# The numbers as they are. Lower them when there are fewer; a parameter of any type at all may be an `object`.
MOST_PARAMETERS = 10
MOST_STAR_PARAMETERS = 30


def is_any(annotation: ast.expr | None) -> bool:
    """Whether it is a bare Any, quoted or not."""
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
