"""The launcher ends before its ranks: mpirun is killed, and cannot end them."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ..support.jobs import living_after, mpirun_line, run_job, running, wait_until
from ..support.levels import sample

# The ranks look every second. All had ended after 0.7 s at most, with six busy processes more on two cores; a limit of
# little more than a second would measure when a busy machine lets the threads that look run.
SOON_S = 10


def kill_mpirun(tmp_path: Path, way: str, wrapper: Sequence[str] = ()) -> None:
    """Start two ranks, kill mpirun when they do what is named, and let nothing live on."""
    mark = tmp_path / "mark"
    command = [*wrapper, sys.executable, "tests/scripts/launcher_dies.py", way, mark]
    with running(mpirun_line(2, command)) as (process, job, _):
        wait_until(lambda: mark.exists() or process.poll() is not None, 120)
        assert process.poll() is None
        process.kill()
        process.wait()
        killed = time.monotonic()
        assert living_after(job, SOON_S) == ()
        print(f"all had ended {time.monotonic() - killed:.1f} s after mpirun")


@sample("way", ["sleep", "compute", "reduce", "wait", "wait at the end"])
def test_ranks_end_when_mpirun_was_killed_whatever_they_do(tmp_path: Path, way: str) -> None:
    kill_mpirun(tmp_path, way)


@pytest.mark.nightly
def test_ranks_end_when_mpirun_was_killed_behind_a_shell_and_say_so(tmp_path: Path) -> None:
    # The shell's own output goes to a file, for what passes through mpirun is lost with it.
    said = tmp_path / "said"
    kill_mpirun(tmp_path, "sleep", ["sh", "-c", f'"$@" 2>> {said}; exit $?', "sh"])
    assert said.read_text().count(") ends, because the process that launched it (") == 2


LIST = """
import threading, mpistrat
def watches(): return any(thread.name == "mpistrat-launcher-watch" for thread in threading.enumerate())
mpistrat.init()
print("in between", watches())
mpistrat.shutdown()
print("after", watches())
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("env", "watches"), [({}, True), ({"MPISTRAT_LAUNCHER_CHECK_DISABLE": "1"}, False)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_launcher_is_watched_from_init_to_shutdown_unless_the_setting_says_no(
        ranks: int, env: dict[str, str], watches: bool) -> None:
    job = run_job(ranks, ["python", "-c", LIST], env=env).well()
    assert job.output.count(f"in between {watches}\n") == ranks, job.output
    assert job.output.count("after False\n") == ranks, job.output
