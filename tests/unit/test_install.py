"""The pip commands that messages and pages name: one module has them, and they work today."""

import ast
import configparser
import re
from pathlib import Path

import pytest

from mpistrat.core import install
from mpistrat.core.install import EXTRAS, pip_extra

ROOT = Path(__file__).parents[2]
USER_FILES = [ROOT / "README.md", *(page for page in (ROOT / "docs").glob("*.md") if page.name != "release.md"),
              *(ROOT / "docs" / "deploy").iterdir(), *(ROOT / "examples").rglob("*.py")]
# The name of the package, or with extras; not a path such as /src/mpistrat.
OF_AN_INDEX = re.compile(r"""pip install (?:[^`\n&]*[ '"])?mpistrat(?:\[|['"\s]|$)""", re.MULTILINE)


@pytest.mark.parametrize(("is_published", "extra", "command"), [
    (False, "openmpi", "install openmpi"), (True, "gpu", "install 'mpistrat[gpu]'"),
    (False, "tensorflow", "install -U 'tensorflow>=2.16.1,<2.22' 'keras>=3.0.5,<3.16'"),
    (True, "tensorflow", "install -U 'mpistrat[tensorflow]'")])
def test_before_a_release_the_packages_of_an_extra_are_named_and_then_the_extra(
        is_published: bool, extra: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "IS_PUBLISHED", is_published)
    assert pip_extra(extra, upgrade="-U" in command) == f"pip {command}"


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_packages_are_those_of_the_extra(extra: str) -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert list(EXTRAS[extra]) == config["options.extras_require"][extra].split()


@pytest.mark.parametrize("path", sorted((ROOT / "mpistrat").rglob("*.py")), ids=lambda path: path.stem)
def test_no_other_module_has_a_pip_command(path: Path) -> None:
    if path.name == "install.py":
        return
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Constant)
                and isinstance(node.value, str) and "pip install" in node.value and id(node) not in docstrings]


@pytest.mark.parametrize(("line", "answer"), [
    ("pip install 'mpistrat[gpu]'", True), ('RUN pip install --no-cache-dir "mpistrat[${EXTRAS}]" numpy', True),
    ("pip install mpistrat", True), ("pip install -U mpistrat\nnext", True), ("pip install scikit-learn", False),
    ("pip install '.[tensorflow,openmpi]'", False), ('pip install "/src[${EXTRAS}]" && mpistrat doctor', False),
    ("pip install -q '.[test]' && .venv/bin/mpistrat run", False), ("pip install /src/mpistrat", False)])
def test_a_command_that_needs_an_index_is_found(line: str, answer: bool) -> None:
    assert (OF_AN_INDEX.search(line) is not None) is answer


def test_files_for_users_install_mpistrat_by_its_name_only_when_an_index_has_it() -> None:
    naming = [file.name for file in USER_FILES if OF_AN_INDEX.search(file.read_text())]
    if install.IS_PUBLISHED:
        assert {"README.md", "index.md", "running.md", "Dockerfile"} <= set(naming)
        # An index shows the README without the files beside it.
        assert re.findall(r"\]\((?!https://)[^)]*\)", (ROOT / "README.md").read_text()) == []
    else:
        assert naming == []
