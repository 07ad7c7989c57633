"""The table of launchers: programs that start the ranks of a job. It contains all differences between launchers.

A new launcher needs an entry in this table and a row of tests/unit/test_launchers.py. `mpistrat run` does not use the
features whose fields an entry leaves out. It starts jobs only with launchers whose entry has a `version`. A rank knows
its launcher by environment variables.

The module imports only the standard library, because the start-up code of a rank (cli/startup) executes this file
without the package, before the script imports anything. Patterns are strings: few processes need them compiled.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, eq=False)
class Launcher:
    name: str  # The name of the MPI, as `mpirun --version` and messages have it.
    title: str  # The name of the launcher program in messages.

    # The environment variables of the ranks.
    rank: str  # The variable with the rank of a process.
    size: str = ""  # The variable with the number of ranks. Without it only the MPI library knows the number.
    needs: tuple[str, ...] = ()  # Variables without which a process with the variable `rank` is not a rank.
    local: tuple[str, str] = ("", "")  # The variables with the local rank, and with the number of ranks of the host.
    process: tuple[str, ...] = ()  # Variables, other than `rank`, that differ between its processes or its jobs.

    # How it is found and identified.
    version: str = ""  # A pattern for the output of `--version`, with the version as its group.
    programs: tuple[str, ...] = ("mpirun", "mpiexec")  # Its names in a directory of programs.
    libraries: tuple[str, ...] = ()  # The MPI libraries whose ranks it starts, by the names of mpi4py.get_vendor.

    # The options that name the program to start, and the hosts.
    count: str = "-np"  # The option for the number of ranks.
    always: tuple[str, ...] = ()  # Options of every job.
    hosts: str = ""  # The option for a list of hosts.
    per_host: str = ""  # The option for the ranks per host. Without it, the number follows each host of the list.
    hostfile: str = ""  # The option for a file of hosts.
    has_colons: bool = False  # Whether a line of that file may be `node1:4`.
    has_comments: bool = False  # Whether that file may have comments, and users (`me@node1`).
    needs_slots: bool = True  # Whether each host must have a number.
    slot_keys: tuple[str, ...] = ()  # Keys of a line of the file, for the number of ranks: `slots=4`.
    host_keys: tuple[str, ...] = ()  # Other keys of a line.
    # Options with which the launcher binds no rank to a core. The ranks bind themselves (process/cores.py).
    unbound: tuple[str, ...] = ()
    binding: tuple[str, ...] = ()  # How options begin that bind ranks.
    is_binding: bool = False  # Whether it gives each rank a share of the cores itself.
    oversubscribe: tuple[str, ...] = ()  # Options for more ranks than slots.
    export: str = ""  # The option that exports a variable to the ranks; "": all variables are exported.
    sets: Mapping[str, str] = field(default_factory=dict)  # Environment variables to set for the launcher.
    sets_as_root: Mapping[str, str] = field(default_factory=dict)  # Variables to set if the user is root.
    sets_when_crowded: Mapping[str, str] = field(default_factory=dict)  # Variables to set for more ranks than cores.
    # Its options that are used with training jobs, without dashes, and the number of values of each.
    options: Mapping[str, int] = field(default_factory=dict)
    tag: str = ""  # Its option by which each line that it prints begins with the rank.
    # Options with which it reads no stdin, and all ranks have an empty stdin. Without them MPICH's stdin has no end.
    no_stdin: tuple[str, ...] = ()
    interface: str = ""  # The variable with the network interface.
    ssh_arguments: tuple[str, ...] = ()  # The variables with arguments for ssh.
    # The variables that make it start processes on other hosts with a program other than ssh.
    ssh_agents: tuple[str, ...] = ()

    # The signals that it forwards, and the texts that it prints.
    # For SIGTERM and SIGINT: the signals to send to the launcher so that the ranks get them; {}: not possible.
    handed_on: Mapping[int, tuple[signal.Signals, ...]] = field(default_factory=dict)
    hands_on_since: tuple[int, ...] = ()  # The first version with `handed_on`.
    # Patterns of its texts on how a process has ended, with the groups rank, host, code ("" is 0) and signal.
    endings: tuple[bytes, ...] = ()
    consequences: tuple[bytes, ...] = ()  # Patterns of texts that say only that other processes were ended too.
    errors: tuple[bytes, ...] = ()  # Patterns of texts on the error of MPI.
    # The beginnings of texts of a single line. Other texts stand between two lines of dashes.
    line_starts: tuple[bytes, ...] = ()
    # Whether its exit code N may mean both a rank's exit code N and a rank killed by signal N.
    is_code_ambiguous: bool = False


# Tried with Open MPI 4.1 and 5.0.
OPEN_MPI = Launcher(
    "Open MPI", "Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
    local=("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"), process=("PMIX_NAMESPACE",),
    version=r"\(Open MPI\) (\S+)", libraries=("Open MPI",),
    hosts="-H", hostfile="--hostfile", has_comments=True, needs_slots=False,
    slot_keys=("slots", "cpu", "count"),
    host_keys=("max_slots", "max-slots", "slots_max", "slots-max", "username", "user_name", "user-name", "port"),
    # By default it binds each rank, with all its TensorFlow threads, to one core.
    unbound=("--bind-to", "none"), binding=("bind-to", "cpu-set", "cpu-list", "rankfile"),
    oversubscribe=("--oversubscribe",), export="-x",
    # Open MPI from PyPI prints "OSC UCX component priority set inside component query failed" on machines without
    # InfiniBand, on every rank. mpistrat does not use that component.
    sets={"OMPI_MCA_osc": "^ucx"},
    # mpirun passes the permission on to its daemons on other hosts.
    sets_as_root={"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    # A rank that waits in MPI spins. With more ranks than cores, it would take the core of the rank that it waits for.
    sets_when_crowded={"OMPI_MCA_mpi_yield_when_idle": "1"},
    options={
        **dict.fromkeys(("mca", "prtemca", "pmixmca", "gmca", "gprtemca", "gpmixmca"), 2), **dict.fromkeys((
            "x", "bind-to", "map-by", "rank-by", "wdir", "wd", "timeout", "prefix", "output", "stdin", "with-ft",
            "forward-signals", "display", "tune", "path", "cpu-set", "npernode", "N", "npersocket", "personality",
            "runtime-options", "cpus-per-proc"), 1), **dict.fromkeys(("quiet", "display-devel-allocation",
            "tag-output", "timestamp-output", "merge-stderr-to-stdout", "report-bindings", "display-map", "pernode",
            "display-allocation", "display-topo", "display-devel-map", "noprefix", "nolocal", "nooversubscribe", "v",
            "use-hwthread-cpus", "allow-run-as-root", "enable-recovery", "disable-recovery", "verbose", "q"), 0)},
    # If mpirun reads a stdin, it never tells rank 0 about the end of the stdin (tried with 5.0).
    tag="--tag-output", no_stdin=("--stdin", "none"), interface="OMPI_MCA_btl_tcp_if_include",
    ssh_arguments=("PRTE_MCA_plm_ssh_args", "OMPI_MCA_plm_rsh_args"),  # of Open MPI 5, and of 4
    ssh_agents=("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "OMPI_MCA_orte_launch_agent"),
    handed_on={signal.SIGTERM: (signal.SIGURG,), signal.SIGINT: (signal.SIGCONT, signal.SIGURG)},
    hands_on_since=(5,),  # see process/abort.py
    endings=(rb"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on signal (?P<signal>\d+)",
             rb"Process name: \[.*?,(?P<rank>\d+)\] Exit code: (?P<code>\d+)",
             rb"MPI_ABORT was invoked on rank (?P<rank>\d+) .*?(?:errorcode|Errorcode:) (?P<code>-?\d+)",
             rb'process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) calling "abort"',
             rb"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exiting improperly(?P<code>)"),
    consequences=(rb"a non-zero exit code\. Per user-direction, the job has been aborted\.",
                  # It prints a text once, then a line that other processes have the same text, with the text's name.
                  rb"^\[\S+\] \d+ more process\w* ha\w+ sent help message help-mpi-api\.txt / mpi-abort",
                  rb'^\[\S+\] Set MCA parameter "orte_base_help_aggregate" to 0 to see all help',
                  # Open MPI 5 sends to a process that has just ended, or crashes when it ends.
                  rb"^\[\S+:\d+\] PMIX ERROR: PMIX_ERR_UNREACH in file \S+ at line \d+", rb"^prterun: .* Assertion "),
    # Of a rank that an error in MPI ends, for example when another rank has died, and its connection is closed.
    errors=(rb"^\[\S+:\d+\] \*\*\* (?:An error occurred in |reported by process |on |Unknown error|MPI_ERR|"
            rb"and MPI will try to terminate)",),
    line_starts=(b"[", b"prterun: "))
# PALS, of HPE Cray EX. Not run. The variables are those of mpi_p_slurmstepd_task in
# src/plugins/mpi/cray_shasta/mpi_cray_shasta.c of Slurm, by the maker of PALS; the options are those of
# docs.alcf.anl.gov (Polaris, "Running Jobs"), which sets PMI_LOCAL_RANK's GPU in its examples. Before MPICH, whose
# variables it sets too.
PALS = Launcher(
    "PALS", "PALS' mpiexec or srun", "PALS_RANKID", "PMI_SIZE", local=("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    process=("PALS_APID",), version=r"\bmpiexec version (\d\S*)", programs=("mpiexec",), libraries=("MPICH",),
    count="-n", hosts="--hosts", per_host="--ppn", unbound=("--cpu-bind", "none"), binding=("cpu-bind",),
    options=dict.fromkeys(("ppn", "depth", "cpu-bind"), 1))
# Hydra. Tried with MPICH 5.0. It does not bind, and accepts root and more ranks than slots.
MPICH = Launcher(
    "MPICH", "an MPICH-like mpirun or srun", "PMI_RANK", "PMI_SIZE", local=("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    process=("PMI_FD",),
    version=r"HYDRA build details:\s+Version:\s+(\S+)", libraries=("MPICH", "MVAPICH", "Intel MPI"),
    # -genvlist would forward the named variables *only*. -genvall is the default, but I_MPI_HYDRA_ENV may change it.
    always=("-genvall",), hosts="-hosts", hostfile="-f", has_colons=True, host_keys=("user", "ifname"),
    options={
        **dict.fromkeys(("env", "genv"), 2),
        **dict.fromkeys(("ppn", "perhost", "iface", "launcher", "launcher-exec", "rmk", "bootstrap", "bootstrap-exec",
                         "envlist", "genvlist", "membind", "prepend-pattern", "outfile-pattern", "errfile-pattern",
                         "gpus-per-proc", "localhost"), 1),
        **dict.fromkeys(("l", "prepend-rank", "genvall", "genvnone", "envall", "envnone", "print-all-exitcodes",
                         "disable-auto-cleanup"), 0)},
    tag="-l", interface="HYDRA_IFACE",
    ssh_agents=("HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP"),
    handed_on={number: (number,) for number in (signal.SIGTERM, signal.SIGINT)},
    endings=(rb"^Abort\((?P<code>-?\d+)\) on node \d+ \(rank (?P<rank>\d+) in comm \d+\): "
             rb"application called MPI_Abort",),
    line_starts=(b"Abort(",), is_code_ambiguous=True)
# Derived from MPICH. Before MPICH in LAUNCHERS, because Intel MPI's `--version` names Hydra too.
INTEL_MPI = replace(MPICH, name="Intel MPI", version=r"Intel\(R\) MPI Library.*?Version (\S+)", hostfile="-machinefile",
                    is_binding=True, ssh_agents=("I_MPI_HYDRA_BOOTSTRAP",))
# mpirun_rsh of MVAPICH2; its mpiexec is Hydra.
MVAPICH = Launcher("MVAPICH", "MVAPICH's mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
                   local=("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"))
# Only a process that srun started has both variables. A batch script has SLURM_PROCID alone; a shell may have kept
# SLURM_STEP_NUM_TASKS from a step. SLURM_NTASKS is no sign: a shell in an allocation has it, too.
SRUN = Launcher("Slurm", "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", needs=("SLURM_STEP_NUM_TASKS",),
                process=("SLURM_JOB_ID", "SLURM_STEP_ID"))
# A process gets the size from a PMIx library, not from the environment.
PMIX = Launcher("PMIx", "a PMIx launcher", "PMIX_RANK", process=("PMIX_NAMESPACE",))

# In the order of the search. A job of mpirun may run in a step of srun, whose ranks then also have the variables of
# srun, and most launchers use PMIx with the MPI library.
LAUNCHERS = (OPEN_MPI, PALS, INTEL_MPI, MPICH, MVAPICH, SRUN, PMIX)
# The launchers with which `mpistrat run` starts jobs.
STARTED = tuple(each for each in LAUNCHERS if each.version)


def launcher_of(environ: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that started the process with this environment; None if there is none. Pure."""
    return next((each for each in LAUNCHERS if environ.get(each.rank, "").isdigit()
                 and all(name in environ for name in each.needs)), None)


def local_rank(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return (local rank, local size) from a launcher's variables; None if no launcher has set both. Pure."""
    for each in LAUNCHERS:
        rank, size = (environ.get(name, "") for name in each.local)
        if rank.isdigit() and size.isdigit():
            return int(rank), int(size)
    return None


def rank_in_shell() -> str:
    """Return an expression that gives a POSIX shell its rank, under each launcher that `mpistrat run` uses."""
    expression = f"${PMIX.rank}"
    for each in reversed(STARTED):
        expression = f"${{{each.rank}-{expression}}}"
    return expression
