"""Find out why mpirun cannot start ranks on other hosts by ssh, and name a remedy.

mpirun says only that a daemon has not reported back, or waits without a time limit. `mpistrat run` calls this module
after a job has failed to start, and `mpistrat doctor` before it starts a job.
"""

import contextlib
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..process.launchers import STARTED
from .arguments import HostList
from .child import Child
from .mpirun import Machine

_CONNECT_S = 3  # ConnectTimeout of ssh, in whole seconds
_LIMIT_S = 4.0  # time limit for all hosts together
_MOST_AT_ONCE = 64
_SSH_FAILS, _LACKS = 255, 97  # exit codes: of a failure of ssh itself, and of _LOOK (no shell uses 97)
_AGENT_WORDS = ("agent", "launcher", "bootstrap", "rmk")  # words in options of mpirun that replace ssh
_REMEDIES = (
    ("resolve hostname", "Correct the name in -H or in the hostfile; `getent hosts {host}` must find it."),
    ("Permission denied", "Your key is not accepted there. Type `ssh-copy-id {host}`, or use --ssh-identity-file."),
    ("Host key verification", "Connect once by hand to accept the host key: `ssh {host}`."),
    ("refused", "No ssh server listens on this port; set --ssh-port."))
# Runs on a host, with paths of programs as arguments. Prints the first path that is not an executable file.
_LOOK = f'for path; do test -x "$path" || {{ echo "$path" >&2; exit {_LACKS}; }}; done'
_NO_ANSWER = "Check that the host is on and no firewall blocks ssh."


def hosts_by_ssh(hosts: HostList | None, machine: Machine, options: Sequence[str],
                 environ: Mapping[str, str]) -> list[str]:
    """Return the hosts on which mpirun will start ranks by ssh. Pure.

    The result is [] in an allocation of a batch system, or if the user has chosen a program other than ssh.
    """
    is_other = machine.has_allocation or any(name in environ for each in STARTED for name in each.ssh_agents) or any(
        word in option for option in options for word in _AGENT_WORDS)
    return [] if hosts is None or is_other else [host.name for host in hosts.hosts if host.name not in machine.names]


def unreachable(hosts: Sequence[str], environ: Mapping[str, str], needed: Sequence[str] = ()
                ) -> dict[str, tuple[str, str]]:
    """Try ssh to hosts for a few seconds. Returns (reason, remedy) for each host on which ranks cannot start.

    Args:
        hosts: At least one. The first 64 are tried.
        environ: The environment of mpirun, which may have arguments for ssh.
        needed: Paths of programs that each host must have.
    """
    ssh = shutil.which("ssh", path=environ.get("PATH", os.defpath))
    if ssh is None:
        return {hosts[0]: (f"there is no ssh on this host, but mpirun needs ssh to start ranks on {hosts[0]}.",
                           "Install it: apt-get install openssh-client")}
    given = next((environ[name] for each in STARTED for name in each.ssh_arguments if name in environ), "")
    argv = [ssh, "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}", *shlex.split(given)]
    look = shlex.join(("sh", "-c", _LOOK, "sh", *needed))
    found = {}
    with contextlib.ExitStack() as tries:
        children = {host: tries.enter_context(Child([*argv, host, look], environ)) for host in hosts[:_MOST_AT_ONCE]}
        until = time.monotonic() + _LIMIT_S
        for host, child in children.items():
            code = child.wait(until)
            _, said = child.said
            if code == _LACKS:
                path = said.strip().rpartition("\n")[2]
                prefix = sys.prefix if Path(path).is_relative_to(sys.prefix) else path
                found[host] = (f"{host} has no {path}. Each host needs the same programs under the same path.",
                               f"Copy them: `rsync -aR {shlex.quote(prefix)} {host}:/`, or install the same there.")
            elif code in (None, _SSH_FAILS):
                failure = said.strip().rpartition("\n")[2].strip() if code else ""
                remedy = next((remedy for words, remedy in _REMEDIES if words in failure), _NO_ANSWER)
                said = failure.removeprefix("ssh: ") or "it does not answer"
                found[host] = f"{host} cannot be reached by ssh ({said}).", remedy.format(host=host)
    return found


def reached(hosts: Sequence[str], environ: Mapping[str, str]) -> set[str]:
    """Try ssh to the first 64 hosts, for a few seconds. Returns the hosts that answer."""
    tried = hosts[:_MOST_AT_ONCE]
    has_ssh = shutil.which("ssh", path=environ.get("PATH", os.defpath)) is not None
    return set(tried) - unreachable(tried, environ).keys() if tried and has_ssh else set()
