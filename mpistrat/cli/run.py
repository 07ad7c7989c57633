"""`mpistrat run`: start a command on several ranks with mpirun, and make the job end as a whole."""

import argparse
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from ..core.errors import LaunchError
from . import check, horovodrun
from .arguments import Parser, add_launch_options, mpirun_options, read_hosts, split_arguments
from .mpirun import Job, compose, find_mpirun, identify, this_machine
from .supervisor import supervise

EXAMPLE = "mpistrat run -np 2 python train.py"

_DESCRIPTION = "Start a command on several ranks with mpirun (Open MPI, MPICH or Intel MPI)."
_EPILOG = """\
The command begins after --, or at the first argument that is neither an option nor the value of one. A file that ends
in .py is run with the Python that runs mpistrat. Options that are not listed here are passed to mpirun. After an option
that mpistrat does not know, write -- before the command.

mpistrat adds the options that root, hosts and oversubscription need, and forwards these variables to all hosts:
MPISTRAT_*, NCCL_*, PATH, PYTHONPATH, LD_LIBRARY_PATH, VIRTUAL_ENV, KERAS_BACKEND. --dry-run prints the whole command.

The exit code is mpirun's: that of the first rank that failed; 2 for wrong input. Ctrl-C ends the job, a second Ctrl-C
kills it. Processes that a failed job leaves on this host are killed. mpirun is terminated if it does not end within
15 s after a rank has ended the job.

examples:
  mpistrat run -np 2 python train.py
  mpistrat run -np 8 -H node1:4,node2:4 train.py --epochs 3
  mpistrat run -np 8 --hostfile hosts.txt -x MY_VARIABLE --tag-output -- python train.py
"""


def main(argv: list[str]) -> int:
    """Run the subcommand and return the exit code of the job.

    Raises:
        LaunchError: The input is wrong, or no mpirun is found.
    """
    arguments = split_arguments(argv)
    options = _parser().parse_args(arguments.own)
    if options.check_build:
        return check.main([])
    if options.np is None:
        raise LaunchError(f"how many ranks? Say it with -np, for example: {EXAMPLE}")
    command = _command(arguments.command, os.environ)
    hosts = read_hosts(options)
    mpirun = identify(find_mpirun(options.mpirun, os.environ))
    variables = horovodrun.variables(options, mpirun.dialect)
    job = Job(options.np, command, hosts, options.oversubscribe,
              (*arguments.mpirun, *mpirun_options(options.mpi_args)))
    launch = compose(job, mpirun, this_machine(os.environ), os.environ, variables)
    if options.dry_run:
        print(launch)
        return 0
    return supervise(launch, os.environ)


def _parser() -> Parser:
    parser = Parser(
        prog="mpistrat run", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="mpistrat run -np N [-H HOST:SLOTS,... | --hostfile FILE] [mpirun options] [--] command ...")
    add_launch_options(parser)
    horovodrun.add_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the command instead of running it")
    return parser


def _command(command: tuple[str, ...], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Check that the command exists, and put Python before a script."""
    if not command:
        raise LaunchError(f"what is to be run? Write the command last, for example: {EXAMPLE}")
    program = command[0]
    if program.endswith(".py"):
        if not Path(program).is_file():
            raise LaunchError(f"{program}: no such file. Write the path of the script, for example: {EXAMPLE}")
        return (sys.executable, *command)
    if shutil.which(program, path=environ.get("PATH", os.defpath)) is None:
        raise LaunchError(f"{program}: no such command. Write a program or a .py file after the options, for example: "
                          f"{EXAMPLE}")
    return command
