"""States of a training script that can be committed, restored and synchronised: Horovod's elastic API.

A script in Horovod's elastic form runs here with a fixed number of ranks. `sync` broadcasts the state of rank 0, and
`commit` keeps a copy in memory. Ranks do not come and go: when a rank is lost, the job ends. For users; `sync` is
collective, the rest is local.
"""

import copy
import functools
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from . import ops, runtime
from .elastic_sampler import ElasticSampler

logger = logging.getLogger(__name__)
R = TypeVar("R")


class ObjectState:
    """Python objects that are the state of a training script. Each is an attribute.

    An ElasticSampler among them keeps what it knows: `sync` exchanges the processed rows of all ranks.

    Args:
        bcast_object: Replaces broadcast_object, for compatibility with Horovod.
        get_rank: Accepted for compatibility with Horovod, ignored.
        kwargs: The names of the attributes and their first values, which can be copied and pickled.
    """

    def __init__(self, bcast_object: Callable[[Any], Any] | None = None, get_rank: Callable[[], int] | None = None,
                 **kwargs: Any):
        self._broadcast = bcast_object or functools.partial(ops.broadcast_object, name="elastic.state")
        self._names = list(kwargs)
        self._reset_callbacks: list[Callable[[], object]] = []
        self._saved: dict[str, Any] = {}
        self._saved_samplers: list[tuple[ElasticSampler, dict[str, Any]]] = []
        self._set(kwargs)
        self.save()

    if TYPE_CHECKING:
        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: object) -> None: ...

    def save(self) -> None:
        """Keep a copy of the state in memory. Local."""
        self._saved = copy.deepcopy(self._values_but_samplers())
        self._saved_samplers = [(sampler, sampler.state_dict()) for sampler in self._samplers()]

    def restore(self) -> None:
        """Return to the state of the last save or commit. Local."""
        self._set(copy.deepcopy(self._saved))
        for sampler, state in self._saved_samplers:
            sampler.load_state_dict(state)

    def commit(self) -> None:
        """Keep a copy of the state in memory, to which restore() returns. Local."""
        self.save()
        self.check_host_updates()

    def sync(self) -> None:
        """Make the state of all ranks that of rank 0, and save it. Collective."""
        for sampler in self._samplers():
            sampler.sync()
        own = self._values_but_samplers()
        values = self._broadcast(own)
        self._names = [*values, *(name for name in self._names if name not in own)]
        self._set(values)
        self.save()

    def check_host_updates(self) -> None:
        """Do nothing: the hosts of an MPI job do not change while it runs. Local."""

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Have these functions called by on_reset(). Local."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the functions that register_reset_callbacks() has got. Local. No reset happens by itself, see run."""
        for callback in self._reset_callbacks:
            callback()

    def _samplers(self) -> list[ElasticSampler]:
        values = [getattr(self, name) for name in self._names]
        return [value for value in values if isinstance(value, ElasticSampler)]

    def _values_but_samplers(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self._names}
        return {name: value for name, value in values.items() if not isinstance(value, ElasticSampler)}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorate a training function whose first argument is a state: synchronise the state, then call the function.

    When the function raises an exception, the state returns to its last commit, and the exception goes on, which ends
    the job. Horovod would go on with the remaining ranks; here a job does not survive the loss of a rank. Start it
    again from a checkpoint. The function that is returned is collective.
    """
    @functools.wraps(func)
    def synchronised(state: ObjectState, *args: Any, **kwargs: Any) -> R:
        state.sync()
        try:
            return func(state, *args, **kwargs)
        except Exception:
            state.restore()
            rank = runtime.current().topology.rank if runtime.is_initialized() else 0
            logger.warning("rank %d: the training function has raised an exception; its state is that of the last "
                           "commit", rank)
            raise

    return synchronised
