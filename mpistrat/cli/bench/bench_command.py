"""`mpistrat bench`: measure collectives, compared with MPI's own and with memcpy."""

import argparse
import json
import os
import socket
from math import ceil
from pathlib import Path

from ...api import array_ops, common, runtime
from ...core.errors import LaunchError
from ..arguments import Parser, counted, positive_int
from ..inventory import busy_cores
from ..mpirun import this_machine
from .cases import CASES
from .measure import LIMIT_S, measure, measurements
from .plot import plot, require_matplotlib
from .table import Output, Table

_EPILOG = """\
Run it on ranks: mpistrat run -np 2 -- mpistrat bench

For each case bench prints, for float32 arrays,
- the median time of the collective, of MPI's own collective (MPI_Allreduce, MPI_Reduce_scatter, MPI_Alltoallv) and of a
  memcpy of the same bytes, in the same run. Times are those of the slowest rank;
- the bandwidth of each rank's link in 10^9 bytes per second (2 (n-1)/n of the bytes over the time in an all-reduce,
  (n-1)/n in the others);
- the share of the collective's time that is hidden behind matrix products, which each rank computes meanwhile on one
  core for the same time;
- how many times faster or slower than MPI's own collective the collective of mpistrat is.
A case whose name has no collective is a grouped all-reduce.
"""
_PICTURES = (".png", ".svg", ".pdf")


def main(argv: list[str]) -> int:
    """Measure the cases that the options select, and return 0. Collective; rank 0 prints and writes the files."""
    options = _parser().parse_args(argv)
    if options.plot:
        require_matplotlib()
        if Path(options.plot).suffix not in _PICTURES:
            raise LaunchError(f"--plot {options.plot}: the name must end with {', '.join(_PICTURES)}.")
        if all(CASES[name].operation != "allreduce" for name in options.cases):
            raise LaunchError("--plot draws all-reduces, but no chosen case is an all-reduce. Add one, such as 1MB.")
    common.init()
    _require_writable(*filter(None, (options.json, options.plot)))
    for sentence in _disturbances():
        print(f"mpistrat bench: {sentence}. The times below say little (ps aux --sort=-%cpu | head)", flush=True)
    if (tracer := runtime.current().tracer) is not None:
        tracer.is_line_due = False  # The tracer would print one line on all cases together.
    _measure(options)
    common.shutdown()
    return 0


def _disturbances() -> list[str]:
    """Return, on rank 0, a sentence for each host whose cores other processes use; [] on other ranks. Collective."""
    busy = "" if common.local_rank() else busy_cores(os.getloadavg()[1], this_machine(os.environ).cores)
    sentences = array_ops.allgather_object(f"on {socket.gethostname()} {busy}" if busy else "")
    return list(filter(None, sentences)) if common.rank() == 0 else []


def _require_writable(*paths: str) -> None:
    """Raise LaunchError before the measurement if rank 0 will not be able to write one of the files. Collective."""
    problem = ""
    for path in paths if common.rank() == 0 else ():
        try:
            with open(path, "ab"):
                pass
        except OSError as error:
            problem = f"{path} cannot be written: {error.strerror}."
    problem = array_ops.broadcast_object(problem, 0)
    if problem:
        common.shutdown()
        raise LaunchError(problem)


def _measure(options: argparse.Namespace) -> None:
    comm = None
    if common.size() > 1:
        from mpi4py import MPI
        comm = MPI.COMM_WORLD.Dup()
    cases = {name: CASES[name] for name in options.cases}
    where = f"{counted(common.size(), 'rank')} on {counted(len(common.hosts()), 'host')}"
    points = []
    steps = sum(len(measurements(case, comm)) for case in cases.values())
    with Output(steps, is_chief=common.rank() == 0) as out:
        table = Table(cases)
        out.line(f"{where}, {runtime.current().data_name}. {steps} measurements"
                 + ("" if options.repeats else f", most of them within {LIMIT_S:g} s, so at most about "
                    f"{counted(ceil(steps * LIMIT_S / 60), 'minute')}") + f"\n{table.header()}")
        for name, case in cases.items():
            points.append(measure(name, case, comm, options.repeats, out.begin))
            out.line(table.row(points[-1]))
    if comm is not None:
        comm.Free()
    if common.rank() != 0:
        return
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([point.as_json() for point in points], file, indent=1)
    if options.plot:
        allreduces = [point for point in points if point.operation == "allreduce"]
        plot(allreduces, options.plot, f"All-reduce of float32, {where}")


def _parser() -> Parser:
    parser = Parser("bench", "Measure collectives on the ranks of this job.", _EPILOG)
    parser.add_argument("cases", nargs="*", type=_case, default=list(CASES), metavar="CASE",
                        help=f"one or more of {', '.join(CASES)}; default: all")
    parser.add_argument("--repeats", type=_count, metavar="N", help="repetitions of each case; default: by its bytes")
    parser.add_argument("--json", metavar="FILE", help="write the results to a file, as JSON")
    parser.add_argument("--plot", metavar="FILE",
                        help=f"plot the bandwidth of the all-reduces against their bytes ({', '.join(_PICTURES)})")
    return parser


def _case(text: str) -> str:
    if text not in CASES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a case. The cases are: {', '.join(CASES)}")
    return text


def _count(text: str) -> int:
    return positive_int(text, f"a whole number of at least 1 is needed. Received: {text}")
