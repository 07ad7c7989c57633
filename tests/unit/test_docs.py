"""The README and the pages of docs/, as far as a test can check them without running them: links, code, messages."""

import ast
import configparser
import importlib
import importlib.util
import re
import runpy
import subprocess
import textwrap
import xml.etree.ElementTree
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from mpistrat.cli.main import COMMANDS
from mpistrat.core.settings import Settings

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
MADE = ROOT / "docs" / "examples"  # by docs/conf.py
PAGES = sorted([README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "tests/programs/features/README.md",
                *(ROOT / ".github").rglob("*.md"), *(ROOT / "examples").rglob("*.md"),
                *(page for page in (ROOT / "docs").rglob("*.md") if MADE not in page.parents)])
MOST_LINES = 130  # of the README
# A code block, in a list too.
FENCED = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
# A table of messages marks in this way where a name or a number stands.
GAP = "…"


def titled(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=titled)


@cache
def text_of(page: Path) -> str:
    return page.read_text()


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The code blocks of one language: the line that each begins in, and its text."""
    text = text_of(page)
    return [(text.count("\n", 0, block.start()) + 2, textwrap.dedent(block[3])) for block in FENCED.finditer(text)
            if block[2] == language]


def prose(page: Path) -> str:
    """The page without code blocks, and without code in a line."""
    return re.sub(r"`[^`\n]*`", "code", FENCED.sub("", text_of(page)))


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def extras() -> dict[str, str]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return dict(config["options.extras_require"])


def section(page: Path, mark: str) -> str:
    """What stands between `<!-- mark -->` and `<!-- /mark -->`."""
    text = text_of(page)
    return text[text.index(f"<!-- {mark} -->"):text.index(f"<!-- /{mark} -->")]


# -- links ------------------------------------------------------------------------------------------------------------


@each_page
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for link in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in anchors(target), f"{link}: there are {sorted(anchors(target))}"


# The changelog may name what is no longer there.
each_page_of_today = pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"],
                                             ids=titled)


@each_page_of_today
def test_files_modules_settings_and_extras_that_are_named_exist(page: Path) -> None:
    text = text_of(page)
    for path in re.findall(r"(?<![\w/.~-])((?:examples|hostfiles|tests|mpistrat|docs)/[\w./-]*\w)", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m ((?:tests|mpistrat)[\w.]*\w)", text):
        assert importlib.util.find_spec(module), module
    known = {"MPISTRAT_X", *(name for name, _, _ in Settings.table())}
    assert set(re.findall(r"\bMPISTRAT_[A-Z_]*[A-Z]\b", text)) <= known
    groups = re.findall(r"(?:mpistrat|\.|\))\"?\[([a-z,]+)\]", text)
    assert {extra for group in groups for extra in group.split(",")} <= set(extras())


def test_each_example_has_a_row_in_the_table_of_examples() -> None:
    table = text_of(ROOT / "docs" / "tutorials.md").partition("## Examples")[2].partition("\n## ")[0]
    for example in (ROOT / "examples").glob("*.py"):
        assert f"](../examples/{example.name})" in table


def test_the_pictures_of_results_and_of_states_are_those_of_the_tables() -> None:
    for path, draw in runpy.run_path(str(ROOT / "docs" / "pictures.py"))["PICTURES"].items():
        assert path.read_text() == draw(), "python docs/pictures.py"
    module = runpy.run_path(str(ROOT / "docs" / "states.py"))
    for name, picture in module["PICTURES"].items():
        assert (module["IMAGES"] / name).read_text() == picture.svg(), "python docs/states.py"


def test_the_page_of_private_names_is_that_of_the_sources() -> None:
    module = runpy.run_path(str(ROOT / "docs" / "private_names.py"))
    assert module["PAGE"].read_text() == module["page"](), "python docs/private_names.py"


def test_each_picture_is_well_formed_and_shown() -> None:
    shown = "".join(text_of(page) for page in PAGES)
    for picture in (ROOT / "docs" / "images").iterdir():
        xml.etree.ElementTree.parse(picture)
        assert f"images/{picture.name})" in shown


# -- code blocks ------------------------------------------------------------------------------------------------------


def names_of_mpistrat(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, attributes joined by dots; "" for the module itself) of all that a block takes from mpistrat."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "mpistrat":
                    modules[alias.asname or "mpistrat"] = alias.name if alias.asname else "mpistrat"
                    yield alias.name, ""
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mpistrat":
            yield from ((str(node.module), alias.name) for alias in node.names)
    for node in ast.walk(tree):
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        if attributes and isinstance(node, ast.Name) and node.id in modules:
            yield modules[node.id], ".".join(attributes)


@each_page
def test_python_blocks_compile_and_name_what_exists(page: Path) -> None:
    for line, text in blocks(page, "python"):
        compile(text, f"{titled(page)}:{line}", "exec")
        for module, attributes in names_of_mpistrat(ast.parse(text)):
            found = importlib.import_module(module)
            for attribute in attributes.split(".") if attributes else ():
                assert hasattr(found, attribute), f"line {line}: {module}.{attributes}"
                found = getattr(found, attribute)


def test_the_readme_has_a_whole_script_for_each_front_door() -> None:
    scripts = [text for _, text in blocks(README, "python")]
    assert [text for text in scripts if "DistributedOptimizer(" in text and "hvd.init()" in text and ".fit(" in text]
    assert [text for text in scripts if "MPIStrategy()" in text and "strategy.scope()" in text and ".fit(" in text]
    for text in scripts:
        # A name that nothing binds would be an error only when the script runs.
        tree = ast.parse(text)
        bound = {alias.asname or alias.name.split(".")[0] for node in ast.walk(tree)
                 if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
        bound |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        assert used - bound <= {"len", "slice", "print"}


@each_page
def test_bash_blocks_have_a_correct_syntax(page: Path) -> None:
    for line, text in blocks(page, "bash"):
        checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
        assert checked.returncode == 0, f"line {line}: {checked.stderr}"
        for command in re.findall(r"(?:^|[/ ])mpistrat ([a-z-]+)", text, re.MULTILINE):
            assert command in COMMANDS, f"line {line}: mpistrat {command}"


def test_ci_runs_the_command_below_the_test_mark_and_builds_the_pages() -> None:
    after = text_of(README)[text_of(README).index("<!-- test -->"):]
    command = re.search(r"^```bash\n(.*?)^```$", after, re.DOTALL | re.MULTILINE)
    assert command and command.group(1).rstrip().endswith("-m pytest")
    ci = (ROOT / ".ci" / "run").read_text()
    assert "<!-- test -->" in ci
    assert "sphinx-build -W -b html docs" in ci


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "limits.md"], ids=titled)
def test_the_extra_for_tensorflow_allows_the_versions_that_were_run(page: Path) -> None:
    [(low_tf, low_keras, high_tf, high_keras)] = re.findall(
        r"([\d.]+) with Keras ([\d.]+) to ([\d.]+) with Keras ([\d.]+)", text_of(page))

    def after(version: str) -> str:
        major, minor = version.split(".")[:2]
        return f"{major}.{int(minor) + 1}"

    assert extras()["tensorflow"].split() == [
        f"tensorflow>={low_tf},<{after(high_tf)}", f"keras>={low_keras},<{after(high_keras)}"]


def test_the_readme_is_short() -> None:
    assert len(text_of(README).splitlines()) <= MOST_LINES


# -- settings, messages, names ----------------------------------------------------------------------------------------


def test_the_settings_table_is_that_of_the_code() -> None:
    rows = [f"| `{name}` | {default} | {doc} |" for name, default, doc in Settings.table()]
    table = section(ROOT / "docs" / "settings.md", "settings")
    assert [line for line in table.splitlines() if line.startswith("| `")] == rows


@cache
def messages() -> str:
    """All texts in the sources of the package but docstrings, each on a line; GAP is what a program puts in."""
    found = []
    for path in (ROOT / "mpistrat").rglob("*.py"):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in docstrings:
                continue
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in parts
                                 if isinstance(part, ast.Constant | ast.FormattedValue)).replace("\n", " "))
    return "\n".join(found)


def quoted(page: Path) -> list[tuple[str, str]]:
    """The messages in a page's table or headings of errors, each with the word in brackets that may stand behind it."""
    return re.findall(r"^(?:\||###) `([^`]+)`(?: \((\w+)\))?(?: \||$)", section(page, "errors"), re.MULTILINE)


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "troubleshooting.md"], ids=titled)
def test_messages_that_are_quoted_stand_in_the_sources(page: Path) -> None:
    texts = messages()
    for message, word in quoted(page):
        for part in message.split(GAP):
            fixed = part.strip(" ,()")
            # Short ones such as "s for" would be found anywhere.
            if len(fixed) > 8 or part == message:
                assert fixed in texts, f"{message}: {fixed!r} is in no text of the package"
        assert re.search(rf"^{word}", texts, re.MULTILINE), f"{message}: no text of the package begins with {word!r}"


