"""Texts for users: what the ranks disagree about in a request, and which requests are incomplete for too long.

The texts give ranks by their numbers in the job. Pure: time is an argument. For the coordinator and the controller.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from ..core import tuning
from ..core.errors import StallError
from ..core.request import Request, TensorSpec
from ..core.topology import MOST_LISTED, Topology, describe_ranks, describe_wait, network_cause, rank_list
from .subtree import Pending, Subtree, depth_of

# What to write in a script whose ranks run different numbers of steps.
_EQUAL_STEPS = "hvd.shard(x, y) gives every rank equally many rows, or call hvd.join() after the last step"
_CAUSES = ("Every rank must call the same collectives with the same names: look for one under `if rank == 0` or in a "
           "callback of some ranks (a save, a validation, metrics and a variable made in strategy.scope() may contain "
           f"one), and for loops of different length ({_EQUAL_STEPS}).")
_FAILURES = "how many executions of the tf.function have ended in an error"

# -- ranks that disagree -----------------------------------------------------------------------------------------------


def describe_mismatch(by_request: dict[Request, set[int]], topology: Topology) -> str:
    """Return a sentence on the first field on which the ranks disagree, in the order of Horovod's checks.

    `by_request` has at least two different requests of one name, each with the ranks that submitted it.
    """
    first = next(iter(by_request))
    labels = dict(zip(_indices(first), first.labels, strict=False))

    def of_tensor(i: int) -> str:
        label = f" ({labels[i]})" if i in labels else ""
        return f" of tensor {i}{label}" if len(first.tensors) > 1 else label

    common = sorted(set.intersection(*(set(_indices(r)) for r in by_request)))
    aspects: list[tuple[str, Callable[[Request], Any]]] = [
        (_FAILURES, lambda r: r.failures),
        *((f"dtype{of_tensor(i)}", lambda r, i=i: _tensor(i, r).dtype) for i in common),
        ("kind of collective", lambda r: r.kind.value),
        ("number of tensors", lambda r: len(r.tensors)),
        *((f"shape{of_tensor(i)}", partial(_shape, i)) for i in common),
        ("prescale and postscale factors", lambda r: r.scaled[1:]),
        ("reduce operation", lambda r: r.scaled.op.name.capitalize()),
        ("root rank", lambda r: topology.job_ranks[r.root_rank]),
        ("device", lambda r: r.device),
        ("compression", lambda r: r.wire_dtype or "none"),
        ("which tensors of the list they submit", lambda r: rank_list(_members(r))),
        ("how the list is packed (the packing depends on whether the call is eager or in a tf.function, on shapes that "
         "are known or unknown when the tf.function is traced, and on whether the tensors are on a GPU or on the CPU)",
         lambda r: r.layout or "one by one")]
    for what, get in aspects:
        values: dict[Any, set[int]] = {}
        for request, ranks in by_request.items():
            values.setdefault(get(request), set()).update(ranks)
        if len(values) > 1:
            said = "; ".join(f"{value} on ranks {topology.listed(sorted(ranks))}" for value, ranks in
                             sorted(values.items(), key=lambda item: min(item[1])))
            more = (" A script may catch an error only if all ranks have the error in the same execution."
                    if what == _FAILURES else _only_on_some(by_request, topology))
            return f"{first.name}: the ranks disagree on {what}: {said}.{more}"
    raise AssertionError("the requests are equal")


def _only_on_some(by_request: dict[Request, set[int]], topology: Topology) -> str:
    """Return a sentence with the labels of the tensors that only some ranks submit; "" if there are none."""
    ranks_with: dict[str, set[int]] = {}
    for request, ranks in by_request.items():
        for label in request.labels:
            ranks_with.setdefault(label, set()).update(ranks)
    everybody = set().union(*by_request.values())
    partly = [label for label, ranks in ranks_with.items() if ranks != everybody]
    is_shorter = len({len(r.tensors) for r in by_request}) > 1
    # If all labels differ, the ranks only call the variables something else.
    if not partly or (len(partly) == len(ranks_with) if is_shorter else len({*map(_members, by_request)}) == 1):
        return ""
    listed = ", ".join(f"{label} (ranks {topology.listed(sorted(ranks_with[label]))})"
                       for label in partly[:MOST_LISTED])
    more = f" and {len(partly) - MOST_LISTED} more" if len(partly) > MOST_LISTED else ""
    return f" Only some ranks have a gradient for {listed}{more}: a gradient that is None is left out."


def _members(request: Request) -> tuple[int, ...]:
    """Return, in ascending order, the indices of the tensors of `request` in the list that the caller submitted."""
    return tuple(sorted(chain.from_iterable(request.layout))) or tuple(range(len(request.tensors)))


def _indices(request: Request) -> Sequence[int]:
    """Return, for each of `request.tensors`, its index in the list of tensors that the caller submitted."""
    return tuple(chain.from_iterable(request.layout))[:len(request.tensors)] or range(len(request.tensors))


def _tensor(index: int, request: Request) -> TensorSpec:
    return request.tensors[_indices(request).index(index)]


def _shape(index: int, request: Request) -> str:
    shape = _tensor(index, request).shape
    return f"({', '.join(['any', *map(str, shape[1:])])})" if shape[:1] == (-1,) else str(shape)


def describe_mismatch_in_graph(mismatch: str) -> str:
    """Return the error text with which a mismatch in a graph ends the engines.

    The engines must end, because TensorFlow aborts the rest of the graph, on each rank at a different point. Requests
    submitted until then cannot be withdrawn, and would be reduced with other ranks' requests of the next step.
    """
    return (f"{mismatch} That was inside a tf.function, where the other collectives of the step cannot be taken back, "
            "so the engine has ended. To go on in the same process, call shutdown() and init() on every rank.")


def describe_ended(topology: Topology, name: str, pending: Pending, lost: Sequence[int],
                   completed: Mapping[int, int]) -> str:
    """Return the error text for ranks that wait for `lost` ones: rank r shut down after `completed[r]` operations."""
    after = ", ".join(map(str, sorted({completed[rank] for rank in lost})))
    return (f"{name}: ranks {topology.listed(pending.present())} wait for ranks {topology.listed(lost)}, which have "
            f"already shut down (after {after} operations). They ended early (sys.exit?), or a collective is under "
            "`if rank() == 0` (a save, a validation and a variable made in strategy.scope() may contain one), or the "
            f"ranks ran different numbers of steps: give every rank the same number ({_EQUAL_STEPS}).")


# -- ranks that wait for others ----------------------------------------------------------------------------------------
# Rank 0 reports requests that are incomplete for too long, and ends the engines at the limit. Shortly before the limit,
# rank 0 asks the missing ranks where they are. A rank without any answer of rank 0 ends its own engine: rank 0 is
# stopped, or cannot be reached.

_MOST_ASKED = 4  # The number of ranks that are asked. A report on more ranks would be too long to read.
# Seconds after the limit on stalls within which rank 0's decision must arrive: rank 0 checks for stalls only now and
# then, and the decision passes through the tree.
_ANSWER_S = 4.0


class StallWatch:
    """The ages of the incomplete requests of a subtree, and their limits in seconds.

    Args:
        warning_s: Age at which an incomplete request is reported; None: never.
        abort_s: Age at which an incomplete request ends the engines; None: never.
        deadlock_s: Seconds without news after which the engines end if all ranks wait; None: never.
    """

    def __init__(self, subtree: Subtree, warning_s: float | None, abort_s: float | None, deadlock_s: float | None):
        self._subtree, self._topology = subtree, subtree.topology
        self.warning_s, self.abort_s, self.deadlock_s = warning_s, abort_s, deadlock_s
        self.abort_setting = "MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS"  # The name of the setting for `abort_s`.
        # Returns where a given rank of the job is, which has not answered, as text that begins a new line.
        self.look: Callable[[int], str] = lambda _: ""
        self._last_report = 0.0
        self._next_look = 0.0  # When to look next whether `abort_s` has passed.
        self._next_ask = 0.0
        self._asked: tuple[int, ...] = ()

    def poll_s(self) -> float | None:
        """Return the seconds between two checks while a request is incomplete. None: no check, as warnings are off."""
        if self.warning_s is None:
            return None
        due_s = self.warning_s if self.deadlock_s is None else min(self.warning_s, self.deadlock_s)
        poll_s = min(due_s / tuning.STALL_WARNING_LOOKS, tuning.STALL_LONGEST_POLL_S)
        return max(tuning.STALL_SHORTEST_POLL_S, poll_s)

    @property
    def pass_on_s(self) -> float:
        """Age in seconds at which a rank announces an incomplete request to its parent, for the reports of rank 0."""
        return min(math.inf if self.warning_s is None else self.warning_s / 2,
                   math.inf if self.deadlock_s is None else self.deadlock_s / 4)

    def stalled(self, now: float, limit_s: float) -> dict[str, list[int]]:
        """Return the names of requests that are incomplete for more than `limit_s`, each with the missing ranks."""
        return {name: pending.missing() for name, pending in self._subtree.incomplete().items()
                if now - pending.since > limit_s}

    def asks(self, now: float, quiet_s: float) -> tuple[int, ...]:
        """Return the ranks that rank 0 should ask now where they are in their programs, because a report is due soon.

        `quiet_s`: See `deadlock`.
        """
        poll_s = self.poll_s()
        if poll_s is None or now < self._next_ask:
            return ()
        self._next_ask = now + poll_s / 2
        ahead_s = 2 * poll_s  # Looks are `poll_s` apart at most, so the ranks have as long to answer.
        limits = [] if self.abort_s is None else [self.abort_s]
        if self.warning_s is not None and now - self._last_report > self.warning_s - ahead_s:
            limits.append(self.warning_s)
        missing: set[int] = set().union(*self.stalled(now, min(limits, default=math.inf) - ahead_s).values())
        if not missing and self.deadlock_s is not None and quiet_s > self.deadlock_s / 2 and self._do_all_wait():
            missing.update(range(self._topology.size))
        if missing:
            self._next_ask = now + 2 * ahead_s  # The report comes before that, up to `poll_s` late.
            self._asked = tuple(sorted(missing)[:_MOST_ASKED])
            self._subtree.places.clear()
        return self._asked if missing else ()

    def report(self, now: float) -> str | None:
        """Return the warning to log now, or None. Only rank 0 has one, every `warning_s` while requests are stalled."""
        if self._topology.rank != 0 or self.warning_s is None or now - self._last_report < self.warning_s:
            return None
        stalled = self.stalled(now, self.warning_s)
        if not stalled:
            return None
        self._last_report = now
        return self._describe(stalled, now)

    def reason_to_end(self, now: float) -> str | None:
        """Return the error text if a request is incomplete for longer than `abort_s`, else None. Only for rank 0."""
        if self.abort_s is None or now < self._next_look:
            return None
        # Not in every cycle: checking all pending names takes long, and the end may be this late.
        self._next_look = now + min(self.abort_s / tuning.STALL_ABORT_LOOKS, tuning.STALL_ABORT_LONGEST_POLL_S)
        if not self.stalled(now, self.abort_s):
            return None
        # Includes requests that began later: the ranks missing from the first one often wait for a later one.
        stalled = self.stalled(now, min(self.abort_s, math.inf if self.warning_s is None else self.warning_s))
        return f"{self._describe(stalled, now)} The engines have ended after {self.abort_s:g} s ({self.abort_setting})."

    def deadlock(self, quiet_s: float) -> str | None:
        """Return the error text if all ranks have been in a deadlock for `deadlock_s`, else None. Only for rank 0.

        In a deadlock, each rank has submitted a request, no request is complete, and rank 0 has received nothing new.
        Rank 0 may be wrong, because a rank may call the missing collective later: in a different thread, after long
        work, or in a graph. Therefore the text names the setting of the limit.

        Ranks that submit in the same order never deadlock, because all requests of the slowest rank are complete.

        `quiet_s`: Seconds for which nothing was submitted, received or executed on rank 0.
        """
        if self.deadlock_s is None or quiet_s < self.deadlock_s:
            return None
        # A rank between another one and rank 0 keeps an incomplete request for `pass_on_s`, until it looks.
        late_s = (self.pass_on_s + (self.poll_s() or 0.0)) * max(depth_of(self._topology.size - 1) - 1, 0)
        if quiet_s < self.deadlock_s + late_s or not self._do_all_wait():
            return None
        missing = {name: pending.missing() for name, pending in self._subtree.incomplete().items()}
        return ("This is a deadlock: every rank waits for a collective that another rank has not called, and none has "
                f"called another one for {self.deadlock_s:g} s. {self._describe_waits(missing)} {_CAUSES} If a rank "
                "would have called its next collective later (in another thread, or after long work), raise "
                f"MPISTRAT_DEADLOCK_S (0: never).{self._describe_places()}")

    def _do_all_wait(self) -> bool:
        incomplete = self._subtree.incomplete().values()
        return len(set().union(*(pending.present() for pending in incomplete))) == self._topology.size

    def _describe(self, stalled: dict[str, list[int]], now: float) -> str:
        return ("Some ranks wait for a collective that other ranks have not called. "
                f"{self._describe_waits(stalled, now)} {_CAUSES} Or ranks are merely slow."
                f"{self._network_hint(stalled)}{self._describe_places()}")

    def _describe_waits(self, stalled: Mapping[str, Sequence[int]], now: float | None = None) -> str:
        """Return a sentence for each of `stalled`: the ranks that wait, the missing ranks, and what these wait for.

        `stalled`: The missing ranks of each request. If `now` is given, the text says how long the others have waited.
        """
        topology, all_pending = self._topology, self._subtree.incomplete()
        parts = []
        for name, missing in list(stalled.items())[:MOST_LISTED]:
            pending = all_pending[name]
            instead = sorted(other for other, its in all_pending.items()
                             if other != name and set(missing) - set(its.missing()))[:MOST_LISTED]
            meanwhile = f"wait for {', '.join(instead)} instead" if instead else "wait for no collective"
            wait = "wait" if now is None else f"have waited {now - pending.since:.0f} s"
            parts.append(f"{name}: ranks {topology.listed(pending.present())} {wait} for "
                         f"{describe_ranks(topology, missing)}, which {meanwhile}.")
        more = f" And {len(stalled) - MOST_LISTED} more tensors are incomplete." if len(stalled) > MOST_LISTED else ""
        return " ".join(parts) + more

    def _network_hint(self, stalled: Mapping[str, Sequence[int]]) -> str:
        """Return a sentence on the network if a whole host has not called a collective, or does not answer; else ""."""
        topology = self._topology
        for name in stalled:
            silent = topology.hosts_without([topology.rank, *self._subtree.incomplete()[name].present()])
            if silent:
                return f" Or {network_cause(topology, silent)}: no rank on the other side has called {name}."
        # A link may be cut when some ranks of a host have called the collective, and others have not.
        silent = topology.hosts_without([topology.rank, *self._subtree.places])
        silent = [host for host in topology.hosts_of(self._asked) if host in silent]
        return f" Or {network_cause(topology, silent)}: no rank on the other side answers." if silent else ""

    def _describe_places(self) -> str:
        """Return a paragraph for each rank that was asked where it is. Each paragraph begins on a new line."""
        lines = []
        for rank in self._asked:
            job_rank = self._topology.job_ranks[rank]
            who = f"Rank {job_rank} on {self._topology.host_of[rank]}"
            if rank in self._subtree.places:
                lines.append(f"\n{who} is here, {self._subtree.places[rank]}")
            else:
                lines.append(f"\n{who} has not answered where it is: its engine waits in a collective, or the process "
                             "is stopped or very busy, or one of its threads keeps Python's interpreter lock."
                             f"{self.look(job_rank)}")
        return "".join(lines)


class AnswerWatch:
    """The requests of one rank that wait for a decision of rank 0. On rank 0 itself nothing is watched.

    `warning_s`: See StallWatch.
    """

    def __init__(self, topology: Topology, warning_s: float | None):
        self._topology = topology
        self._since: dict[str, float] = {}  # the oldest first
        self._checked_at = self._resumed_at = float("-inf")
        # Each rank between this one and rank 0 passes on an incomplete request only after half of `warning_s`.
        self._answer_s = _ANSWER_S + max(depth_of(topology.rank) - 1, 0) * (warning_s or 0.0) / 2

    def __bool__(self) -> bool:
        return bool(self._since)

    def begin(self, name: str, now: float) -> None:
        """Note that this rank has submitted the request `name`."""
        if self._topology.rank:
            self._since[name] = now

    def end(self, names: Iterable[str]) -> None:
        """Note that rank 0 has decided on the requests `names`."""
        if self._since:
            for name in names:
                self._since.pop(name, None)

    def check(self, now: float, limit_s: float | None) -> None:
        """Check that rank 0 answers in time. To be called in every cycle of the engine, after it has read the messages.

        Raises StallError: Rank 0 has not decided for `limit_s` (None: no limit) plus the time that an answer may take.
        """
        if not self._since or limit_s is None:
            return
        if now - self._checked_at > _ANSWER_S:
            self._resumed_at = now  # This rank was in a collective, or was stopped. An answer may be there, unread.
        self._checked_at = now
        name, since = next(iter(self._since.items()))
        if now >= max(since + limit_s, self._resumed_at) + self._answer_s:
            raise StallError(f"{name}: {describe_wait(self._topology, [0], now - since)}")
