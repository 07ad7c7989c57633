"""Sentences on what ranks disagree about, and on ranks that others wait for. Pure.

The coordinator of rank 0 calls these functions, for its errors and warnings; the sentences name ranks of the job.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from ..core.request import Request, TensorSpec
from ..core.stalls import MOST_LISTED, describe_ranks, hosts_of, hosts_without, network_cause
from ..core.topology import Topology, rank_list
from .pending import Pending

# What to write in a script whose ranks run different numbers of steps.
_EQUAL_STEPS = "hvd.shard(x, y) gives every rank equally many rows, or call hvd.join() after the last step"
_CAUSES = ("Every rank must call the same collectives with the same names: look for one under `if rank == 0` or in a "
           "callback of some ranks (a save, a validation and metrics may contain one), and for loops of different "
           f"length ({_EQUAL_STEPS}).")
_FAILURES = "how many executions of the tf.function have ended in an error"


def describe_mismatch(by_request: dict[Request, set[int]], topology: Topology) -> str:
    """The sentence on what the ranks disagree about; checked in Horovod's order.

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
        ("which tensors of the list there are", lambda r: rank_list(_members(r))),
        ("how the list is packed (an eager call and a tf.function differ in that, and so do shapes that are known and "
         "unknown when a tf.function is traced, and tensors on a GPU and on the CPU)",
         lambda r: r.layout or "one by one")]
    for what, get in aspects:
        values: dict[Any, set[int]] = {}
        for request, ranks in by_request.items():
            values.setdefault(get(request), set()).update(ranks)
        if len(values) > 1:
            said = "; ".join(f"{value} on ranks {topology.listed(sorted(ranks))}" for value, ranks in
                             sorted(values.items(), key=lambda item: min(item[1])))
            more = (" A script may catch an error that all ranks have in the same execution." if what == _FAILURES
                    else _only_on_some(by_request, topology))
            return f"{first.name}: the ranks disagree on {what}: {said}.{more}"
    raise AssertionError("the requests are equal")


def _only_on_some(by_request: dict[Request, set[int]], topology: Topology) -> str:
    """Return a sentence on tensors that only some ranks submit; "" if there are none, or if they have no labels."""
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
    return f" Only some ranks have {listed}{more}: a gradient that is None is left out."


def _members(request: Request) -> tuple[int, ...]:
    """The indices of the tensors in the caller's list."""
    return tuple(sorted(place for places in request.layout for place in places)) or tuple(range(len(request.tensors)))


def describe_mismatch_in_graph(mismatch: str) -> str:
    """The text on why a mismatch in a graph ends the engines.

    TensorFlow aborts the rest of the graph, on each rank at a different point. Requests that some ranks have submitted
    by then cannot be withdrawn. They would be reduced together with the requests of the other ranks in the next step.
    """
    return (f"{mismatch} That was inside a tf.function, where the other collectives of the step cannot be taken back, "
            "so the engine has ended. To go on in the same process, call shutdown() and init() on every rank.")


def _indices(request: Request) -> Sequence[int]:
    """The index in the caller's list of each of `request.tensors`."""
    return tuple(chain.from_iterable(request.layout))[:len(request.tensors)] or range(len(request.tensors))


def _tensor(index: int, request: Request) -> TensorSpec:
    return request.tensors[_indices(request).index(index)]


def _shape(index: int, request: Request) -> str:
    shape = _tensor(index, request).shape
    if shape[:1] == (-1,):
        return "(" + ", ".join(["any", *map(str, shape[1:])]) + ")"
    return str(shape)


def describe_stall(topology: Topology, all_pending: Mapping[str, Pending], stalled: Mapping[str, Sequence[int]],
                   now: float, unanswered: Sequence[int]) -> str:
    """The sentences that name the tensors, the waiting ranks, the missing ranks and what the missing ranks wait for.

    `stalled` has some names of incomplete requests, each with the ranks that miss. `unanswered` has the ranks that were
    asked where they are, and are on hosts from which no rank has answered.
    """
    return ("Some ranks wait for a collective that other ranks have not called. "
            + _describe_waits(topology, all_pending, stalled, now)
            + f" {_CAUSES} Or ranks are merely slow."
            + _network_hint(topology, all_pending, stalled, unanswered))


