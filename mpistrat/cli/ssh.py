"""Why mpirun cannot start ranks on other hosts by ssh, and what to do about it.

mpirun says only that a daemon has not reported back, or waits without a limit. Called when a job has not started, and
by `mpistrat doctor` before it starts one.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence

from .hostfile import HostList
from .mpirun import Machine

_CONNECT_S = 3  # for ssh, which counts in seconds
_LIMIT_S = 4.0  # for all hosts
_MOST_AT_ONCE = 64
# With one of these in its environment mpirun starts ranks by something else than ssh.
_AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "OMPI_MCA_orte_launch_agent", "HYDRA_LAUNCHER",
           "HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP")
_AGENT_WORDS = ("agent", "launcher", "bootstrap", "rmk")  # in options of mpirun that name it
_SSH_ARGUMENTS = ("PRTE_MCA_plm_ssh_args", "OMPI_MCA_plm_rsh_args")
_REMEDIES = (
    ("resolve hostname", "Correct the name in -H or in the hostfile; `getent hosts {host}` must find it."),
    ("Permission denied", "Your key is not accepted there: `ssh-copy-id {host}`, or --ssh-identity-file."),
    ("Host key verification", "Connect once by hand to accept its key: `ssh {host}`."),
    ("refused", "No ssh server listens there; --ssh-port is the port."),
)
_NO_ANSWER = "Is it on, and does a firewall let ssh through?"


def hosts_by_ssh(hosts: HostList | None, machine: Machine, options: Sequence[str],
                 environ: Mapping[str, str]) -> list[str]:
    """Return the hosts on which mpirun will start ranks by ssh. Pure.

    They are none in an allocation of a batch system, and where the user has chosen something else than ssh.
    """
    is_other = machine.has_allocation or any(name in environ for name in _AGENTS) or any(
        word in option for option in options for word in _AGENT_WORDS)
    return [] if hosts is None or is_other else [
        host.name for host in hosts.hosts if host.name not in machine.names]


def unreachable(hosts: Sequence[str], environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Connect to hosts by ssh, for a few seconds. Of those that cannot be reached: a sentence on why, and the remedy.

    Args:
        hosts: At least one. Some dozens of them are tried.
        environ: The environment of mpirun, which may have arguments for ssh.
    """
    ssh = shutil.which("ssh", path=environ.get("PATH", os.defpath))
    if ssh is None:
        return {hosts[0]: (f"there is no ssh on this host, with which mpirun starts ranks on {hosts[0]}.",
                           "Install it: apt-get install openssh-client")}
    given = next((environ[name] for name in _SSH_ARGUMENTS if name in environ), "")
    argv = [ssh, "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}", *shlex.split(given)]
    tries = {host: subprocess.Popen([*argv, host, "true"], env=dict(environ), stdin=subprocess.DEVNULL,
                                    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
             for host in hosts[:_MOST_AT_ONCE]}
    until = time.monotonic() + _LIMIT_S
    failures = {host: _failure(process, until) for host, process in tries.items()}
    return {host: _sentences(host, failure) for host, failure in failures.items() if failure is not None}


def _failure(process: "subprocess.Popen[bytes]", until: float) -> str | None:
    """What ssh says last; None if it has reached its host."""
    try:
        _, said = process.communicate(timeout=max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()
        return ""
    lines = said.decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "") if process.returncode == 255 else None


def _sentences(host: str, failure: str) -> tuple[str, str]:
    remedy = next((remedy.format(host=host) for words, remedy in _REMEDIES if words in failure), _NO_ANSWER)
    return f"{host} cannot be reached by ssh ({failure.removeprefix('ssh: ') or 'it does not answer'}).", remedy
