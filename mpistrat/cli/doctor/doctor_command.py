"""`mpistrat doctor`: print what this machine has, examine the hosts of a job, and print problems with their remedies.

Called by main.py.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...api.common import Row
from ...core.errors import LaunchError
from ..arguments import AUTO, Parser, add_launch_options, counted, positive_seconds, read_hosts
from ..automatic import automatic
from ..findings import understood
from ..inventory import backend_rows, gpu_rows, has_nvidia_driver, mpi_rows, nvidia_gpus, software
from ..mpirun import Job, LaunchCommand, Mpirun, check_count, compose, find_mpirun, identify, this_machine, with_home
from ..probe import probe
from ..rank_shell import in_shell
from ..ssh import hosts_by_ssh, unreachable
from ..supervisor import Outcome, Start, launch
from ..termination import TimeLimits
from .facts import Facts, collect
from .judge import FAILURE, Finding, MpiFacts, Observed, findings
from .links import Link
from .slurm import sizes_of_srun

DEFAULT_TIMEOUT_S = 120.0
_START_S = 30.0  # time limit for the start of ranks on other hosts

_EPILOG = """\
Without -np and hosts doctor examines this machine alone. Otherwise doctor starts the ranks, and each rank reports
versions, cores, memory, disks and limits. Then the ranks measure the links between hosts, and run an all-reduce. Every
wait has a time limit.

The exit code is 0 without failures, also with warnings; 1 if a failure will make a job fail; 2 for wrong input.

examples:
  mpistrat doctor
  mpistrat doctor -np 2
  mpistrat doctor -H node1:4,node2:4
"""


def main(argv: list[str]) -> int:
    """Run the subcommand and return the exit code: 1 if a finding will make a job fail, else 0.

    Raises LaunchError: The input is wrong.
    """
    options = _parser().parse_args(argv)
    hosts = read_hosts(options)
    if options.np == AUTO:
        options.np, _ = automatic(hosts, this_machine(os.environ), os.environ)
    ranks = options.np or (0 if hosts is None else hosts.slots or 0)
    if hosts is not None and not ranks:
        raise LaunchError("a host in the hostfile has no number of slots. Write the number of ranks, for example: "
                          "mpistrat doctor -np 2")
    mpirun, mpirun_error = _find_mpirun(options.mpirun)
    machine = this_machine(os.environ)
    command = None
    others = hosts_by_ssh(hosts, machine, (), os.environ)
    if ranks and mpirun is not None:
        line = (sys.executable, "-m", f"{__package__}.rank", str(ranks))
        job = Job(ranks, in_shell(line, ranks, is_announced=bool(others)), hosts, options.oversubscribe,
                  reads_stdin=False)
        check_count(job, machine, None)
        command = compose(job, mpirun, machine, os.environ)
    say: Callable[[str], None] = (lambda text: None) if options.json else print

    found, has_driver = probe(), has_nvidia_driver()
    rows = [*software(), *mpi_rows(found, mpirun, mpirun_error), *gpu_rows(found, nvidia_gpus(os.environ), has_driver)]
    backends = backend_rows(found, has_driver)
    say(table("This machine", rows))
    say(table("Backends", backends))
    if ranks:
        say(f"Looking at {counted(ranks, 'rank')} ...")
        observed = _observe(ranks, others, command, mpirun_error, options.timeout)
        say("\n".join(_measured(observed)))
    else:
        observed = Observed(facts=[collect()])
    # Ranks report on this machine if they run here; they may all run on other hosts.
    wrong = [*([] if ranks else _machine_findings(rows, backends)), *findings(observed)]
    if options.json:
        print(json.dumps(_as_json(wrong, observed, rows, backends), indent=1))
    else:
        print(_report(wrong))
    return 1 if any(finding.severity == FAILURE for finding in wrong) else 0


def table(title: str, rows: Sequence[Row]) -> str:
    """Format the rows as text with aligned labels, followed by an empty line."""
    width = max((len(row.label) for row in rows), default=0)
    return "\n".join([title, *(f"  {row.label:<{width}}  {row.text}" for row in rows), ""])


def _observe(ranks: int, others: list[str], command: LaunchCommand | None, mpirun_error: str,
             timeout_s: float) -> Observed:
    """Try ssh to the other hosts, then start the ranks unless a host cannot be reached.

    Args:
        others: The hosts on which mpirun starts ranks by ssh.
        command: The command that starts the ranks; None if there is no mpirun, for the reason `mpirun_error`.
        timeout_s: Time limit for the job of the ranks, in seconds.
    """
    away = unreachable(others, os.environ, (sys.executable,)) if others else {}
    sizes = sizes_of_srun(os.environ)
    if command is None or away:
        return Observed(ranks, [collect()], unreachable=away, mpirun_problem=mpirun_error, sizes_of_srun=sizes)
    start = Start(ranks, _START_S, lambda: "") if others else None
    with open(os.memfd_create("mpistrat-doctor"), "w+", errors="replace") as printed:
        outcome = launch(command, with_home(os.environ), TimeLimits(total_s=timeout_s), start=start,
                         speaker="mpistrat doctor", stdout=printed.fileno())
        printed.seek(0)
        said = list(understood(printed.read()))
    return observed_of(ranks, said, outcome, str(command), sizes)


def observed_of(ranks: int, said: Sequence[dict[str, Any]], outcome: Outcome, line: str,
                sizes: Mapping[str, int]) -> Observed:
    """Combine the lines that the ranks have printed and the outcome of the job."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for each in said:
        by_kind.setdefault(each["kind"], []).append({name: value for name, value in each.items() if name != "kind"})
    return Observed(
        ranks, sorted(map(Facts.of, by_kind.get("facts", [])), key=lambda facts: facts.rank),
        sorted((MpiFacts(each["rank"], each["size"], f"{each['vendor']} {each['version']}", each["shared_memory"])
                for each in by_kind.get("mpi", [])), key=lambda mpi: mpi.rank),
        [Link(**{**each, "hosts": tuple(each["hosts"])}) for each in by_kind.get("link", [])],
        sorted({tuple(each["hosts"]) for each in by_kind.get("silence", [])}), {}, "", dict(sizes),
        {each["rank"]: each["text"] for each in by_kind.get("error", [])}, by_kind.get("allreduce", [{}])[0],
        (outcome.why or f"exit code {outcome.code}") if outcome.code else "", line,
        sorted(by_kind.get("gpu", []), key=lambda each: each["rank"]))


