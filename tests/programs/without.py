"""Run a script as if some packages were not installed.

usage: without.py SCRIPT PACKAGE
"""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = {"scikit-learn": "sklearn.datasets"}
script, package = sys.argv[1:]
sys.argv = [script]
with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, MODULES.get(package, package), None)
    runpy.run_path(str(ROOT / script), run_name="__main__")
