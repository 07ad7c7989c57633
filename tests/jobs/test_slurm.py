"""Slurm on this machine: a controller and two nodes, each a daemon of its own. Skipped without Slurm's programs.

The batch scripts are those of docs/deploy, with fewer ranks.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..support.jobs import ROOT, Finished, job_environment, kill_processes_of, run_limited, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
HOST = socket.gethostname().split(".")[0]
# The first node has the name of its host: otherwise Open MPI does not see under srun that ranks share memory.
# It comes first, since mpirun, which runs on the first node of a job, takes this host for that node.
NODES = (HOST, f"{HOST}-second")
LIMIT_S = 60.0
TRAIN = """
import os
import numpy as np
import mpistrat
mpistrat.init()
total = int(mpistrat.allreduce(np.int64(1), op=mpistrat.Sum))
cpus = " ".join(map(str, sorted(os.sched_getaffinity(0))))
os.write(1, f"rank {mpistrat.rank()} of {total}, node {os.environ['SLURMD_NODENAME']}, CPUs {cpus}\\n".encode())
"""

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd needs root"),
    pytest.mark.skipif(any(shutil.which(name, path=PATH) is None for name in PROGRAMS),
                       reason="no Slurm (Debian: apt-get install munge slurmctld slurmd slurm-client libpmix-dev)")]


@dataclass(frozen=True)
class Slurm:
    """A running Slurm. `directory` has its files, and `train.py` with `.venv` beside it."""

    directory: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": PATH, "SLURM_CONF": str(self.directory / "slurm.conf")}

    def command(self, *line: str) -> str:
        environment = {**os.environ, **self.environment}
        return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
                              check=False).stdout.strip()

    def srun(self, *options: str) -> Finished:
        return run_limited(["srun", *options, sys.executable, str(self.directory / "train.py")], env=self.environment)

    def sbatch(self, script: str, *options: str) -> str:
        """Run a batch script of docs/deploy to its end, which must be a success, and return the job's output."""
        job, output = uuid.uuid4().hex, self.directory / "job.out"
        line = ["sbatch", "--parsable", f"--chdir={self.directory}", f"--output={output}", "--mem-per-cpu=100M",
                "--cpus-per-task=1", *options, str(ROOT / "docs" / "deploy" / script)]
        number = subprocess.run(line, env=job_environment(job, self.environment), stdout=subprocess.PIPE, text=True,
                                timeout=LIMIT_S, check=True).stdout.strip()
        state = ""

        def has_ended() -> bool:
            nonlocal state
            state = self.command("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T")
            return state not in ("PENDING", "RUNNING", "COMPLETING")

        # `sbatch --wait` looks every few seconds only.
        try:
            wait_until(has_ended, LIMIT_S)
            assert state == "COMPLETED", f"{state}\n{output.read_text()}"
            return output.read_text()
        finally:
            self.command("scancel", number)
            kill_processes_of(job)


def _configuration(directory: Path) -> str:
    with contextlib.ExitStack() as sockets:
        free = [sockets.enter_context(socket.create_server(("localhost", 0))) for _ in range(1 + len(NODES))]
        control, *ports = [each.getsockname()[1] for each in free]
    cpus = len(os.sched_getaffinity(0))
    nodes = [f"NodeName={name} NodeHostname={HOST} NodeAddr=localhost Port={port} CPUs={cpus} RealMemory=1000"
             for name, port in zip(NODES, ports, strict=True)]
    return "\n".join([
        "ClusterName=test", f"SlurmctldHost={HOST}(localhost)", f"SlurmctldPort={control}",
        "SlurmUser=root", "SlurmdUser=root", "AuthType=auth/munge", f"AuthInfo=socket={directory}/munge.socket",
        f"StateSaveLocation={directory}/state", f"SlurmdSpoolDir={directory}/spool-%n", f"TmpFS={directory}/tmp-%n",
        f"SlurmctldPidFile={directory}/slurmctld.pid", f"SlurmdPidFile={directory}/slurmd-%n.pid",
        "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/affinity", "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core", "MpiDefault=none",
        "SlurmdParameters=config_overrides",  # The nodes need not have the cores and the memory of this machine.
        *nodes, f"PartitionName=test Nodes={','.join(NODES)} Default=YES", ""])


