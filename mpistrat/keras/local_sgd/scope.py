"""The process set within which gradients are averaged in every step, while weights are averaged over all ranks."""

from typing import Literal

from ...api import runtime
from ...api.process_sets import ProcessSet, global_process_set
from ...core.errors import InvalidRequestError

Scope = ProcessSet | Literal["hosts"] | None


def process_set_of(scope: Scope) -> ProcessSet | None:
    """The set that this rank averages gradients in; None: each rank trains by itself. Collective for "hosts".

    The sets of hosts are registered the first time. With one host it is the set of all ranks.

    Raises:
        InvalidRequestError: `scope` is something else, or a set that is not registered or that this rank is not in.
    """
    if isinstance(scope, ProcessSet):
        scope.group("scope")
        return scope
    if scope is None:
        return None
    if scope != "hosts":
        raise InvalidRequestError('scope is None, "hosts" or a ProcessSet that this rank is in. Received: '
                                  f"{scope!r}")
    topology, registry = runtime.current().topology, runtime.current().registry
    if len(topology.hosts) == 1:
        return global_process_set
    known = set(registry.ranks_of.values())
    registry.add([ProcessSet(ranks) for host in topology.hosts if (ranks := topology.ranks_on(host)) not in known])
    return next(registry.find(number) for number, ranks in registry.ranks_of.items() if ranks == topology.local_ranks)
