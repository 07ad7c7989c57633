"""Sphinx configuration: `sphinx-build -W -b html docs OUTPUT` in a checkout, with `pip install '.[tensorflow,docs]'`.

The API reference is generated from the docstrings. For this the package is imported, which needs TensorFlow and Keras
but no MPI library and no GPU. The build uses no network.
"""

import os
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

# TensorFlow prints the devices of this machine when it is imported, and warnings for those that are missing.
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


def setup(app: Sphinx) -> None:
    """Called by Sphinx. The priority puts the conversion before napoleon's."""
    app.connect("autodoc-process-docstring", _markdown_to_rst, priority=400)
