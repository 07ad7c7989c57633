"""`.ci/matrix`: which Pythons it takes, when it stops, and the page that it writes. No environment is made here."""

import importlib.machinery
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("mpistrat_ci_matrix", str(ROOT / ".ci" / "matrix"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)  # There would be a .ci/matrixc.
        patch.setitem(sys.modules, loader.name, module)  # Dataclasses look their module up.
        loader.exec_module(module)
    return module


def test_it_runs_the_pythons_of_the_metadata(matrix: ModuleType) -> None:
    assert matrix.supported_pythons() == ["3.10", "3.11", "3.12", "3.13"]
    assert os.access(ROOT / ".ci" / "matrix", os.X_OK)


def test_a_python_is_taken_only_if_it_runs_and_has_that_version(matrix: ModuleType, tmp_path: Path) -> None:
    shim = tmp_path / "python"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    assert matrix.find_python(HERE, [str(shim), sys.executable]) == (sys.executable, "")
    assert matrix.find_python("3.9", []) == ("", "no Python 3.9 on this machine")
    path, reason = matrix.find_python("3.9", [str(shim)])
    assert (path, reason) == ("", f"{shim} does not run, or lacks a module (venv, ssl, ctypes)")
    assert matrix.find_python("3.9", [sys.executable])[0] == ""


def test_the_steps_run_until_one_fails(matrix: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = matrix.steps_of(matrix.Result("3.12", "mpich"), tmp_path / "venv", tmp_path / "m.whl", tmp_path / "bare")
    names = ["install", "check", "check", "quick start", "quick start", "quick start", "tests", "tests"]
    assert [step.name for step in steps] == names
    assert f"{tmp_path / 'm.whl'}[tensorflow,mpich,examples]" in steps[0].command
    for step in steps:
        for word in step.command:
            if word.startswith(("tests/", "examples/")):
                assert (ROOT / word).exists(), word
    good = matrix.run_steps(steps, lambda step: (0, "3 passed, 1 skipped in 2 s"))
    assert good == {"install": "passed", "check": "passed", "quick start": "passed", "tests": "passed (6 tests)"}
    ran = []
    bad = matrix.run_steps(steps, lambda step: ran.append(step.name) or (int(step.name == "check"), "the reason"))
    assert ran == ["install", "check"]
    assert bad == {"install": "passed", "check": "failed (exit code 1)"}
    assert "the reason" in capsys.readouterr().err


def test_the_ends_of_the_range_of_packages(matrix: ModuleType, tmp_path: Path) -> None:
    def steps_of(packages: str) -> list[str]:
        result = matrix.Result("3.10", "openmpi", packages)
        return [" ".join(step.command) for step in matrix.steps_of(result, tmp_path, tmp_path / "m.whl", tmp_path)]

    oldest, nightly = steps_of("oldest"), steps_of("keras-nightly")
    assert oldest[0].endswith(" tensorflow==2.16.1 keras==3.0.5")
    assert not any("strategy" in command or "MPIStrategy" in command for command in oldest)
    assert [command for command in nightly if command.endswith("--pre keras-nightly")]
    assert any("MPIStrategy" in command for command in nightly)


def test_the_installed_copy_allows_the_next_keras(matrix: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "mpistrat" / "core" / "install.py"
    file.parent.mkdir(parents=True)
    file.write_text((ROOT / "mpistrat" / "core" / "install.py").read_text())
    code = f"import sysconfig\nsysconfig.get_path = lambda name: {str(tmp_path)!r}\n{matrix._ALLOW}"
    subprocess.run([sys.executable, "-c", code], check=True)
    allowed: dict[str, Any] = runpy.run_path(str(file), run_name="mpistrat.core.install")
    allowed["require_version"]("a part", "keras", "3.16.0.dev2026102704")


def test_a_command_that_does_not_end_is_ended(matrix: ModuleType, tmp_path: Path) -> None:
    step = matrix.Step("check", (sys.executable, "-c", "print('begun', flush=True)\nimport time\ntime.sleep(600)"),
                       tmp_path, 1.0)
    code, output = matrix.run_command(step, tmp_path, tmp_path / "log")
    assert code == 124
    assert output in ("begun\n", "")  # It may not have come that far on a slow machine.


def test_the_page_has_a_row_for_each_combination_and_the_reason_for_what_was_skipped(matrix: ModuleType) -> None:
    versions = {"Python": "3.10.1", "openmpi": "5.0", "tensorflow": "2.21", "keras": "3"}
    passed = matrix.Result("3.10", "openmpi", "newest", versions, dict.fromkeys(matrix.STEPS, "passed"))
    failed = matrix.Result("3.11", "mpich", outcomes={"install": "failed (exit code 1)"})
    skipped = matrix.Result("3.13", "mpich", skipped="no Python 3.13 on this machine")
    assert [result.state for result in (passed, failed, skipped)] == ["passed", "failed", "skipped"]
    page = matrix.page([passed, failed, skipped], "2026-01-01")
    rows = [line for line in page.splitlines() if line.startswith("| 3")]
    assert rows == ["| 3.10.1 | openmpi 5.0 | 2.21, 3 | passed | passed | passed | passed |",
                    "| 3.11 | mpich | - | failed (exit code 1) | not run | not run | not run |",
                    "| 3.13 | mpich | - | skipped: no Python 3.13 on this machine |  |  |  |"]
    assert "last run on 2026-01-01" in page


def test_the_documentation_has_a_result_for_each_combination(matrix: ModuleType) -> None:
    rows = re.findall(r"^\| (3\.\d+)\S* \| (\w+)", (ROOT / "docs" / "matrix.md").read_text(), re.MULTILINE)
    assert rows == [(python, mpi) for python, mpi, _ in matrix.combinations()]
