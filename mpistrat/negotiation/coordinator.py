"""Coordinator: decides which requests all ranks execute next, and in which order. Pure: time is an argument.

The ranks form a tree of fan-out 16 with rank 0 at the root. A rank announces a request to its parent (Announcement)
when all ranks of its subtree have submitted the request. Rank 0 sends Decisions, which Root makes, down the tree. Every
rank executes the requests of the decisions in the order of arrival. Ranks may submit in different orders, because
requests match by name.

A request seen before travels as one number, and an announcement for a whole subtree has no list of ranks. Therefore the
work of a rank per step depends on its sixteen children, not on the number of ranks. A number stands for exactly one
request (name, dtypes, shapes, operation, scale, device). A request that differs in any of these has another number or
none, so rank 0 sees the difference. Used by the engine's thread.
"""

from ..core.errors import MessageError
from ..core.request import CollectiveType, Request
from ..core.topology import Topology
from ..core.tuning import LONGEST_CYCLE_S
from .messages import Announcement, Decision, EndReason
from .reports import AnswerWatch, StallWatch, describe_ended, describe_mismatch, describe_mismatch_in_graph
from .subtree import Pending, Subtree, problem_without

# -- rank 0 ------------------------------------------------------------------------------------------------------------


class Root:
    """Makes the decisions of rank 0, from the requests of all ranks and the ages of incomplete requests."""

    def __init__(self, subtree: Subtree, stalls: StallWatch):
        self._subtree, self._stalls = subtree, stalls
        self._is_end_sent = False  # A decision has had `ended`.
        self._is_finished = False  # A decision has ended the engines.

    def decide(self, now: float, quiet_s: float) -> Decision | None:
        """Return the Decision to send now, or None if there is none. For the arguments see `Coordinator.advance`."""
        subtree, joined = self._subtree, self._subtree.joined
        agreed: list[int | tuple[int | None, Request]] = []
        absent: list[tuple[int, ...]] = []
        errors: list[tuple[str, str]] = []
        mismatch_in_graph = ""
        ready, subtree.ready = subtree.ready, []
        for pending in (*ready, *self._completed_by_joins()):
            missing = tuple(pending.missing()) if joined.ranks else ()
            request, problem = self._outcome(pending, missing)
            if request is not None:
                numbers = subtree.numbers
                number = numbers.number_of(request)
                agreed.append((numbers.give(request), request) if number is None else number)
                absent.append(missing)
            else:
                by_request = pending.by_request()
                errors.append((next(iter(by_request)).name, problem))
                if any(each.in_graph or each.failures for each in by_request):
                    mismatch_in_graph = mismatch_in_graph or problem
        subtree.ended.completed.update(subtree.ended.news)
        subtree.ended.news.clear()
        end, text = self._reason_to_end(mismatch_in_graph, now, quiet_s)
        if subtree.ended.failure is not None:
            agreed = []  # The failed rank takes part in no further collective.
        if agreed and joined.pending is not None:
            joined.pending.since = now  # No stall of the ranks that wait in join(): the others make progress.
        have_all_joined = len(joined.ranks) == subtree.node.size and end is None
        asks = self._stalls.asks(now, quiet_s)
        sends_ended = bool(subtree.ended.completed) and not self._is_end_sent
        ends_vote, subtree.must_end_vote = subtree.must_end_vote, False
        if self._is_finished or not (agreed or errors or end or sends_ended or ends_vote or have_all_joined or asks):
            return None
        self._is_end_sent = self._is_end_sent or sends_ended
        self._is_finished = end is not None
        return Decision(tuple(agreed), tuple(errors), sends_ended, end, text,
                        absent=tuple(absent) if agreed and any(absent) else (),
                        last_joined=(joined.ranks[-1],) if have_all_joined else (), asks=asks)

    def _completed_by_joins(self) -> list[Pending]:
        """Remove and return the requests that are complete because only ranks in join() have not submitted them."""
        pending = self._subtree.pending
        joined = set(self._subtree.joined.ranks)
        names = [name for name, each in pending.items() if joined.issuperset(each.missing())] if joined else []
        return [pending.pop(name) for name in names]

    def _outcome(self, pending: Pending, missing: tuple[int, ...]) -> tuple[Request | None, str]:
        """Return (request to execute, "") or (None, error text). `missing`: Ranks in join() that did not submit it."""
        requests: list[Request | None] = [*pending.by_request()] if missing else [pending.agreed()]
        request = requests[0] if len(requests) == 1 else None
        if request is None:
            return None, describe_mismatch(pending.by_request(), self._subtree.topology)
        problem = problem_without(missing, request, self._subtree.topology) if missing else ""
        return (None, problem) if problem else (request, "")

    def _reason_to_end(self, mismatch_in_graph: str, now: float, quiet_s: float) -> tuple[EndReason | None, str]:
        """Return (reason, text for the user) if the engines must end now, else (None, "")."""
        subtree, ended = self._subtree, self._subtree.ended
        if ended.failure is not None:
            return EndReason.STALL if ended.is_stall else EndReason.FAILURE, ended.failure
        if ended.completed:
            for name, pending in subtree.incomplete().items():
                lost = sorted(set(pending.missing()) & ended.completed.keys())
                if lost:
                    return EndReason.RANK_LEFT, describe_ended(subtree.topology, name, pending, lost, ended.completed)
            if len(ended.completed) == subtree.node.size:
                return EndReason.SHUTDOWN, "mpistrat has been shut down by all ranks."
        if stall := self._stalls.reason_to_end(now):
            return EndReason.STALL, stall
        if mismatch_in_graph:
            return EndReason.MISMATCH, describe_mismatch_in_graph(mismatch_in_graph)
        if deadlock := self._stalls.deadlock(quiet_s):
            return EndReason.DEADLOCK, deadlock
        return None, ""


