"""The objects of libraries are left out of Python's garbage collector in a job of several ranks only."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("keras")
SCRIPT = """
import gc, weakref
import mpistrat.keras
class Cyclic: pass
def make():
    found = Cyclic()
    found.itself = found
    return weakref.ref(found)
last = make()
gc.collect()
print(gc.get_freeze_count() > 100_000, last() is None)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("variables", "is_frozen"), [
    ({}, False), ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, True)])
def test_objects_of_libraries_are_frozen_and_those_of_the_script_are_collected(variables: dict[str, str],
                                                                              is_frozen: bool) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX", "PMI_"))}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env={**environ, **variables}, capture_output=True, text=True,
                          check=True)
    assert done.stdout.split() == [str(is_frozen), "True"]
