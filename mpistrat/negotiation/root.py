"""Root: what rank 0 decides. Pure: time is an argument.

A decision has the requests that all ranks execute next, in order, the errors of requests on which the ranks disagree,
and the end of the engines with its reason. Called by the coordinator of rank 0.
"""

from ..core.request import Request
from .joined import problem_without
from .messages import Decision, EndReason
from .pending import Pending
from .reports import describe_ended, describe_mismatch, describe_mismatch_in_graph
from .stall_watch import StallWatch
from .subtree import Subtree


class Root:
    """Makes the decisions of rank 0, by what it has learned about all ranks and by the ages of incomplete requests."""

    def __init__(self, subtree: Subtree, stalls: StallWatch):
        self._subtree, self._stalls = subtree, stalls
        self._is_end_sent = False  # A decision has had `ended`.
        self._is_finished = False  # A decision has ended the engines.

    def decide(self, now: float, quiet_s: float) -> Decision | None:
        """The decision that is due now; None: there is nothing to decide. The arguments are those of `advance`."""
        subtree, joined = self._subtree, self._subtree.joined
        ready = subtree.take_ready()
        agreed: list[int | tuple[int | None, Request]] = []
        absent: list[tuple[int, ...]] = []
        errors: list[tuple[str, str]] = []
        mismatch_in_graph = ""
        for pending in (*ready, *self._completed_by_joins()):
            missing = tuple(pending.missing()) if joined.ranks else ()
            request, problem = self._outcome(pending, missing)
            if request is not None:
                numbers = self._subtree.numbers
                number = numbers.number_of(request)
                agreed.append((numbers.give(request), request) if number is None else number)
                absent.append(missing)
            else:
                by_request = pending.by_request()
                errors.append((next(iter(by_request)).name, problem))
                if any(each.in_graph or each.failures for each in by_request):
                    mismatch_in_graph = mismatch_in_graph or problem
        subtree.ended.completed.update(subtree.ended.take_news())
        end, text = self._reason_to_end(mismatch_in_graph, now, quiet_s)
        if subtree.ended.failure is not None:
            agreed = []  # The failed rank takes part in no further collective.
        if agreed and joined.pending is not None:
            joined.pending.since = now  # No stall of the ranks that wait in join(): the others make progress.
        have_all_joined = len(joined.ranks) == subtree.node.size and end is None
        asks = self._stalls.asks(now, quiet_s)
        sends_ended = bool(subtree.ended.completed) and not self._is_end_sent
        ends_vote = subtree.take_vote_end()
        if self._is_finished or not (agreed or errors or end or sends_ended or ends_vote or have_all_joined or asks):
            return None
        self._is_end_sent = self._is_end_sent or sends_ended
        self._is_finished = end is not None
        return Decision(tuple(agreed), tuple(errors), sends_ended, end, text,
                        absent=tuple(absent) if agreed and any(absent) else (),
                        last_joined=(joined.ranks[-1],) if have_all_joined else (), asks=asks)

    def _completed_by_joins(self) -> list[Pending]:
        """What is complete because all ranks that miss have joined."""
        pending = self._subtree.pending
        joined = set(self._subtree.joined.ranks)
        names = [name for name, each in pending.items() if joined.issuperset(each.missing())] if joined else []
        return [pending.pop(name) for name in names]

    def _outcome(self, pending: Pending, missing: tuple[int, ...]) -> tuple[Request | None, str]:
        """The request to execute, without the ranks that miss because they have joined; or None, and the error."""
        request = pending.agreed_by_present() if missing else pending.agreed()
        if request is None:
            return None, describe_mismatch(pending.by_request(), self._subtree.topology)
        problem = problem_without(missing, request, self._subtree.topology) if missing else ""
        return (None, problem) if problem else (request, "")

    def _reason_to_end(self, mismatch_in_graph: str, now: float, quiet_s: float) -> tuple[EndReason | None, str]:
        """Why the engines end now, and the text for the user; (None, ""): they go on."""
        subtree, ended = self._subtree, self._subtree.ended
        if ended.failure is not None:
            return EndReason.STALL if ended.is_stall else EndReason.FAILURE, ended.failure
        if ended.completed:
            for name, pending in subtree.incomplete().items():
                lost = sorted(set(pending.missing()) & ended.completed.keys())
                if lost:
                    return (EndReason.RANK_LEFT,
                            describe_ended(subtree.topology, name, pending, lost, ended.completed))
            if len(ended.completed) == subtree.node.size:
                return EndReason.SHUTDOWN, "mpistrat has been shut down by all ranks."
        if stall := self._stalls.reason_to_end(now):
            return EndReason.STALL, stall
        if mismatch_in_graph:
            return EndReason.MISMATCH, describe_mismatch_in_graph(mismatch_in_graph)
        if deadlock := self._stalls.deadlock(quiet_s):
            return EndReason.DEADLOCK, deadlock
        return None, ""
