"""Coordinator: decides which requests all ranks execute next, and in which order. Pure: time is an argument.

The ranks form a tree of fan-out 16 with rank 0 at the root. A rank sends an Announcement to its parent once its whole
subtree has submitted a request. Rank 0 sends Decisions down the tree, and every rank executes them in the order in
which they arrive. Requests match by name, so ranks may submit in any order.

A request seen before travels as one number, and an announcement for a whole subtree has no list of ranks. So the work
of a rank per step depends on its sixteen children, not on the number of ranks.

A rank sends a number only for exactly the request (name, dtypes, shapes, operation, scale, device) that it was given
for. Any other request of the same name travels in full, and rank 0 compares it.

Called by the controller, in the thread that drives.
"""

from ..core.errors import MessageError
from ..core.request import CollectiveType, Request
from ..core.topology import Topology
from ..core.tuning import (
    LONGEST_CYCLE_S,
    STALL_ABORT_LONGEST_POLL_S,
    STALL_ABORT_LOOKS,
    STALL_LONGEST_POLL_S,
    STALL_SHORTEST_POLL_S,
    STALL_WARNING_LOOKS,
)
from .answers import AnswerWatch
from .blocked import BlockedRanks
from .joined import JOIN, JoinedRanks, problem_without
from .messages import Announcement, Decision, EndReason
from .numbers import RequestNumbers
from .pending import Pending
from .reports import describe_deadlock, describe_ended, describe_half_done, describe_mismatch, describe_stall
from .tree import Node

# Seconds for which all ranks must be blocked before rank 0 reports a deadlock, if all requests in flight are of graphs.
# A graph may submit another collective after an operation that sleeps in a library, which engine/parked.py cannot see.
_GRAPHS_S = 10.0


