"""What is said of hosts that ssh does not reach; a script is in the place of ssh."""

import os
import sys
import time
from pathlib import Path

import pytest

from mpistrat.cli import ssh

# It reaches the host a.
FAIL = 'for last; do host=$previous; previous=$last; done; [ "$host" = a ] || {{ echo "{said}" >&2; exit 255; }}'


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PATH": str(tmp_path)}


def put(environ: dict[str, str], script: str) -> None:
    path = Path(environ["PATH"], "ssh")
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def why_unreachable(hosts: list[str], environ: dict[str, str], *needed: str) -> str:
    return " ".join(sum(ssh.unreachable(hosts, environ, needed).values(), ()))


@pytest.mark.parametrize(("said", "remedy"), [
    ("ssh: Could not resolve hostname b: Name or service not known",
     "Correct the name in -H or in the hostfile; `getent hosts b` must find it."),
    ("root@b: Permission denied (publickey).",
     "Your key is not accepted there. Type `ssh-copy-id b`, or use --ssh-identity-file."),
    ("@@@@@\nHost key verification failed.", "Connect once by hand to accept the host key: `ssh b`."),
    ("ssh: connect to host b port 22: Connection refused", "No ssh server listens on this port; set --ssh-port."),
    ("ssh: connect to host b port 22: Connection timed out", "Check that the host is on and no firewall blocks ssh.")])
def test_the_host_and_the_remedy_are_named(environ: dict[str, str], said: str, remedy: str) -> None:
    put(environ, FAIL.format(said=said))
    assert ssh.reached(["a", "b"], environ) == {"a"} and ssh.reached(["a"], {"PATH": "/nowhere"}) == set()
    last = said.splitlines()[-1].removeprefix("ssh: ")
    assert why_unreachable(["a", "b"], environ) == f"b cannot be reached by ssh ({last}). {remedy}"


def test_a_host_that_does_not_answer_is_not_waited_for(environ: dict[str, str],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "_LIMIT_S", 0.2)
    # A script in the place of ssh, whose children keep what it prints open.
    for script in ("exec /bin/sleep 60", "/bin/sleep 60", "/usr/bin/setsid /bin/sleep 60"):
        put(environ, script)
        began = time.monotonic()
        assert why_unreachable(["b"], environ).startswith("b cannot be reached by ssh (it does not answer). Check ")
        assert time.monotonic() - began < 30.0


def test_a_process_that_ssh_leaves_behind_is_not_waited_for(environ: dict[str, str]) -> None:
    put(environ, "/usr/bin/setsid /bin/sleep 60 &\necho ssh: odd >&2\nexit 255")
    assert why_unreachable(["b"], environ).startswith("b cannot be reached by ssh (odd). ")


def test_a_host_without_the_environment_is_named_with_the_line_that_copies_it(environ: dict[str, str]) -> None:
    put(environ, 'for command; do :; done; cd /; PATH=/bin; eval "$command"')
    assert why_unreachable(["a"], environ, sys.executable, "/bin/sh") == ""
    lost, other = f"{sys.prefix}/bin/no such mpirun", "/no/such/mpirun"
    assert why_unreachable(["a"], environ, sys.executable, lost) == (
        f"a has no {lost}. Each host needs the same programs under the same path. Copy them: `rsync -aR {sys.prefix} "
        "a:/`, or install the same there.")
    assert f"`rsync -aR {other} a:/`" in why_unreachable(["a"], environ, other)


def test_what_runs_on_the_host_may_fail(environ: dict[str, str]) -> None:
    put(environ, "exit 127")
    assert why_unreachable(["a", "b"], environ) == ""


def test_the_arguments_for_ssh_are_those_of_mpirun(environ: dict[str, str], tmp_path: Path) -> None:
    put(environ, f'echo "$*" > {tmp_path}/said')
    assert why_unreachable(["a"], {**environ, "PRTE_MCA_plm_ssh_args": "-p 2222 -i 'a key'"}) == ""
    assert "-p 2222 -i a key a sh -c " in (tmp_path / "said").read_text()


def test_without_ssh_it_is_to_be_installed(environ: dict[str, str]) -> None:
    assert why_unreachable(["node7"], environ).startswith("there is no ssh on this host, but mpirun needs ssh to "
                                                          "start ranks on node7. Install it: ")
    assert not os.path.exists(Path(environ["PATH"], "ssh"))
