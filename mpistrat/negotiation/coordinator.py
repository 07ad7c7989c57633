"""Coordinator: decides which requests all ranks execute next, and in which order. Pure: time is an argument.

The ranks form a tree of fan-out 16 with rank 0 at the root. A rank sends an Announcement to its parent once its whole
subtree has submitted a request. Rank 0 sends Decisions down the tree (root.py), and every rank executes them in the
order in which they arrive. Requests match by name, so ranks may submit in any order.

A request seen before travels as one number, and an announcement for a whole subtree has no list of ranks. So the work
of a rank per step depends on its sixteen children, not on the number of ranks.

A rank sends a number only for exactly the request (name, dtypes, shapes, operation, scale, device) that it was given
for. Any other request of the same name travels in full, and rank 0 compares it.

Called by the controller, in the thread that drives.
"""

from ..core.errors import MessageError
from ..core.request import CollectiveType, Request
from ..core.topology import Topology
from ..core.tuning import LONGEST_CYCLE_S
from .messages import Announcement, Decision
from .pending import Pending
from .root import Root
from .stall_watch import AnswerWatch, StallWatch
from .subtree import Subtree


class Coordinator:
    """One rank's node of the tree.

    The caller passes what this rank does to `submit` and `end`, and what other ranks have sent to `receive`. Then it
    calls `advance`, and sends what `advance` returns.

    Args:
        cache_capacity: How many requests get a number.
        stall_warning_s: Age in seconds at which an incomplete request is reported; None: never.
        stall_abort_s: Age in seconds at which it ends the engines; None: never.
        deadlock_s: Seconds without news after which ranks that all wait end the engines; None: never.
    """

    def __init__(self, topology: Topology, cache_capacity: int, stall_warning_s: float | None = None,
                 stall_abort_s: float | None = None, deadlock_s: float | None = None):
        self._subtree = Subtree(topology, cache_capacity)
        node = self._subtree.node
        # rank, parent, children, neighbours: As in tree.Node.
        self.rank, self.parent, self.children, self.neighbours = node.rank, node.parent, node.children, node.neighbours
        # The incomplete requests of the subtree that are too old.
        self.stalls = StallWatch(self._subtree, stall_warning_s, stall_abort_s, deadlock_s)
        self._unanswered = AnswerWatch(topology, stall_warning_s)
        self._root = Root(self._subtree, self.stalls) if self.rank == 0 else None

    # -- what happens -------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """This rank is ready for `request`. No other request of its name may be in flight on this rank."""
        if request.kind is CollectiveType.JOIN:
            self._subtree.joined.note(self.rank, (self.rank,), now)
            return
        self._unanswered.begin(request.name, now)
        self._subtree.note(self.rank, request, None, now)

    def end(self, completed: int) -> None:
        """This rank has called shutdown() after `completed` operations."""
        self._subtree.ended.note(((self.rank, completed),))

    def fail(self, text: str, is_stall: bool = False) -> None:
        """This rank's engine has failed, because of a stall or of another error. All ranks are to end."""
        self._subtree.ended.fail(text, is_stall)

    def request_vote_end(self) -> None:
        """Ask rank 0 for a decision, which may be empty. A decision ends an open vote."""
        self._subtree.must_end_vote = True

    def answer(self, text: str) -> None:
        """Tell rank 0 where this rank is: the last decision has asked for it."""
        self._subtree.places[self.rank] = text

    def receive(self, source: int, data: bytes, now: float) -> bool:
        """Take the Announcement of a child. Returns whether it has more than answers.

        Raises MessageError: `data` is not an announcement, or is not for this rank.
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
        """Take a decision of rank 0. Returns the requests to execute, in order.

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
            # Rank 0 completed these without the ranks that have joined. Here they are still incomplete.
            for name in names:
                subtree.pending.pop(name, None)
        if decision.last_joined:
            subtree.joined.clear()
        return tuple(requests)

    def advance(self, now: float, quiet_s: float = 0.0) -> tuple[Announcement | None, Decision | None]:
        """The message to send now: an Announcement to the parent, or (on rank 0) a Decision for all ranks.

        `quiet_s` are the seconds for which nothing was submitted, received or executed on this rank.
        """
        return (self._announce(now), None) if self._root is None else (None, self._root.decide(now, quiet_s))

    # -- time ---------------------------------------------------------------------------------------------------------

    def next_check_s(self) -> float:
        """Seconds after which `advance` must be called again even if nothing happens."""
        if not (self._subtree.pending or self._unanswered or self._subtree.joined.ranks):
            return LONGEST_CYCLE_S
        poll_s = self.stalls.poll_s()
        return LONGEST_CYCLE_S if poll_s is None else poll_s

    def check(self, now: float) -> None:
        """Check that rank 0 answers: AnswerWatch.check, with the limit on stalls. To be called in every cycle.

        Raises StallError: Rank 0 does not answer.
        """
        if self.stalls.abort_s is not None:
            self._unanswered.check(now, self.stalls.abort_s)

    # -- announcements ------------------------------------------------------------------------------------------------

    def _announce(self, now: float) -> Announcement | None:
        """The announcement that is due now; None: there is nothing to announce."""
        subtree, ended = self._subtree, self._subtree.ended
        ids: list[int] = []
        requests: list[tuple[Request, tuple[int, ...] | None]] = []
        for pending in subtree.take_ready():
            request = pending.agreed()
            number = None if request is None else subtree.numbers.number_of(request)
            if number is not None:
                ids.append(number)
            else:
                requests += _by_ranks(pending) if request is None else [(request, None)]
        requests += self._incomplete_to_pass_on(now)
        failure, ended.failure = ended.failure, None
        new_ended, new_joined, ends_vote = ended.take_news(), subtree.joined.take_news(), subtree.take_vote_end()
        places, subtree.places = tuple(subtree.places.items()), {}
        if not (ids or requests or new_ended or failure or ends_vote or new_joined or places):
            return None
        return Announcement(tuple(ids), tuple(requests), new_ended, failure, ends_vote,
                            failure is not None and ended.is_stall, new_joined, places)

    def _incomplete_to_pass_on(self, now: float) -> list[tuple[Request, tuple[int, ...] | None]]:
        """The incomplete requests that rank 0 needs, each with the ranks that have submitted it.

        It needs them for a report, or because a rank has ended or joined.
        """
        after_s = self.stalls.pass_on_s
        if self._subtree.ended.are_any or self._subtree.joined.ranks:
            after_s = 0.0
        requests: list[tuple[Request, tuple[int, ...] | None]] = []
        for pending in self._subtree.pending.values():
            if now - pending.since >= after_s and (present := len(pending.present())) != pending.passed_on:
                pending.passed_on = present
                requests += _by_ranks(pending)
        return requests


def _by_ranks(pending: Pending) -> list[tuple[Request, tuple[int, ...] | None]]:
    """The different requests, each with the ranks that have submitted it, as an announcement has them."""
    return [(request, tuple(sorted(ranks))) for request, ranks in pending.by_request().items()]