def _machine_findings(rows: Sequence[Row], backends: Sequence[Row]) -> list[Finding]:
    found = [Finding("this machine", FAILURE, f"this machine cannot train: {row.label} {row.text.partition(': ')[0]}",
                     row.text.partition(": ")[2]) for row in rows if row.needed and not row.is_available]
    if not any(row.is_available for row in backends):
        found.append(Finding("this machine", FAILURE, "this machine cannot train: no backend can run",
                             "see the reasons above, after the names of the backends"))
    return found


def _measured(observed: Observed) -> list[str]:
    """Return the lines on hosts, links and the all-reduce."""
    lines = []
    # Without MPI's facts no rank has started, and `facts` are those of this machine.
    for host in dict.fromkeys(each.host for each in observed.facts if observed.mpi):
        local = [each for each in observed.facts if each.host == host]
        one = local[0]
        lines.append(f"  {host}: {counted(len(local), 'rank')}, {counted(one.cores, 'core')}, "
                     f"{one.memory / 2**30:.3g} GB of memory")
    lines += [f"  {link.hosts[0]} - {link.hosts[1]}: {link.bytes_per_s / 1e6:.3g} MB per second, "
              f"{1e3 * link.latency_s:.3g} ms, clocks {1e3 * link.offset_s:+.3g} ms" for link in observed.links]
    result = observed.result
    if result:
        lines.append(f"  all-reduce {'right' if result['right'] else 'wrong'}: {counted(observed.ranks, 'rank')} on "
                     f"{counted(len(result['hosts']), 'host')} ({', '.join(result['hosts'])}), "
                     f"{1e6 * result['seconds']:.0f} us for {result['bytes']} bytes")
        lines += [f"  {sentence}" for sentence in result.get("choices", [])]
    lines += [f"  rank {each['rank']}, GPU: all-reduce {'right' if each['right'] else 'wrong'}; "
              f"{'; '.join(each['findings'])}" for each in observed.gpus]
    return [*lines, ""]


def _report(wrong: Sequence[Finding]) -> str:
    """Return the text of the findings, each with its remedy in the next line, and their number."""
    lines = [line for finding in wrong for line in (f"{finding.severity}: {finding.text}.", f"  {finding.fix}")]
    failures = sum(finding.severity == FAILURE for finding in wrong)
    if not wrong:
        return "Nothing wrong was found."
    return "\n".join([*lines, f"{counted(failures, 'failure')}, {counted(len(wrong) - failures, 'warning')}."])


def _as_json(wrong: Sequence[Finding], observed: Observed, rows: Sequence[Row], backends: Sequence[Row]
             ) -> dict[str, Any]:
    return {"version": 1, "findings": [dataclasses.asdict(finding) for finding in wrong],
            "machine": {row.label: row.text for row in rows if row.label},
            "backends": {row.label: row.text for row in backends}, "observed": dataclasses.asdict(observed)}


def _parser() -> Parser:
    parser = Parser("doctor", "Find the problems on the hosts of a job, and print their remedies.", _EPILOG)
    add_launch_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object with the findings and all facts")
    parser.add_argument("--timeout", type=positive_seconds, default=DEFAULT_TIMEOUT_S, metavar="SECONDS",
                        help=f"time limit for the job on the hosts (default {DEFAULT_TIMEOUT_S:g})")
    return parser


def _find_mpirun(wanted: str | None) -> tuple[Mpirun | None, str]:
    try:
        return identify(find_mpirun(wanted, os.environ)), ""
    except LaunchError as error:
        return None, str(error)
