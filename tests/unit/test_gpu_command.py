"""python -m tests.gpu: every part runs or is skipped with a reason, whatever the others do, within ten minutes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.calls import STEPS, counts_per_step, profiled
from tests.gpu.parts import PARTS, ROOT, Machine, Part, look_at_machine, run_all, summary


def program(text: str) -> tuple[str, ...]:
    """A command that runs this Python."""
    return sys.executable, "-c", text


def test_all_parts_together_take_ten_minutes_at_most() -> None:
    assert sum(part.limit_s for part in PARTS) <= 600


def test_a_part_that_fails_hangs_or_does_not_start_keeps_no_other_from_running() -> None:
    parts = [Part("fails", program("raise SystemExit(3)"), 60),
             Part("hangs", program("import time; time.sleep(99)"), 1),
             Part("is not there", ("/no/such/program",), 60), Part("passes", program(""), 60)]
    outcomes = run_all(parts, Machine())
    assert [outcome.text for outcome in outcomes] == [
        "FAILED with code 3", "FAILED: not done in 1 s",
        "FAILED to start: [Errno 2] No such file or directory: '/no/such/program'", "passed"]
    assert [outcome.has_failed for outcome in outcomes] == [True, True, True, False]
    assert len(summary(outcomes).splitlines()) == 4


def test_a_part_is_skipped_for_the_first_thing_that_it_lacks() -> None:
    part = Part("p", program("raise SystemExit(3)"), 60, ("gpu", "mpi"))
    outcome, = run_all([part], Machine(mpi="mpi4py is not installed", sanitizer="none"))
    assert outcome.text == "skipped: mpi4py is not installed" and not outcome.has_failed
    assert part.why_skipped(Machine(gpu="no GPU", mpi="none")) == "no GPU"
    assert part.why_skipped(Machine(sanitizer="none")) == ""


def test_without_a_gpu_every_part_says_why_it_is_skipped() -> None:
    reason = look_at_machine().gpu
    if not reason:
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, "-m", "tests.gpu"], cwd=ROOT, capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.split("== summary\n")[1].splitlines()
    assert [line.split("  ")[0] for line in lines] == [part.name for part in PARTS]
    assert all(f"skipped: {reason}" in line for line in lines)


@pytest.mark.parametrize("name", ["kernel", "one_rank", "calls"])
def test_the_programs_of_the_parts_run_on_the_stand_in(name: str) -> None:
    done = subprocess.run([sys.executable, "-m", f"tests.gpu.{name}", "--stand-in"], cwd=ROOT, capture_output=True,
                          text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


REPORT = f"""Generating SQLite file steps.sqlite from steps.nsys-rep
Processing [steps.sqlite] with [cuda_api_sum.py]...

Time (%),Total Time (ns),Num Calls,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
70.0,1,{3 * STEPS},1.0,1.0,1,1,0.0,cuLaunchKernel
20.0,1,{2 * STEPS},1.0,1.0,1,1,0.0,cudaStreamSynchronize
5.0,1,{STEPS},1.0,1.0,1,1,0.0,cudaEventSynchronize_v3020
5.0,1,{STEPS // 2},1.0,1.0,1,1,0.0,cudaMalloc
"""


def test_the_profilers_report_becomes_calls_per_step() -> None:
    assert counts_per_step(REPORT) == {"waits": 3, "allocations": 0.5, "frees": 0}
    with pytest.raises(ValueError, match="no calls of CUDA: SKIPPED"):
        counts_per_step("SKIPPED: steps.sqlite does not contain CUDA trace data.")


def test_the_profiler_runs_the_steps_and_then_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = tmp_path / "nsys"
    profiler.write_text(f"""#!{sys.executable}
import sys
if sys.argv[1] == "profile":
    assert sys.argv[-4:] == ["-m", "tests.gpu.calls", "--steps-of", "arrays"], sys.argv
    open(sys.argv[sys.argv.index("-o") + 1], "w").close()
else:
    open(sys.argv[-1]).close()
    print({REPORT!r})
""")
    profiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert profiled("arrays") == {"waits": 3, "allocations": 0.5, "frees": 0}