def test_the_readme_lists_five_messages_that_troubleshooting_explains() -> None:
    page = ROOT / "docs" / "troubleshooting.md"
    short, long = quoted(README), quoted(page)
    assert "\n|" not in section(page, "errors"), "a message has a heading there, since its remedy is long"
    assert len(short) == 5
    assert set(short) <= set(long)


API_PAGES = {"mpistrat": "arrays.md", "mpistrat.tensorflow": "tensorflow.md", "mpistrat.keras": "keras.md",
             "mpistrat.keras.callbacks": "keras.md", "mpistrat.keras.elastic": "keras.md",
             "mpistrat.tensorflow.elastic": "tensorflow.md"}
_DIRECTIVE = re.compile(r"^\.\. (auto\w+|py:data|currentmodule):: ([\w.]+)$", re.MULTILINE)


@cache
def directives(page: str) -> set[tuple[str, str]]:
    """(module, name) of all that a page of the API reference documents by a directive."""
    found, module = set(), ""
    for kind, name in _DIRECTIVE.findall(text_of(ROOT / "docs" / "api" / page)):
        if kind in ("currentmodule", "automodule"):
            module = name
        if kind != "currentmodule":
            found.add((name.rpartition(".")[0], name.rpartition(".")[2]) if kind == "automodule" else (module, name))
    return found