def _end(daemon: "subprocess.Popen[bytes]") -> None:
    daemon.terminate()
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    # Not pytest's directory: the path of a Unix socket has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, contextlib.ExitStack() as daemons:
        directory = Path(name)
        directory.chmod(0o755)  # munged asks that everybody can reach its socket.
        for needed in ("state", *(f"tmp-{node}" for node in NODES)):
            (directory / needed).mkdir()
        (directory / "slurm.conf").write_text(_configuration(directory))
        (directory / "munge.key").write_bytes(os.urandom(128))
        (directory / "munge.key").chmod(0o400)
        (directory / ".venv").symlink_to(sys.prefix)
        (directory / "train.py").write_text(TRAIN)
        made = Slurm(directory)
        log = daemons.enter_context((directory / "log").open("w"))

        def start(*command: str) -> None:
            environment = {**os.environ, **made.environment}
            daemons.callback(_end, subprocess.Popen(command, env=environment, stdout=log, stderr=log))

        files = [f"--{kind}-file={directory}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        start("munged", "--foreground", f"--socket={directory}/munge.socket", *files)
        wait_until((directory / "munge.socket").exists, LIMIT_S)  # Without it the others wait for a minute.
        start("slurmctld", "-D")
        for node in NODES:
            start("slurmd", "-D", "-N", node)
        wait_until(lambda: made.command("sinfo", "--noheader", "--format=%T %D") == f"idle {len(NODES)}", LIMIT_S)
        yield made


def ranks_of(output: str) -> list[tuple[str, str, str]]:
    """(number of ranks, node, CPUs) that each rank has printed, by rank."""
    return [found[1:] for found in sorted(re.findall(r"rank (\d+) of (\d+), node (\S+), CPUs ([\d ]+)", output))]


def test_srun_with_pmix_starts_the_ranks_and_these_share_the_cores(slurm: Slurm) -> None:
    job = slurm.srun("--mpi=pmix", "--ntasks=2", f"--nodelist={HOST}", "--cpu-bind=none").well()
    (size, _, cpus), (_, _, other_cpus) = ranks_of(job.output)
    assert size == "2"
    assert len(os.sched_getaffinity(0)) == 1 or not set(cpus.split()) & set(other_cpus.split()), job.output


@pytest.mark.nightly
def test_srun_without_a_pmi_is_an_error_on_every_rank(slurm: Slurm) -> None:
    job = slurm.srun("--mpi=none", "--ntasks=2", "--nodes=1", "--label")
    assert job.code != 0
    for rank in (0, 1):
        assert re.search(rf"^{rank}: .*srun started 2 processes, but the MPI library .* sees only one", job.output,
                         re.MULTILINE), job.output


@pytest.mark.nightly
@pytest.mark.parametrize("nodes", [1, 2])
def test_mpirun_in_a_batch_job_takes_the_nodes_of_the_allocation(slurm: Slurm, nodes: int) -> None:
    output = slurm.sbatch("slurm-one-node-cpu.sh", f"--nodes={nodes}", "--ntasks=2", f"--ntasks-per-node={2 // nodes}")
    ranks = ranks_of(output)
    assert [size for size, _, _ in ranks] == ["2", "2"], output
    assert len({node for _, node, _ in ranks}) == nodes, output


@pytest.mark.nightly
def test_srun_in_a_batch_job_starts_ranks_on_two_nodes(slurm: Slurm) -> None:
    output = slurm.sbatch("slurm-many-nodes-cpu.sh", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1")
    ranks = ranks_of(output)
    assert [size for size, _, _ in ranks] == ["2", "2"], output
    assert {node for _, node, _ in ranks} == set(NODES), output


@pytest.mark.nightly
def test_doctor_in_an_allocation_says_which_mpi_of_srun_fits(slurm: Slurm) -> None:
    line = ["salloc", "--ntasks=2", "--nodes=1", f"--nodelist={HOST}", sys.executable, "-m", "mpistrat", "doctor",
            "-np", "2", "--json"]
    job = run_limited(line, env=slurm.environment)
    found = json.loads(job.output[job.output.index("{\n"):job.output.rindex("\n}") + 2])
    assert found["observed"]["sizes_of_srun"] == {"": 1, "pmix": 2}, job.output
    fix, = [each["fix"] for each in found["findings"] if each["subject"] == "pmi"]
    assert fix == "srun --mpi=pmix -n 2 python train.py"


@pytest.mark.nightly
def test_an_elastic_job_goes_on_with_the_nodes_of_the_allocation_when_a_rank_is_lost(slurm: Slurm) -> None:
    line = ["salloc", "--ntasks=2", "--nodes=2", "--ntasks-per-node=1", sys.executable, "-m", "mpistrat", "run",
            "--elastic", "-np", "2", sys.executable, "tests/scripts/elastic_steps.py", "--kill", "1:1:5:before"]
    job = run_limited(line, env=slurm.environment).well()
    for rank in (0, 1):
        assert f"rank {rank}: of 2, generation 2, step 30, each row at least 2 times, 0 more" in job.output, job.output
