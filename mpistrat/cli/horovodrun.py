"""Options of horovodrun that `mpistrat run` accepts. They become environment variables for the ranks, or for mpirun.

An option that mpirun has under the same name is passed to mpirun. An option of horovodrun that has no meaning here
raises LaunchError. The variable for ssh was tested with Open MPI 5.0. Called by `mpistrat run` and mpistrat.run.
"""

import argparse
import shlex

from ..core.errors import LaunchError
from ..process.launchers import Launcher

_MB = 1024 * 1024
_LEVELS = {"trace": "debug", "fatal": "error"}  # Horovod's levels that MPISTRAT_LOG_LEVEL does not have
# Option with a value: (the variable that it sets, the unit of the value, the help text).
_SETTINGS = {
    "--fusion-threshold-mb": ("MPISTRAT_FUSION_THRESHOLD", "MB", "size of a fusion buffer"),
    "--cache-capacity": ("MPISTRAT_CACHE_CAPACITY", "N", "number of requests that ranks cache"),
    "--stall-check-warning-time-seconds": ("MPISTRAT_STALL_CHECK_TIME_SECONDS", "S", "time until a stall is reported"),
    "--stall-check-shutdown-time-seconds": ("MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS", "S",
                                            "time until a stall ends the job"),
    "--num-nccl-streams": ("MPISTRAT_NUM_NCCL_STREAMS", "N", "number of NCCL communicators"),
    "--timeline-filename": ("MPISTRAT_TIMELINE", "FILE", "file for a timeline of all ranks"),
    "--log-level": ("MPISTRAT_LOG_LEVEL", "LEVEL", "least severity of the messages shown"),
}
# Options without a value that set a variable.
_FLAGS = {"--disable-cache": ("MPISTRAT_CACHE_CAPACITY", "0", "ranks cache no requests"),
          "--timeline-mark-cycles": ("MPISTRAT_TIMELINE_MARK_CYCLES", "1", "mark in the file when operations begin"),
          "--no-stall-check": ("MPISTRAT_STALL_CHECK_DISABLE", "1", "wait for other ranks without a time limit")}
_NO_TUNING = "there is nothing to tune"
_REFUSED = {
    **dict.fromkeys(("--gloo", "--jsrun"), "the ranks use MPI"),
    **dict.fromkeys(("--cycle-time-ms", "--autotune", "--no-autotune", "--autotune-log-file",
                     "--hierarchical-allreduce", "--no-hierarchical-allreduce", "--hierarchical-allgather",
                     "--no-hierarchical-allgather", "--torus-allreduce", "--no-torus-allreduce", "--thread-affinity",
                     "--mpi-threads-disable"), _NO_TUNING),
    "--config-file": "write the options on the command line, or set variables (docs/settings.md)",
}
_IGNORED = ("--mpi", "--tcp", "--log-without-timestamp")
ALIASES = {"-p": "--ssh-port", "-i": "--ssh-identity-file", "-cb": "--check-build",
           "--network-interfaces": "--network-interface"}
# The number of values of each option.
ARITY = {**dict.fromkeys((*_SETTINGS, "--ssh-port", "--ssh-identity-file", "--network-interface", "--mpi-args",
                          "--start-timeout"), 1),
         **dict.fromkeys((*_FLAGS, *_IGNORED, "--check-build"), 0)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of horovodrun to the parser of `mpistrat run`."""
    group = parser.add_argument_group("options of horovodrun")
    group.add_argument("--check-build", action="store_true", help="run mpistrat doctor instead")
    for option, (name, unit, text) in _SETTINGS.items():
        group.add_argument(option, dest=name, metavar=unit, help=f"{text}; sets {name}")
    for option, (name, value, text) in _FLAGS.items():
        group.add_argument(option, dest=name, action="store_const", const=value, help=f"{text}; sets {name}={value}")
    group.add_argument("--network-interface", metavar="NAME", help="the network interface of MPI and NCCL on all hosts")
    group.add_argument("--ssh-port", metavar="PORT", help="the port of ssh on the other hosts (Open MPI)")
    group.add_argument("--ssh-identity-file", metavar="FILE", help="the key for ssh (Open MPI)")
    group.add_argument("--mpi-args", default="", metavar="'OPTIONS'", help="more options for mpirun, in one argument")
    group.add_argument("--start-timeout", type=float, metavar="S", help="time limit in seconds for the start of all "
                       "ranks, if mpirun starts ranks by ssh or the job is elastic (default 30)")
    for option in _IGNORED:
        group.add_argument(option, action="store_true", help=argparse.SUPPRESS)


def refuse(option: str) -> None:
    """Raise LaunchError for an option of horovodrun that has no meaning here."""
    if option in _REFUSED:
        raise LaunchError(f"{option} is an option of horovodrun that mpistrat run does not have: {_REFUSED[option]}. "
                          "Leave the option out.")


def variables(options: argparse.Namespace, launcher: Launcher) -> dict[str, str]:
    """Return the environment variables, for the ranks, mpirun and NCCL, that the options set.

    Raises LaunchError: A value is malformed, or the launcher does not support an option.
    """
    found = {name: value for name, *_ in (*_SETTINGS.values(), *_FLAGS.values())
             if (value := getattr(options, name)) is not None}
    fusion = "MPISTRAT_FUSION_THRESHOLD"
    if fusion in found:
        try:
            found[fusion] = str(int(float(found[fusion]) * _MB))
        except (ValueError, OverflowError):
            raise LaunchError(f"--fusion-threshold-mb {found[fusion]} is not a number of megabytes. Write for example: "
                              "--fusion-threshold-mb 64") from None
    level = "MPISTRAT_LOG_LEVEL"
    if level in found:
        found[level] = _LEVELS.get(found[level].lower(), found[level].lower())
    if options.network_interface is not None:
        found["NCCL_SOCKET_IFNAME"] = options.network_interface
        if not launcher.interface:
            raise LaunchError(f"this mpirun is {launcher.name}'s, which chooses the network interface itself. Leave "
                              "out --network-interface.")
        found[launcher.interface] = options.network_interface
    ssh = [] if options.ssh_port is None else ["-p", options.ssh_port]
    if options.ssh_identity_file is not None:
        ssh += ["-i", options.ssh_identity_file]
    if ssh and not launcher.ssh_arguments:
        raise LaunchError(f"this mpirun is {launcher.name}'s, which takes no options for ssh. Write the port (Port) "
                          "and the key (IdentityFile) of the hosts into ~/.ssh/config.")
    if ssh:
        found.update(dict.fromkeys(launcher.ssh_arguments, shlex.join(ssh)))
    return found
