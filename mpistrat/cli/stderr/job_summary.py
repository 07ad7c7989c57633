"""The last lines of `mpistrat run`: which ranks have failed, why, and the exit code. Pure."""

import signal
from collections.abc import Sequence

from ...core.topology import runs_of
from ...process.error_text import OWN_ERRORS
from ...process.launchers import Launcher
from ...process.report import Report
from .mpirun_lines import Ending, Words

JOB = "the job"
MOST_GROUPS = 3
_MOST_HOSTS = 4
# Raised on ranks that wait for a rank that has ended. If the ended rank reports why, this error is a consequence.
_CONSEQUENCE = f"{OWN_ERRORS}ShutdownError:"
_WITHOUT_INIT = ("no rank has called init(): each of {} processes has run the whole script alone, and has trained "
                 "its own model if it trains. To train together, write in the script: import mpistrat.keras as hvd; "
                 "hvd.init(); optimizer = hvd.DistributedOptimizer(optimizer). Or, in place of a strategy of "
                 "tf.distribute: strategy = mpistrat.tensorflow.MPIStrategy()")
_SIGNAL_HINTS = {
    signal.SIGKILL: "by a user (kill -9), or by the kernel for lack of memory (see dmesg)",
    signal.SIGSEGV: "it crashed in compiled code; PYTHONFAULTHANDLER=1 prints where",
    signal.SIGABRT: "a library ended the rank; the message of the library is above",
    signal.SIGBUS: "it crashed in compiled code; PYTHONFAULTHANDLER=1 prints where",
}


def summarize(code: int, reports: Sequence[Report], words: Sequence[Words], *, interrupted_by: int | None = None,
              died_of: int | None = None, launcher: Launcher | None = None, can_show_more: bool = True,
              without_init: int = 0, why_not_started: str = "", subject: str = JOB) -> tuple[bytes, list[str]]:
    """Return what to print after the job: unchanged output of mpirun, and lines of mpistrat.

    Args:
        reports: The reports of ranks that failed, in order of arrival.
        words: The texts of mpirun that were held back.
        interrupted_by: The signal with which the user has ended the job, or None.
        died_of: The signal that has killed mpirun itself, unless this process sent the signal; or None.
        launcher: The launcher that ran the job.
        can_show_more: Whether --traceback would show more.
        without_init: Number of ranks that have ended without init().
        why_not_started: Why some ranks have not started, or "".
        subject: The subject of the sentence on the exit code: the job, or a generation of the job.
    """
    if code == 0:
        # The reports are from another job, which a rank has started, and whose failure the rank has handled.
        alone = [_WITHOUT_INIT.format(without_init)] if without_init > 1 else []
        return b"".join(each.text for each in words), [*_lines_of(_groups(reports)), *alone]
    if interrupted_by == signal.SIGINT:
        reports = [report for report in reports if report.text.message != KeyboardInterrupt.__name__]
    # The reports that are not a consequence of another report.
    causes = [report for report in reports if not report.text.message.startswith(_CONSEQUENCE)]
    groups = _groups(causes or reports)
    end = f"{subject} has ended with exit code {code}"
    if groups:
        first, text = groups[0][0], groups[0][1].text
        if len(groups) == 1 and not text.frames and "\n" not in text.message:
            return b"", [f"{end}. R{_who(first)[1:]}: {text.message}"]
        return b"", [*_lines_of(groups), end + (" (--traceback prints whole tracebacks)" if can_show_more else "")]
    endings = [each.ending for each in words if each.ending is not None]
    is_said = bool(endings) and all(ending.signal in (None, interrupted_by) for ending in endings)
    kept = b"".join(each.text for each in words if each.is_error or not is_said)
    reason = f": {why_not_started}" if why_not_started else \
        _reason(code, endings, interrupted_by, died_of, launcher, subject)
    return kept, [f"{end}{reason}"]


def _reason(code: int, endings: Sequence[Ending], interrupted_by: int | None, died_of: int | None,
            launcher: Launcher | None, subject: str) -> str:
    """Return the end of the sentence on the exit code: the reason, or ""."""
    if interrupted_by is not None:
        return f": it was ended by {'Ctrl-C' if interrupted_by == signal.SIGINT else _signal(interrupted_by)}"
    if died_of == signal.SIGKILL:
        by_agent = "" if subject == JOB else "by the agent of this host, "
        return f": mpirun itself was killed, {_signal(died_of)}: {by_agent}{_SIGNAL_HINTS[signal.SIGKILL]}"
    if died_of is not None:
        return f": mpirun itself crashed, {_signal(died_of)}. Were there more ranks than this machine can start (-np)?"
    if endings:
        ending = endings[0]
        where = f"rank {ending.rank}" + (f" on {ending.host}" if ending.host else "")
        if ending.signal is None and ending.code is None:
            return f": {where} called MPI_Abort. If \"Socket closed\" is above, another rank or its host has died"
        if ending.signal is None:
            return f", that of {where}" if ending.code == code else f": {where} has ended with {ending.code}"
        hint = _SIGNAL_HINTS.get(ending.signal)  # type: ignore[call-overload]
        return f": {where} was killed, {_signal(ending.signal)}" + (f": {hint}" if hint else "")
    if code > 128 and _signal_name(code - 128):
        return (f": mpirun ended as by {_signal(code - 128)}, and named no rank. Probably mpirun itself crashed. Were "
                "there more ranks than this machine can start (-np)?")
    if launcher is not None and launcher.is_code_ambiguous and code in (
            signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGTERM):
        return f": a rank returned this code, or was killed by {_signal(code)}; {launcher.name} has one code for both"
    return ""


def _groups(reports: Sequence[Report]) -> list[tuple[list[Report], Report]]:
    """Group reports by message. Returns (reports with this message, the report of the lowest rank) for each message."""
    by_message: dict[str, list[Report]] = {}
    for report in reports:
        by_message.setdefault(report.text.message, []).append(report)
    return [(group, min(group, key=lambda report: report.rank)) for group in by_message.values()]


def _lines_of(groups: Sequence[tuple[list[Report], Report]]) -> list[str]:
    """Return the lines on groups of reports. The first group comes last, next to the end of the output."""
    lines = []
    if len(groups) > MOST_GROUPS:
        left = [report for group, _ in groups[MOST_GROUPS:] for report in group]
        lines.append(f"{_who(left)} failed with {len(groups) - MOST_GROUPS} other messages (--traceback prints them)")
    for group, first in reversed(groups[:MOST_GROUPS]):
        lines.append(f"{_who(group)} failed:\n{first.text}")
    return lines


def _who(reports: Sequence[Report]) -> str:
    """Return ranks and hosts as text: "rank 1 on node1", "ranks 0-3, 5 on node1, node2"."""
    ranks = sorted({report.rank for report in reports})
    hosts = sorted({report.host for report in reports})
    numbers = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs_of(ranks))
    places = ", ".join(hosts) if len(hosts) <= _MOST_HOSTS else f"{len(hosts)} hosts"
    return f"rank{'s' * (len(ranks) > 1)} {numbers} on {places}"


def _signal(number: int) -> str:
    name = _signal_name(number)
    return f"signal {number} ({name})" if name else f"signal {number}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""
