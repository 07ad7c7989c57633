"""The table of launchers: each entry by itself, and the order in which a process looks for its own."""

import re
import shlex
import subprocess
from collections.abc import Mapping

import pytest

from mpistrat.cli.arguments import parse_list, split_arguments
from mpistrat.cli.mpirun import Job, Machine, Mpirun, compose, parse_version
from mpistrat.cli.run import _parser
from mpistrat.core.errors import LaunchError
from mpistrat.process.launch_env import identity, launched_rank, launched_size
from mpistrat.process.launchers import LAUNCHERS, PALS, STARTED, Launcher, local_rank, rank_in_shell

# What each launcher gives rank 2 of 3, which is rank 0 of 1 on its host, and the line by which it starts two hosts.
OF_RANK: dict[str, dict[str, str]] = {
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                 "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "PMIX_RANK": "2", "PMIX_NAMESPACE": "prterun-a-7@1"},
    "PALS": {"PALS_RANKID": "2", "PALS_APID": "7", "PMI_RANK": "2", "PMI_SIZE": "3", "PMI_LOCAL_RANK": "0",
             "PMI_LOCAL_SIZE": "1"},
    "MPICH": {"PMI_RANK": "2", "PMI_SIZE": "3", "PMI_FD": "9", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
    "MVAPICH": {"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "3", "MV2_COMM_WORLD_LOCAL_RANK": "0",
                "MV2_COMM_WORLD_LOCAL_SIZE": "1"},
    "Slurm": {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1",
              "SLURM_STEP_ID": "0"},
    "PMIx": {"PMIX_RANK": "2", "PMIX_NAMESPACE": "a"},
}
OF_RANK["Intel MPI"] = OF_RANK["MPICH"]
LINES = {
    "Open MPI": "mpirun -np 3 -H a:2,b:2 --bind-to none python train.py",
    "PALS": "mpirun -n 3 --hosts a,b --ppn 2 --cpu-bind none python train.py",
    "MPICH": "mpirun -np 3 -genvall -hosts a:2,b:2 python train.py",
    "Intel MPI": "mpirun -np 3 -genvall -hosts a:2,b:2 python train.py",
}
VERSIONS = {
    "Open MPI": "mpirun (Open MPI) 5.0.11\n\nReport bugs to ...", "PALS": "mpiexec version 1.2.12 revision 0e6bbd1\n",
    "MPICH": "HYDRA build details:\n    Version:   5.0.2",
    "Intel MPI": "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 20230619"}

each_launcher = pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
each_started = pytest.mark.parametrize("launcher", STARTED, ids=lambda launcher: launcher.name)


@each_launcher
def test_a_rank_reads_what_its_launcher_has_set(launcher: Launcher) -> None:
    environ = OF_RANK[launcher.name]
    assert launched_rank(environ) == 2
    assert launched_size(environ) == (3 if launcher.size else 0, launcher.title)
    assert local_rank(environ) == ((0, 1) if launcher.local[0] else None)
    assert identity(environ) and identity(environ) != identity({**environ, launcher.rank: "1"})


@each_started
def test_a_launcher_is_identified_and_gets_ranks_and_hosts(launcher: Launcher) -> None:
    found, version = parse_version(VERSIONS[launcher.name])
    assert found is launcher and version and f" {version}" in VERSIONS[launcher.name]
    line = compose(Job(3, ("python", "train.py"), parse_list("a:2,b:2")), Mpirun("mpirun", launcher, version),
                   Machine(4), {})
    assert shlex.join(line.argv) == LINES[launcher.name]


@each_started
def test_the_shell_of_a_rank_knows_its_number(launcher: Launcher) -> None:
    environ = {"PATH": "/usr/bin:/bin", **OF_RANK[launcher.name]}
    done = subprocess.run(["sh", "-c", f'echo "{rank_in_shell()}"'], env=environ, capture_output=True, check=True)
    assert done.stdout == b"2\n"


def test_no_options_of_launchers_contradict_each_other() -> None:
    pairs = {(name, arity) for launcher in STARTED for name, arity in launcher.options.items()}
    assert len({name for name, _ in pairs}) == len(pairs)
    assert split_arguments(["--cpu-bind", "depth", "-genv", "A", "1", "sh"], _parser()).command == ("sh",)


def test_every_pattern_of_an_ending_names_the_rank() -> None:
    for launcher in STARTED:
        for pattern in launcher.endings:
            assert {"rank"} <= re.compile(pattern).groupindex.keys() <= {"rank", "host", "code", "signal"}


def test_pals_starts_equally_many_ranks_on_each_host() -> None:
    with pytest.raises(LaunchError, match=r"PALS's and starts the same number of ranks on each host\. "
                                          r"Received: a:2, b:1\. Write for example: -H a:2,b:2"):
        compose(Job(3, ("sh",), parse_list("a:2,b:1")), Mpirun("mpiexec", PALS, "1"), Machine(4), {})


# -- none, or several -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environ", [
    {"PATH": "/bin", "HOME": "/root"},
    {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"},  # salloc's shell
    {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script
    {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"},  # what a shell may have kept from a step
    {"PMI_RANK": "two"}])
def test_without_a_launcher_there_is_one_process(environ: Mapping[str, str]) -> None:
    assert launched_size(environ) == (1, "") and launched_rank(environ) == 0 and identity(environ) == ()


def test_a_launcher_of_one_process_is_a_launcher() -> None:
    assert launched_size({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}) == (1, "Open MPI's mpirun")


def test_mpirun_in_a_step_of_srun_counts_and_not_the_step() -> None:
    environ = {**OF_RANK["Slurm"], "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert launched_size(environ) == (2, "Open MPI's mpirun") and launched_rank(environ) == 1


@pytest.mark.parametrize("text", ["", "-2", "two", "2.0"])
def test_with_a_size_that_is_none_only_mpi_knows_it(text: str) -> None:
    assert launched_size({"PMI_RANK": "0", "PMI_SIZE": text}) == (0, "an MPICH-like mpirun or srun")