class Coordinator:
    """One rank's node of the tree.

    The caller passes what this rank does to `submit` and `end`, and what other ranks have sent to `receive`. Then it
    calls `advance`, and sends what `advance` returns.

    Args:
        rank: This rank.
        size: How many ranks there are.
        cache_capacity: How many requests get a number.
        stall_warning_s: Age in seconds at which an incomplete request is reported; None: never.
        stall_abort_s: Age in seconds at which it ends the engines; None: never.
        topology: Where the ranks are, for messages; None: all on one host.
    """

    def __init__(self, rank: int, size: int, cache_capacity: int, stall_warning_s: float | None = None,
                 stall_abort_s: float | None = None, topology: Topology | None = None):
        self.rank, self.size = rank, size
        self._topology = topology or Topology(rank, ("",) * size)
        self._node = Node(rank, size)
        self.parent, self.children, self.neighbours = self._node.parent, self._node.children, self._node.neighbours
        self._warning_s, self._abort_s = stall_warning_s, stall_abort_s
        self._abort_setting = "MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS"
        self._pending: dict[str, Pending] = {}
        self._unanswered = AnswerWatch(self._topology, stall_warning_s)
        self._numbers = RequestNumbers(cache_capacity)
        self._blocked = BlockedRanks(self._node)
        self._blocked_since: float | None = None  # On rank 0: all ranks are, since then.
        self._joined = JoinedRanks(self._node)
        self._ready: list[Pending] = []  # complete since the last advance, in order
        self._new_ended: list[tuple[int, int]] = []  # (rank, completed operations), since the last advance
        self._failure: str | None = None
        self._is_stalled = False  # the reason for the failure
        self._must_end_vote = False
        self._ended: dict[int, int] = {}  # on rank 0: completed operations of each rank that has ended
        self._has_ended_ranks = False  # some rank has called shutdown()
        self._is_end_sent = False  # on rank 0: a decision has had `ended`
        self._last_report = 0.0
        self._next_check = 0.0
        self._finished = False

    # -- what happens -------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """This rank is ready for `request`. No other request of its name may be in flight on this rank."""
        self._blocked.note(self.rank, None)
        if request.kind is CollectiveType.JOIN:
            self._joined.note(self.rank, (self.rank,), now)
            return
        self._unanswered.begin(request.name, now)
        self._report(self.rank, request, None, now)

    def end(self, completed: int) -> None:
        """This rank has called shutdown() after `completed` operations."""
        self._new_ended.append((self.rank, completed))
        self._has_ended_ranks = True

    def fail(self, text: str, is_stall: bool = False) -> None:
        """This rank's engine has failed, because of a stall or of another error. All ranks are to end."""
        if self._failure is None:
            self._failure, self._is_stalled = text, is_stall

    def set_blocked(self, is_blocked: bool) -> None:
        """Whether this rank is blocked, as blocked.py says. It has executed all decisions that it has learned."""
        self._blocked.note(self.rank, self._blocked.decisions if is_blocked else None)

    @property
    def decisions(self) -> int:
        """How many decisions this rank has learned."""
        return self._blocked.decisions

    def request_vote_end(self) -> None:
        """Ask rank 0 for a decision, which may be empty. A decision ends an open vote."""
        self._must_end_vote = True

    def receive(self, source: int, data: bytes, now: float) -> None:
        """Take the Announcement of a child.

        Raises:
            MessageError: `data` is not an announcement, or is not for this rank.
        """
        message = Announcement.from_bytes(data, source)
        if source not in self.children:
            raise MessageError(f"rank {source} sent an announcement to rank {self.rank}, which is not its parent.")
        for number in message.ids:
            self._report(source, self._request_of(number, source), None, now)
        for request, ranks in message.requests:
            self._report(source, request, None if ranks is None else set(ranks), now)
        if message.joined:
            self._joined.note(source, message.joined, now)
        self._new_ended += message.ended
        self._has_ended_ranks = self._has_ended_ranks or bool(message.ended)
        if message.failure is not None:
            self.fail(message.failure, message.is_stalled)
        self._must_end_vote = self._must_end_vote or message.ends_vote
        self._blocked.note(source, message.blocked)

    def learn(self, decision: Decision) -> tuple[Request, ...]:
        """Take a decision of rank 0. Returns the requests to execute, in order.

        Raises:
            MessageError: The decision has a number that stands for no request.
        """
        self._blocked.decisions += 1
        requests = []
        for item in decision.agreed:
            if isinstance(item, int):
                requests.append(self._request_of(item, 0))
            else:
                number, request = item
                if number is not None:
                    self._numbers.add(request, number)
                requests.append(request)
        self._has_ended_ranks = self._has_ended_ranks or decision.ended
        self._unanswered.end(request.name for request in requests)
        self._unanswered.end(name for name, _ in decision.errors)
        if self._joined.ranks:
            # Rank 0 completed these without the ranks that have joined. Here they are still incomplete.
            for name in (*(request.name for request in requests), *(name for name, _ in decision.errors)):
                self._pending.pop(name, None)
        if decision.last_joined:
            self._joined.clear()
        return tuple(requests)

    def advance(self, now: float) -> tuple[Announcement | None, Decision | None]:
        """The message to send now: an Announcement to the parent, or (on rank 0) a Decision for all ranks."""
        ready, self._ready = self._ready, []
        return (None, self._decide(ready, now)) if self.rank == 0 else (self._announce(ready, now), None)

    # -- time ---------------------------------------------------------------------------------------------------------

    def stalled(self, now: float, limit: float) -> dict[str, list[int]]:
        """The names incomplete for more than `limit` seconds, each with the ranks of this subtree that miss."""
        return {name: pending.missing() for name, pending in self._incomplete().items() if now - pending.since > limit}

    def next_check_s(self, now: float) -> float:
        """Seconds after which `advance` must be called again even if nothing happens."""
        if not (self._pending or self._unanswered or self._joined.ranks) or self._warning_s is None:
            return LONGEST_CYCLE_S
        return max(STALL_SHORTEST_POLL_S, min(self._warning_s / STALL_WARNING_LOOKS, STALL_LONGEST_POLL_S))

    def check(self, now: float) -> None:
        """Check that rank 0 answers: AnswerWatch.check, with the limit on stalls. To be called in every cycle.

        Raises:
            StallError: Rank 0 does not answer.
        """
        if self._abort_s is not None:
            self._unanswered.check(now, self._abort_s)

    # -- announcements and decisions ----------------------------------------------------------------------------------

    def _report(self, source: int, request: Request, ranks: set[int] | None, now: float) -> None:
        pending = self._pending.get(request.name)
        if pending is None:
            pending = self._pending[request.name] = Pending(self._node, now)
        pending.add(source, request, ranks)
        if pending.is_complete:
            del self._pending[request.name]
            self._ready.append(pending)

    def _request_of(self, number: int, sender: int) -> Request:
        request = self._numbers.request_of(number)
        if request is None:
            raise MessageError(f"rank {sender} sent the number {number}, which stands for no request on rank "
                               f"{self.rank}.")
        return request

    def _announce(self, ready: list[Pending], now: float) -> Announcement | None:
        ids: list[int] = []
        requests: list[tuple[Request, tuple[int, ...] | None]] = []
        for pending in ready:
            request = pending.agreed()
            if request is None:
                requests += [(r, tuple(sorted(ranks))) for r, ranks in pending.by_request().items()]
            else:
                number = self._numbers.number_of(request)
                if number is None:
                    requests.append((request, None))
                else:
                    ids.append(number)
        blocked, is_news = self._blocked.to_send()
        # Incomplete requests are passed on only when rank 0 needs them: for a report, because a rank has ended or
        # joined, or because all ranks may wait for each other.
        after_s = 0.0 if self._has_ended_ranks or self._joined.ranks or blocked is not None else \
            None if self._warning_s is None else self._warning_s / 2
        if after_s is not None:
            for pending in self._pending.values():
                if now - pending.since >= after_s and (present := len(pending.present())) != pending.passed_on:
                    pending.passed_on = present
                    requests += [(r, tuple(sorted(ranks))) for r, ranks in pending.by_request().items()]
        ended, self._new_ended = tuple(self._new_ended), []
        failure, self._failure = self._failure, None
        ends_vote, self._must_end_vote = self._must_end_vote, False
        joined = self._joined.take_news()
        if not (ids or requests or ended or failure or ends_vote or is_news or joined):
            return None
        is_stalled = failure is not None and self._is_stalled
        self._blocked.sent(blocked)
        return Announcement(tuple(ids), tuple(requests), ended, failure, ends_vote, is_stalled, blocked, joined)

    def _decide(self, ready: list[Pending], now: float) -> Decision | None:
        agreed: list[int | tuple[int | None, Request]] = []
        errors: list[tuple[str, str]] = []
        absent: list[tuple[int, ...]] = []
        half_done = ""
        for pending in (*ready, *self._completed_by_joins()):
            missing = tuple(pending.missing()) if self._joined.ranks else ()
            request = pending.agreed_by_present() if missing else pending.agreed()
            text = problem_without(missing, request, self._topology) if missing and request is not None else ""
            if request is not None and not text:
                agreed.append(self._numbered(request))
                absent.append(missing)
            else:
                by_request = pending.by_request()
                text = text or describe_mismatch(by_request, self._topology)
                errors.append((next(iter(by_request)).name, text))
                if any(request.in_graph for request in by_request):
                    half_done = half_done or text
        for rank, completed in self._new_ended:
            self._ended[rank] = completed
        self._new_ended = []
        end, text = self._reason_to_end(now)
        if half_done and end is None:
            end, text = EndReason.MISMATCH, describe_half_done(half_done)
        if not ready and end is None and self._is_deadlock(now):
            end, text = EndReason.DEADLOCK, describe_deadlock(self._topology, self._incomplete())
        if self._failure is not None:
            agreed = []  # The failed rank takes part in no further collective.
        if agreed:
            self._joined.note_progress(now)
        have_all_joined = len(self._joined.ranks) == self.size and end is None
        sends_ended = bool(self._ended) and not self._is_end_sent
        ends_vote, self._must_end_vote = self._must_end_vote, False
        if self._finished or not (agreed or errors or end or sends_ended or ends_vote or have_all_joined):
            return None
        self._is_end_sent = self._is_end_sent or sends_ended
        self._finished = end is not None
        return Decision(tuple(agreed), tuple(errors), sends_ended, end, text,
                        absent=tuple(absent) if agreed and any(absent) else (),
                        last_joined=(self._joined.ranks[-1],) if have_all_joined else ())

    def _completed_by_joins(self) -> list[Pending]:
        """On rank 0: what is complete because all ranks that miss have joined."""
        if not self._joined.ranks:
            return []
        joined = set(self._joined.ranks)
        names = [name for name, pending in self._pending.items() if joined.issuperset(pending.missing())]
        return [self._pending.pop(name) for name in names]

    def _incomplete(self) -> dict[str, Pending]:
        """What is incomplete, by name, with the join if some ranks have joined."""
        return self._pending if self._joined.pending is None else {**self._pending, JOIN.name: self._joined.pending}

    def _is_deadlock(self, now: float) -> bool:
        """Whether no rank can go on, given that no request is complete."""
        if not (self._pending and self._blocked.are_all):
            self._blocked_since = None
            return False
        if self._blocked_since is None:
            self._blocked_since = now
        are_in_graphs = all(request.in_graph for pending in self._pending.values() for request in pending.by_request())
        return now - self._blocked_since >= (_GRAPHS_S if are_in_graphs else 0.0)

    def _reason_to_end(self, now: float) -> tuple[EndReason | None, str]:
        if self._failure is not None:
            return EndReason.STALL if self._is_stalled else EndReason.FAILURE, self._failure
        if self._ended:
            for name, pending in self._incomplete().items():
                lost = sorted(set(pending.missing()) & self._ended.keys())
                if lost:
                    return EndReason.RANK_ENDED, describe_ended(self._topology, name, pending, lost, self._ended)
            if len(self._ended) == self.size:
                return EndReason.SHUTDOWN, "mpistrat has been shut down by all ranks."
        if self._abort_s is not None and now >= self._next_check:
            # Not in every cycle: checking all pending names takes long, and the end may be this late.
            self._next_check = now + min(self._abort_s / STALL_ABORT_LOOKS, STALL_ABORT_LONGEST_POLL_S)
            stalled = self.stalled(now, self._abort_s)
            if stalled:
                return EndReason.STALL, describe_stall(self._topology, self._incomplete(), stalled, now) + \
                    f" Ended after {self._abort_s:g} s ({self._abort_setting})."
        return None, ""

    def abort_stalls_after(self, seconds: float, setting: str) -> None:
        """From now on, end the engines when a request has been incomplete for so long. `setting` names the cause."""
        self._abort_s, self._abort_setting = seconds, setting

    def stall_report(self, now: float) -> str | None:
        """On rank 0, the warning that is due now, if any; each stall is reported every `stall_warning_s`."""
        if self.rank != 0 or self._warning_s is None or now - self._last_report < self._warning_s:
            return None
        stalled = self.stalled(now, self._warning_s)
        if not stalled:
            return None
        self._last_report = now
        return describe_stall(self._topology, self._incomplete(), stalled, now)

    def _numbered(self, request: Request) -> int | tuple[int | None, Request]:
        """The request's number, or the request with a new one if it gets one now."""
        number = self._numbers.number_of(request)
        return (self._numbers.give(request), request) if number is None else number