@pytest.mark.parametrize("module", API_PAGES)
def test_the_api_reference_has_all_public_names(module: str) -> None:
    public, page = importlib.import_module(module), API_PAGES[module]
    own = {name for owner, name in directives(page) if owner == module}
    assert own <= set(public.__all__), "not public"
    named = set(re.findall(r"`(\w+)`", text_of(ROOT / "docs" / "api" / page)))
    for name in public.__all__:
        assert name in own | named, f"{page} does not have {module}.{name}"
        if name not in own:
            # Named on this page, and described where another module has the same.
            value = getattr(public, name)
            assert any((other, name) in directives(API_PAGES[other])
                       and getattr(importlib.import_module(other), name) is value for other in API_PAGES), name


@pytest.mark.parametrize("alias", ["mpistrat.tensorflow.keras", "mpistrat.tensorflow.keras.callbacks"])
def test_horovods_names_of_modules_have_the_same_public_names(alias: str) -> None:
    module = importlib.import_module(alias)
    original = importlib.import_module(alias.replace("tensorflow.", ""))
    assert module.__all__ == original.__all__
    for name in module.__all__:
        # `callbacks` is the original module until the module of Horovod's name has been imported.
        names = (f"{alias}.{name}", f"{original.__name__}.{name}")
        assert getattr(module, name) is getattr(original, name) or getattr(module, name).__name__ in names