# -- the coordinator ---------------------------------------------------------------------------------------------------


class Coordinator:
    """The coordinator of one rank, which is a node of the tree.

    The caller passes this rank's requests to `submit`, announcements of children to `receive`, and decisions to
    `learn`. Then the caller calls `advance`, and sends the messages that `advance` returns.

    `cache_capacity`: The most requests that get a number. For the limits in seconds see StallWatch.
    """

    def __init__(self, topology: Topology, cache_capacity: int, stall_warning_s: float | None = None,
                 stall_abort_s: float | None = None, deadlock_s: float | None = None):
        self._subtree = Subtree(topology, cache_capacity)
        node = self._subtree.node
        self.rank, self.parent, self.children, self.neighbours = node.rank, node.parent, node.children, node.neighbours
        # The incomplete requests of the subtree that are too old.
        self.stalls = StallWatch(self._subtree, stall_warning_s, stall_abort_s, deadlock_s)
        self._unanswered = AnswerWatch(topology, stall_warning_s)
        self._root = Root(self._subtree, self.stalls) if self.rank == 0 else None

    def submit(self, request: Request, now: float) -> None:
        """Note that this rank is ready for `request`. No other request of this name may be in flight on the rank."""
        if request.kind is CollectiveType.JOIN:
            self._subtree.joined.note(self.rank, (self.rank,), now)
            return
        self._unanswered.begin(request.name, now)
        self._subtree.note(self.rank, request, None, now)

    def end(self, completed: int) -> None:
        """Note that this rank has called shutdown() after `completed` operations."""
        self._subtree.ended.note(((self.rank, completed),))

    def fail(self, text: str, is_stall: bool = False) -> None:
        """Note that an engine of the subtree failed: all engines end with error `text` (StallError if `is_stall`)."""
        ended = self._subtree.ended
        if ended.failure is None:  # Only the first failure is kept.
            ended.failure, ended.is_stall = text, is_stall

    def request_vote_end(self) -> None:
        """Ask rank 0 to end the open vote (see fast_path.py). Rank 0 does so by a decision, if need be an empty one."""
        self._subtree.must_end_vote = True

    def answer(self, text: str) -> None:
        """Answer rank 0's question where this rank is in its program (see Decision.asks)."""
        self._subtree.places[self.rank] = text

    def receive(self, source: int, data: bytes, now: float) -> bool:
        """Handle an announcement of the child `source`. Returns false if it has only answers to rank 0's questions.

        Raises MessageError: `data` is no valid announcement, or `source` is no child of this rank.
        """
        subtree = self._subtree
        if source not in self.children:
            raise MessageError(f"rank {source} sent an announcement to rank {self.rank}, which is not its parent.")
        message = Announcement.from_bytes(data, subtree.topology.job_ranks[source])
        for number in message.ids:
            subtree.note(source, subtree.request_of(number, source), None, now)
        for request, ranks in message.requests:
            subtree.note(source, request, None if ranks is None else set(ranks), now)
        if message.joined:
            subtree.joined.note(source, message.joined, now)
        subtree.ended.note(message.ended)
        if message.failure is not None:
            self.fail(message.failure, message.is_stalled)
        if message.ends_vote:
            self.request_vote_end()
        subtree.places.update(message.places)
        return any(message[:-1])

    def learn(self, decision: Decision) -> tuple[Request, ...]:
        """Handle a decision of rank 0. Returns the requests to execute, in order.

        Raises MessageError: The decision has a number that stands for no request.
        """
        subtree = self._subtree
        requests = []
        for item in decision.agreed:
            if isinstance(item, int):
                requests.append(subtree.request_of(item, 0))
            else:
                number, request = item
                if number is not None:
                    subtree.numbers.add(request, number)
                requests.append(request)
        subtree.ended.are_any = subtree.ended.are_any or decision.ended
        names = (*(request.name for request in requests), *(name for name, _ in decision.errors))
        self._unanswered.end(names)
        if subtree.joined.ranks:
            # Rank 0 completed these requests without the joined ranks. On this rank they are still incomplete.
            for name in names:
                subtree.pending.pop(name, None)
        if decision.last_joined:
            subtree.joined.clear()
        return tuple(requests)

    def advance(self, now: float, quiet_s: float = 0.0) -> tuple[Announcement | None, Decision | None]:
        """Return what to send now, if anything: (announcement to the parent, None), or on rank 0 (None, decision).

        `quiet_s`: The seconds for which nothing was submitted, received or executed on this rank.
        """
        return (self._announce(now), None) if self._root is None else (None, self._root.decide(now, quiet_s))

    def next_check_s(self) -> float:
        """Return the seconds after which `advance` must be called again even if nothing happens."""
        if not (self._subtree.pending or self._unanswered or self._subtree.joined.ranks):
            return LONGEST_CYCLE_S
        poll_s = self.stalls.poll_s()
        return LONGEST_CYCLE_S if poll_s is None else poll_s

    def check(self, now: float) -> None:
        """Raise StallError if rank 0 has not decided on this rank's requests in time. See AnswerWatch.check."""
        self._unanswered.check(now, self.stalls.abort_s)

    def _announce(self, now: float) -> Announcement | None:
        """Return the Announcement to send now, or None if there is nothing to announce."""
        subtree, ended, joined = self._subtree, self._subtree.ended, self._subtree.joined
        ids: list[int] = []
        requests: list[tuple[Request, tuple[int, ...] | None]] = []
        ready, subtree.ready = subtree.ready, []
        for pending in ready:
            request = pending.agreed()
            number = None if request is None else subtree.numbers.number_of(request)
            if number is not None:
                ids.append(number)
            else:
                requests += _by_ranks(pending) if request is None else [(request, None)]
        requests += self._incomplete_to_pass_on(now)
        failure, ended.failure = ended.failure, None
        new_ended, ended.news = tuple(ended.news), []
        new_joined, joined.news = tuple(joined.news), []
        ends_vote, subtree.must_end_vote = subtree.must_end_vote, False
        places, subtree.places = tuple(subtree.places.items()), {}
        if not (ids or requests or new_ended or failure or ends_vote or new_joined or places):
            return None
        return Announcement(tuple(ids), tuple(requests), new_ended, failure, ends_vote,
                            failure is not None and ended.is_stall, new_joined, places)

    def _incomplete_to_pass_on(self, now: float) -> list[tuple[Request, tuple[int, ...] | None]]:
        """Return the incomplete requests to announce now, each with the ranks that have submitted it.

        Rank 0 needs the old ones for its reports. Once a rank has ended or joined, rank 0 needs all of them.
        """
        is_urgent = self._subtree.ended.are_any or self._subtree.joined.ranks
        after_s = 0.0 if is_urgent else self.stalls.pass_on_s
        requests: list[tuple[Request, tuple[int, ...] | None]] = []
        for pending in self._subtree.pending.values():
            if now - pending.since >= after_s and (present := len(pending.present())) != pending.passed_on:
                pending.passed_on = present
                requests += _by_ranks(pending)
        return requests


def _by_ranks(pending: Pending) -> list[tuple[Request, tuple[int, ...] | None]]:
    """Return the different requests, each with the ranks that have submitted it, as in Announcement.requests."""
    return [(request, tuple(sorted(ranks))) for request, ranks in pending.by_request().items()]
