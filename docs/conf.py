"""Sphinx configuration: `sphinx-build -W -b html docs OUTPUT` in a checkout, with `pip install '.[tensorflow,docs]'`.

The API reference is generated from the docstrings. For this the package is imported, which needs TensorFlow and Keras
but no MPI library and no GPU. Each file of examples/ becomes a page in docs/examples, which git ignores. The build uses
no network.
"""

import ast
import configparser
import itertools
import os
import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

# TensorFlow prints the devices of this machine when it is imported, and warnings for those that are missing.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mpistrat

ROOT = Path(__file__).resolve().parent.parent
project = "mpistrat"
author = "the mpistrat authors"
copyright = author
version = release = mpistrat.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
nitpicky = False  # Types of TensorFlow and numpy could only be resolved over the network.
# Single backticks in docstrings mark code, as in Markdown.
default_role = "literal"

myst_heading_anchors = 4

napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"

html_theme = "furo"
html_title = f"mpistrat {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
copybutton_prompt_text = "$ "  # On a terminal, only what was typed is copied.

config = configparser.ConfigParser()
config.read(ROOT / "setup.cfg")
_EDIT = config["metadata"]["url"] + "/edit/HEAD/"
html_theme_options = {"source_edit_link": _EDIT + "docs/{filename}"}
# Pages whose text is in another file.
_TEXT_OF = {"features": "tests/programs/features/README.md", "changelog": "CHANGELOG.md"}


def _markdown_to_rst(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Convert two Markdown forms in docstrings to reStructuredText: indented code, and lists of quoted names.

    reStructuredText reads an indented block as a quotation, and the list as plain text. A section of Google style
    ("Args:") is followed by an indented block too, but without an empty line between them.
    """
    converted: list[str] = []
    for number, line in enumerate(lines):
        before = lines[number - 1] if number else ""
        depth, previous = (len(text) - len(text.lstrip()) for text in (line, before))
        if line.strip() and not before.strip() and depth >= 4 and number > 1 and depth > _depth_above(lines, number):
            converted += ["::", ""] if not converted[-2].endswith("::") else []
        if re.match(r'\s{8}"\w+"(, "\w+")*: ', line):
            converted += [""] if depth > previous else []
            line = re.sub(r'^(\s+)"', r'\1*   "', line)
        converted.append(re.sub(r"(?<=[A-Z])_(?=\s)", r"\\_", line))  # "MPISTRAT_" is not a reference
    lines[:] = converted


def _depth_above(lines: list[str], number: int) -> int:
    above = next(line for line in reversed(lines[:number]) if line.strip())
    return len(above) - len(above.lstrip())


def _write_example_pages(app: Sphinx) -> None:
    """Write a page for each example: its docstring, with the commands as code, and the code below the docstring."""
    pages = ROOT / "docs" / "examples"
    pages.mkdir(exist_ok=True)
    written = set()
    for example in sorted((ROOT / "examples").glob("*.py")):
        first = ast.parse(example.read_text()).body[0]
        assert isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant), f"{example} has no docstring"
        parts = [f"# {example.name}", ""]
        for is_code, group in itertools.groupby(str(first.value.value).splitlines(), lambda line: line[:4] == "    "):
            lines = list(group)
            if is_code:
                parts += ["```bash", *(line[4:] for line in lines), "```"]
            else:
                parts += [re.sub(r"(?<!\S)--[\w-]+", r"`\g<0>`", line) for line in lines]  # an option, not a dash
        parts += ["", f"```{{literalinclude}} ../../examples/{example.name}", ":language: python",
                  f":lines: {(first.end_lineno or 0) + 2}-", "```", ""]
        page = pages / f"{example.stem}.md"
        if not page.exists() or page.read_text() != "\n".join(parts):  # Sphinx reads again what is newer.
            page.write_text("\n".join(parts))
        written.add(page)
    for page in set(pages.glob("*.md")) - written:
        page.unlink()


def _link_to_example_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """Make links to an example lead to its page. On a site with the repository's files they lead to the file."""
    source[0] = re.sub(r"\]\((?:\.\./)+examples/(\w+)\.py\)", r"](/examples/\1.md)", source[0])


def _edit_the_text(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Make "Edit this page" lead to the file that has the text."""
    text = f"{page}.py" if page.startswith("examples/") else _TEXT_OF.get(page)
    if text is not None:
        context["theme_source_edit_link"] = _EDIT + text


def setup(app: Sphinx) -> None:
    """Called by Sphinx. The priority puts the conversion before napoleon's."""
    app.connect("autodoc-process-docstring", _markdown_to_rst, priority=400)
    app.connect("builder-inited", _write_example_pages)
    app.connect("source-read", _link_to_example_pages)
    app.connect("html-page-context", _edit_the_text)
