"""Which process is the launcher, which processes end with a rank, and the reading of /proc."""

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from mpistrat.process import procfs
from mpistrat.process.launch_env import identity
from mpistrat.process.launcher_watch import launcher_here, workers_of
from mpistrat.process.procfs import Process, parse_stat

RANK_1 = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-a-7@1"}
HYDRA_1 = {"PMI_SIZE": "2", "PMI_RANK": "1", "PMI_FD": "9"}
SRUN_1 = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0"}
BATCH_SCRIPT = {"SLURM_JOB_ID": "5", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}


def process(pid: int, parent: int = 1, group: int = 0) -> Process:
    return Process(pid, 100 + pid, parent, group or pid)


@pytest.mark.parametrize(("own", "environs", "position"), [
    *((own, [{"PATH": "/bin"}, {}], 1) for own in (RANK_1, HYDRA_1, SRUN_1)),
    # Shells and profilers between the launcher and the rank are passed over.
    *((own, [{**own, "SHLVL": "2"}, own, {"PATH": "/bin"}, {}], 3) for own in (RANK_1, HYDRA_1, SRUN_1)),
    (SRUN_1, [SRUN_1, None, {}], 2),  # of another user
    ({**BATCH_SCRIPT, **RANK_1}, [BATCH_SCRIPT, BATCH_SCRIPT], 1),  # mpirun in a batch script of Slurm
    ({**SRUN_1, **RANK_1}, [SRUN_1, None], 1),  # a daemon that srun has started
    ({**RANK_1, "PMIX_NAMESPACE": "prterun-a-9@1"}, [RANK_1, RANK_1, {}], 1),  # mpirun that a rank has started
    (RANK_1, [], None), (RANK_1, [RANK_1], None)])  # out of sight
def test_the_launcher_is_the_first_ancestor_that_is_not_of_the_rank(
        own: Mapping[str, str], environs: list[Mapping[str, str] | None], position: int | None,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "ancestors", lambda _: [process(number) for number in range(1, len(environs) + 1)])
    monkeypatch.setattr(procfs, "environment_of", lambda pid: environs[pid - 1])
    found = launcher_here(own)
    assert (None if found is None else found.pid) == position


@pytest.mark.parametrize("environ", [{}, {"PATH": "/bin"}, BATCH_SCRIPT])
def test_without_a_launcher_nothing_is_watched(environ: Mapping[str, str]) -> None:
    assert identity(environ) == ()
    assert launcher_here(environ) is None


ASK = f"""
import os, subprocess, sys
from mpistrat.process.launcher_watch import launcher_here
from mpistrat.process.procfs import ancestors
if sys.argv[1:] != ["inner"]:
    sys.exit(subprocess.run([sys.executable, "-c", sys.orig_argv[2], "inner"]).returncode)
found = [process.pid for process in ancestors(os.getpid())]
print(found[0] == os.getppid(), 1 in found, launcher_here({RANK_1}).pid == os.getppid())
"""


def test_the_ancestors_of_a_process_are_found_and_its_launcher_among_them() -> None:
    # In a grandchild, because this process may be the first of a container.
    done = subprocess.run([sys.executable, "-c", ASK], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "True True True\n"


def test_what_a_rank_has_started_ends_with_it_unless_it_has_left_its_group() -> None:
    found = [process(15, 13, 10), process(14, 1, 10), process(13, 10, 13), process(12, 11, 10), process(11, 10, 10),
             process(10, 1, 10)]
    assert sorted(each.pid for each in workers_of(10, 10, found)) == [11, 12, 15]


STAT = "{} ({}) {} 41 42 43 0 -1 4194304 81 0 0 0 0 0 0 0 20 0 1 0 7777 2764800 235 18446744073709551615\n"


@pytest.mark.parametrize("name", ["python", "my prog (2) Z 1", ") R 1 2 ("])
def test_a_name_may_hold_anything(name: str) -> None:
    assert parse_stat(STAT.format(40, name, "S")) == Process(pid=40, started=7777, parent=41, group=42)


@pytest.mark.parametrize("state", ["Z", "X"])
def test_a_zombie_counts_as_ended(state: str) -> None:
    assert parse_stat(STAT.format(40, "mpirun", state)) is None


def test_a_process_is_alive_until_it_ends_even_if_it_is_then_a_zombie() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    found = procfs.find(child.pid)
    assert found.parent == os.getpid()
    assert found.is_alive()
    assert found in procfs.running()
    assert not Process(found.pid, found.started + 1, found.parent, found.group).is_alive()
    child.communicate()
    assert not found.is_alive()


def test_the_environment_of_a_process() -> None:
    environ = procfs.environment_of(os.getpid())
    assert "PATH" in environ
    assert procfs.environment_of(2**22 + 1) is None
