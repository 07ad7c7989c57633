"""The private names of TensorFlow and Keras that mpistrat uses: `python docs/private_names.py` writes private-names.md.

It reads the sources: what is imported of private modules, and the functions that `replaces` registers
(mpistrat/keras/bridge/patches.py).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path(__file__).with_name("private-names.md")
_PRIVATE = ("tensorflow.python", "tensorflow.core", "tensorflow.compiler", "keras.src", "tf_keras.src")
_HEAD = """# Private names

mpistrat uses names of TensorFlow and Keras that are not public, and replaces functions of Keras. So it refuses versions
that it was not run with, and says which it needs. Attributes that begin with `_` are used in `private_names.py` of
`keras/` and `tensorflow/bridge/`, and beside them. This page is the output of `python docs/private_names.py`.

If another version lacks a name, `import mpistrat.keras` fails with an ImportError that has the name. A function that is
gone is not replaced, with the consequence in the last table. If a replaced function has other code, a test fails, and
[Replace a function of Keras](contributing.md#replace-a-function-of-keras) says what to do. Each night
`.ci/matrix --packages keras-nightly` runs the tests of training with Keras' next version.
"""


def modules() -> Iterator[tuple[str, ast.Module]]:
    """(path below the package, its source) of each module."""
    for path in sorted((ROOT / "mpistrat").rglob("*.py")):
        yield str(path.relative_to(ROOT / "mpistrat")), ast.parse(path.read_text())


def imported() -> Iterator[str]:
    """For each file a row with the private modules, and the names of each."""
    for path, tree in modules():
        found: dict[str, list[str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PRIVATE):
                found.setdefault(str(node.module), []).extend(alias.name for alias in node.names)
        if found:
            cells = (f"`{module}`: {', '.join(f'`{name}`' for name in sorted(names))}"
                     for module, names in sorted(found.items()))
            yield f"| {path} | {'; '.join(cells)} |"


def replaced() -> Iterator[str]:
    """For each file a row with the functions, each with what would happen without the replacement."""
    for path, tree in modules():
        texts = {node.targets[0].id: node.value.value for node in tree.body if isinstance(node, ast.Assign)
                 and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Constant)}
        aliases = {alias.asname: alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                   for alias in node.names if alias.asname}
        found, reason = [], ""
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and len(call.args) > 2 \
                    and aliases.get(name := ast.unparse(call.func), name).startswith("replaces"):
                owner, function, given = call.args[:3]
                text = str(given.value if isinstance(given, ast.Constant) else texts[ast.unparse(given)])
                reason = text.replace("likewise", reason)
                found.append(f"`{ast.unparse(owner)}.{ast.literal_eval(function)}`: {reason}")
        if found:
            yield f"| {path} | {'; '.join(found)} |"


def page() -> str:
    """The text of the page."""
    lines = [_HEAD, "| file in `mpistrat/` | imports |", "|---|---|", *imported(), "",
             "| file in `mpistrat/` | functions of Keras, and what would happen if they were not replaced |",
             "|---|---|", *replaced()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
