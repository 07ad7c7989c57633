"""Draw summaries of jobs with rich. Called by top_command.py."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...core.slowest import Waits, behind, figure
from ...core.topology import rank_list
from ..arguments import counted
from .rates import Summary

_MOST_RANKS = 64  # More ranks do not fit on a screen. Only the first ranks get a line.


def drawn(summary: Summary, problems: Sequence[str] = ()) -> RenderableType:
    """Draw one job: a summary of all ranks, a line for each rank, and the stalled operations."""
    ranks = f"{counted(summary.size, 'rank')} on {counted(len(summary.hosts), 'host')}"
    head = Text(f"{summary.script}  {ranks}, since {_duration(summary.age_s)}  ({summary.job})", style="bold")
    hidden = behind(Waits(1.0, moving=summary.communication, hidden=summary.hidden))
    lines: list[RenderableType] = [head, Text(
        f"{figure(summary.steps_per_s)} steps and {figure(summary.rows_per_s)} rows per second of all ranks; "
        f"communication {summary.communication:.0%} of the time{hidden and f', {hidden}'}")]
    if summary.silent_s:
        lines.append(Text(f"The job has reported nothing for {_duration(summary.silent_s)}. It has ended, or hangs.",
                          style="red"))
    lines.append(Text(f"The slowest is rank {summary.slowest}: {summary.why}" if summary.slowest is not None
                      else f"No rank is slower than the others: {summary.why}."))
    table = Table("rank", "host", "process", "steps", "steps/s", "rows/s", "computes", "waits", "moves", "memory",
                  box=None, header_style="bold", pad_edge=False)
    for line in summary.ranks[:_MOST_RANKS]:
        style = "red" if line.silent_s else "yellow" if line.rank == summary.slowest else ""
        last = f"silent {_duration(line.silent_s)}" if line.silent_s else f"{line.rss_bytes / 2**30:.2f} GB"
        table.add_row(str(line.rank), line.host, str(line.pid), "-" if line.steps is None else str(line.steps),
                      figure(line.steps_per_s), figure(line.rows_per_s), f"{line.computing:.0%}",
                      f"{line.waiting:.0%}", f"{line.moving:.0%}", last, style=style)
    lines.append(table)
    if len(summary.ranks) > _MOST_RANKS:
        lines.append(Text(f"and {len(summary.ranks) - _MOST_RANKS} more ranks (--json prints all)"))
    lines += [Text(f"{stall.name} is not complete for {_duration(stall.since_s)}: ranks "
                   f"{rank_list(stall.waiting)} wait for "
                   f"{f'ranks {rank_list(stall.missing)}' if stall.missing else 'its end'}", style="red")
              for stall in summary.stalls]
    return Group(*lines, *_said(problems))


def listed(summaries: Sequence[Summary], problems: Sequence[str] = ()) -> RenderableType:
    """Draw a list of jobs, one line for each job."""
    table = Table("job", "script", "ranks", "since", "steps/s", "communication", box=None, header_style="bold",
                  pad_edge=False)
    for each in summaries:
        table.add_row(each.job, each.script, str(each.size), _duration(each.age_s), figure(each.steps_per_s),
                      f"silent {_duration(each.silent_s)}" if each.silent_s else f"{each.communication:.0%}")
    return Group(table, Text("To show one job, type: mpistrat top JOB, or mpistrat top SCRIPT"), *_said(problems))


def _said(problems: Sequence[str]) -> list[Text]:
    return [Text(f"not shown: {problem}", style="yellow") for problem in problems]


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
