"""The entry point: `mpistrat COMMAND ...`.

A subcommand is a line in `COMMANDS`, and a module of the same name (with _ for -) with `main(argv: list[str]) -> int`.
The module is imported only when the subcommand runs. Its `main` raises MpistratError for wrong input. Called by the
script `mpistrat` and by `python -m mpistrat`.
"""

import difflib
import os
import sys
from importlib import import_module

from ..core.errors import LaunchError, MpistratError
from ..core.version import __version__

COMMANDS = {
    "run": "start a script on several ranks with mpirun",
    "doctor": "show what this machine has, find problems on the hosts of a job, and print remedies",
    "top": "show what the ranks of a running job do, and which rank is the slowest",
    "bench": "measure collectives on the ranks of a job",
    "timeline": "summarise a timeline: where the time went, which rank came last, which operations were not fused",
    "as-horovod": "let unedited programs that import horovod use mpistrat, under mpirun or srun"}
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return the exit code. `argv`: The arguments after `mpistrat`; None: `sys.argv[1:]`."""
    _open_missing_streams()
    arguments = sys.argv[1:] if argv is None else argv
    command = arguments[0] if arguments else "--help"
    code = 0
    try:
        if command in ("-h", "--help", "help"):
            print(_help())
        elif command in ("-v", "--version"):
            print(f"mpistrat {__version__}")
        elif command in COMMANDS:
            code = import_module(f".{command.replace('-', '_')}", __package__).main(arguments[1:])
        else:
            raise LaunchError(_unknown(command))
        sys.stdout.flush()
        return code
    except MpistratError as error:
        prefix = f"mpistrat {command}" if command in COMMANDS else "mpistrat"
        print(f"{prefix}: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has ended (as in `mpistrat doctor | head -1`). Without this, Python would print an
        # error at exit, when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _open_missing_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that the caller has closed (`>&-`).

    Otherwise a file or pipe that is opened later would become stdout, and the ranks would print into that file.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115 - open for the life of the process, as the original
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115 - likewise
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115 - likewise


def _help() -> str:
    lines = ["usage: mpistrat [--help] [--version] COMMAND ...", "", "Data-parallel training over MPI.", ""]
    lines += ["commands:"]
    lines += [f"  {name:<10} {summary}" for name, summary in COMMANDS.items()]
    lines += ["", "`mpistrat COMMAND --help` has the details. For example:", "", "  mpistrat run -np 2 python train.py"]
    return "\n".join(lines)


def _unknown(command: str) -> str:
    if command.startswith("-"):
        return f"{command} belongs after the name of a command, for example: mpistrat run -np 2 python train.py"
    near = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{command!r} is not a command.{hint} The commands are: {', '.join(COMMANDS)}."
