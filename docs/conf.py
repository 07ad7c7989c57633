"""Sphinx configuration: `sphinx-build -W -b html docs OUTPUT` in a checkout, with `pip install '.[tensorflow,docs]'`.

The API reference is made from the docstrings, for which the package is imported: TensorFlow and Keras are installed,
an MPI library and a GPU are not needed. The build uses no network.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

# TensorFlow lists the devices of this machine while it is imported, and warns of those that are missing.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mpistrat

project = "mpistrat"
author = "the mpistrat authors"
copyright = author
version = release = mpistrat.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = False  # Docstrings name types of TensorFlow and numpy, whose references are on the network.
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


def _markdown_to_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are written as Markdown has it: code is an indented block, a list item begins with a quoted name.

    reStructuredText takes the first for a quotation, and the second for text. Sections of Google style ("Args:") have
    an indented block too, but without an empty line before it.
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
        converted.append(re.sub(r"(?<=[A-Z])_(?=\s)", r"\\_", line))  # "an MPISTRAT_ variable" is no reference
    lines[:] = converted


def _depth_above(lines: list[str], number: int) -> int:
    above = next(line for line in reversed(lines[:number]) if line.strip())
    return len(above) - len(above.lstrip())


def setup(app: Any) -> None:
    """Called by Sphinx; before napoleon's own listener."""
    app.connect("autodoc-process-docstring", _markdown_to_rst, priority=400)