def describe_deadlock(topology: Topology, all_pending: Mapping[str, Pending], after_s: float) -> str:
    """The sentences that name the tensors, the waiting ranks, the missing ranks and what the missing ranks wait for.

    No rank has called a collective for `after_s` seconds (MPISTRAT_DEADLOCK_S).
    """
    missing = {name: pending.missing() for name, pending in all_pending.items()}
    return (f"This is a deadlock: every rank waits for a collective that another rank has not called, and none has "
            f"called another one for {after_s:g} s. {_describe_waits(topology, all_pending, missing)} {_CAUSES} If a "
            "rank would have called its next collective later (in another thread, or after long work), raise "
            "MPISTRAT_DEADLOCK_S (0: never).")


def describe_places(topology: Topology, asked: Sequence[int], places: Mapping[int, str],
                    look: Callable[[int], str]) -> str:
    """Paragraphs on where in the program the `asked` ranks are. Each paragraph begins on a new line.

    `places` has the answers of these ranks. For `look` see StallWatch.
    """
    lines = []
    for rank in asked:
        job_rank = topology.job_ranks[rank]
        who = f"Rank {job_rank} on {topology.host_of[rank]}"
        if rank in places:
            lines.append(f"\n{who} is here, {places[rank]}")
        else:
            lines.append(f"\n{who} has not answered where it is: its engine waits in a collective, or the process is "
                         f"stopped or very busy, or a thread of it keeps Python's interpreter lock.{look(job_rank)}")
    return "".join(lines)


def _describe_waits(topology: Topology, all_pending: Mapping[str, Pending], stalled: Mapping[str, Sequence[int]],
                    now: float | None = None) -> str:
    parts = []
    for name, missing in list(stalled.items())[:MOST_LISTED]:
        pending = all_pending[name]
        instead = sorted(other for other, its in all_pending.items()
                         if other != name and set(missing) - set(its.missing()))[:MOST_LISTED]
        meanwhile = f"wait for {', '.join(instead)} instead" if instead else "wait for no collective"
        wait = "wait" if now is None else f"have waited {now - pending.since:.0f} s"
        parts.append(f"{name}: ranks {topology.listed(pending.present())} {wait} for "
                     f"{describe_ranks(topology, missing)}, which {meanwhile}.")
    more = f" And {len(stalled) - MOST_LISTED} more tensors." if len(stalled) > MOST_LISTED else ""
    return " ".join(parts) + more


def _network_hint(topology: Topology, all_pending: Mapping[str, Pending], stalled: Mapping[str, Sequence[int]],
                  unanswered: Sequence[int]) -> str:
    """A sentence on the network, if the network may be why a host is silent; else "". See `describe_stall`."""
    for name in stalled:
        silent = hosts_without(topology, [topology.rank, *all_pending[name].present()])
        if silent:
            return f" Or {network_cause(topology, silent)}: no rank there has called {name}."
    # A link may be cut when some ranks of a host have called the collective, and others have not.
    silent = [host for host in hosts_of(topology, unanswered) if host != topology.host]
    return f" Or {network_cause(topology, silent)}: no rank there answers." if silent else ""


def describe_ended(topology: Topology, name: str, pending: Pending, lost: Sequence[int],
                   completed: Mapping[int, int]) -> str:
    """The sentence on ranks that wait for the `lost` ranks. `completed`: The operations that each one executed."""
    counts = Counter(completed[rank] for rank in lost)
    after = ", ".join(str(count) for count in sorted(counts))
    return (f"{name}: ranks {topology.listed(pending.present())} wait for ranks {topology.listed(lost)}, which have "
            f"already shut down (after {after} operations). They ended early (sys.exit?), or a collective is under "
            "`if rank() == 0` (a save and a validation may contain one), or the ranks ran different numbers of steps: "
            f"give every rank the same number ({_EQUAL_STEPS}).")
