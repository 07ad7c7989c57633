"""States of a training script that can be committed, restored and synchronised: Horovod's elastic API.

In a job of `mpistrat run --elastic` a commit outlives the processes: when ranks or hosts are lost, the surviving ranks,
or the ranks of the next generation, resume from the commit. In other jobs the number of ranks is fixed, `commit` keeps
a copy in memory, and the loss of a rank ends the job. For users; `sync` is collective, `commit` in elastic jobs only.
"""

import copy
import functools
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from ...core.errors import CollectiveError, ElasticError, RecoveryError
from ...elastic import membership
from ...elastic.commits import CommitId, DamagedCommitError
from .. import array_ops, runtime
from . import recovery
from .sampler import ElasticSampler

if TYPE_CHECKING:
    from ...elastic.member import Member

logger = logging.getLogger(__name__)
R = TypeVar("R")
Snapshot = dict[str, Any]


class HostsUpdatedInterrupt(Exception):  # noqa: N818 - Horovod's name
    """Raised by commit() on all ranks if the number of ranks changes. `run` starts the training with the new ranks."""


class ObjectState:
    """The state of a training script: Python objects, each an attribute of the state.

    If an attribute is an ElasticSampler, `sync` and `commit` exchange the processed rows of all ranks.

    Args:
        bcast_object: Called instead of broadcast_object, for compatibility with Horovod.
        get_rank: Accepted for compatibility with Horovod, ignored.
        kwargs: The names of the attributes, with their initial values. It must be possible to copy and pickle these.
    """

    def __init__(self, bcast_object: Callable[[Any], Any] | None = None, get_rank: Callable[[], int] | None = None,
                 **kwargs: Any):
        self._broadcast_object = bcast_object
        self._names = list(kwargs)
        self._reset_callbacks: list[Callable[[], object]] = []
        self._saved: Snapshot = {}
        self._number = 0  # The number of the last commit that all ranks have made in this process.
        self._set(kwargs)
        self.save()

    if TYPE_CHECKING:
        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: object) -> None: ...

    def save(self) -> None:
        """Keep a copy of the state in memory. Local."""
        self._saved = self._snapshot()

    def restore(self) -> None:
        """Restore the state of the last save or commit. Local."""
        self._take(self._saved)

    def commit(self) -> None:
        """Keep a copy of the state, which restore() restores.

        In an elastic job commit() is collective, and the agents of all hosts get the copy while the script goes on. In
        other jobs it is local.

        Raises:
            HostsUpdatedInterrupt: On all ranks of an elastic job, if hosts are added or removed. The commit is kept.
            RuntimeError: The commit before this one could not be kept.
            MismatchError: On all ranks of an elastic job, if the ranks' variables in the state differ.
        """
        own = membership.current()
        if own is None:
            self.save()
            self.check_host_updates()
            return
        before = self._saved
        self.save()
        try:
            # All ranks wait for their GPU before they agree, so the commit has the work of a rank that is lost later.
            runtime.current().await_gpu()
            said = array_ops.allgather_object((own.number, own.why_leave, self._saved["samplers"]),
                                              name="elastic.commit")
            number = max(number for number, _, _ in said) + 1
            if self._compare(number):
                self.save()
        except CollectiveError:
            self._saved = before  # Other ranks may not have this step.
            raise
        self._number = number
        self._take_processed([samplers for _, _, samplers in said])
        topology, why = runtime.current().topology, next((why for _, why, _ in said if why), "")
        own.commit(self._number, functools.partial(self._portable, self._saved), self._where(),
                   topology.local_rank == 0, topology.rank == 0 and own.is_saved(self._number, is_last=bool(why)))
        if why:
            own.finish()
            raise HostsUpdatedInterrupt(why)

    def sync(self) -> None:
        """Copy the state of one rank to all ranks, and save it. Collective.

        The copied state is that of rank 0, or in an elastic job that of the rank with the newest commit, if any.
        """
        own, held = membership.current(), None
        root: int | None = 0
        if own is not None:
            own.has_state = True
            root, held = self._restore_newest(own)
        for name in self._samplers():
            getattr(self, name).sync(root or 0)
        if root is not None:
            self._broadcast(root)
        self.save()
        if own is not None and held is not None:
            own.hold(held, functools.partial(self._portable, self._saved), self._where(),
                     runtime.current().topology.local_rank == 0)

    def check_host_updates(self) -> None:
        """Do nothing: commit() checks whether the hosts have changed. Local."""

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Register functions that on_reset() calls. Local."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the functions of register_reset_callbacks(). Local. `run` calls on_reset() after a loss of ranks."""
        for callback in self._reset_callbacks:
            callback()

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def _snapshot(self) -> Snapshot:
        """Return a copy of the state that later training does not change."""
        return {"values": copy.deepcopy(self._values_but_samplers()),
                "samplers": {name: getattr(self, name).state_dict() for name in self._samplers()}}

    def _take(self, snapshot: Snapshot) -> None:
        """Restore a snapshot, which another process may have made."""
        self._set(copy.deepcopy(snapshot["values"]))
        for name, state in snapshot["samplers"].items():
            getattr(self, name).load_state_dict(state)

    def _portable(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot in a form that can be pickled. Called in another thread."""
        return snapshot

    def _compare(self, number: int) -> bool:
        """Compare the ranks' states, or make them equal, before commit `number` is kept. Collective.

        Returns:
            Whether the state has changed on any rank.
        """
        return False

    def _broadcast(self, root: int) -> None:
        """Copy the objects of `root` to all ranks. Collective."""
        own = self._values_but_samplers()
        values = self._broadcast_object(own) if self._broadcast_object is not None else \
            array_ops.broadcast_object(own, root, name="elastic.state")
        self._names = [*values, *(name for name in self._names if name not in own)]
        self._set(values)

    def _needs_new_processes(self) -> str:
        """Return why the surviving processes cannot continue with this state after a loss, or "". Local."""
        return ""

    # -- elastic jobs --------------------------------------------------------------------------------------------------

    def _restore_newest(self, own: "Member") -> tuple[int | None, CommitId | None]:
        """Restore the newest commit on the first rank that has it, or on all ranks if all have it. Collective.

        Returns:
            The rank that has restored it; 0 if there is no commit; None if all ranks have restored it. And the commit,
            if it comes from the agents of this job.
        """
        rank = runtime.current().topology.rank
        found: CommitId | None = CommitId(own.job.generation, self._number)
        snapshot: Snapshot | None = None
        if not self._number:
            found, snapshot = self._kept(own)
        ids = array_ops.allgather_object(found, name="elastic.newest")
        is_kept = any(each is not None for each in ids)
        if not is_kept:
            found, snapshot = own.saved() or (None, None)
            ids = array_ops.allgather_object(found, name="elastic.saved")
        newest = max((each for each in ids if each is not None), default=None)
        known = own.newest_of_job
        if rank == 0 and known is not None and newest != known and (newest is None or not is_kept or newest < known):
            logger.warning("mpistrat: %s IS LOST; TRAINING BEGINS %s", str(known).upper(),
                           "ANEW" if newest is None else f"FROM {str(newest).upper()}")
        if newest is None:
            return 0, None
        root = ids.index(newest)
        is_everywhere = all(each == newest for each in ids)
        if is_everywhere or rank == root:
            if snapshot is not None:
                self._take(snapshot)
            else:
                self.restore()
        if rank == 0:
            logger.warning("mpistrat: training goes on from %s", newest)
        return None if is_everywhere else root, newest if is_kept else None

    def _kept(self, own: "Member") -> tuple[CommitId | None, Snapshot | None]:
        """Return the id and the state of the newest commit in this host's agent, or None for both."""
        if own.newest is None:
            return None, None
        try:
            found, snapshot = own.read()
        except DamagedCommitError as error:
            logger.warning("%s on this host is damaged: %s", own.newest, error)
            return None, None
        return found, snapshot

    def _take_processed(self, by_rank: list[dict[str, dict[str, Any]]]) -> None:
        """Add the rows that all ranks have processed to the samplers, and to their saved states."""
        for name in self._samplers():
            state = ElasticSampler.together([samplers[name] for samplers in by_rank])
            getattr(self, name).processed_indices |= state["processed_indices"]
            self._saved["samplers"][name] = state

    def _where(self) -> str:
        """Return the progress of the training, for people: up to three integers of the state."""
        numbers = [f"{name} {value}" for name, value in self._values_but_samplers().items() if type(value) is int]
        return ", ".join(numbers[:3])

    def _samplers(self) -> list[str]:
        return [name for name in self._names if isinstance(getattr(self, name), ElasticSampler)]

    def _values_but_samplers(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self._names}
        return {name: value for name, value in values.items() if not isinstance(value, ElasticSampler)}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def keep_going(state: ObjectState, train: Callable[[], R], when_it_fails: Callable[[], object] = lambda: None) -> R:
    """Synchronise a state and train. In an elastic job, repeat this after each loss, from the last commit. Collective.

    Args:
        train: Trains from the current state to the end, and returns the result.
        when_it_fails: Called while an exception of `train` is handled, except if the surviving ranks of a loss go on.
    """
    while True:
        state.sync()
        try:
            return train()
        except HostsUpdatedInterrupt as interrupt:
            own = membership.current()
            if own is None:
                raise ElasticError("only jobs of `mpistrat run --elastic` can handle HostsUpdatedInterrupt") from None
            own.leave(str(interrupt))
        except Exception:
            if not _go_on_after_loss(state._needs_new_processes()):
                when_it_fails()
                raise
        state.restore()
        state.on_reset()


def _go_on_after_loss(why_not: str) -> bool:
    """Reconnect the surviving ranks of an elastic job, if a loss of ranks has caused the exception. Collective.

    This process ends, and the next generation of processes continues, if the ranks cannot reconnect, or if `why_not`
    gives a reason.

    Returns:
        True if the ranks are connected. False if the exception has another cause, or the job cannot survive a loss.
    """
    own = membership.current()
    if own is None or not runtime.is_initialized():
        return False
    losses = runtime.current().losses
    if not losses.is_tolerant or losses.interruption.error is None:
        return False
    logger.warning("mpistrat: %s", losses.interruption.error)
    if why_not:
        own.leave_now(why_not)
    try:
        recovery.recover()
    except RecoveryError as error:
        own.leave_now(str(error))
    topology = runtime.current().topology
    own.rename(topology.rank, topology.size)
    return True


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorate a training function whose first argument is a state: synchronise the state, then call the function.

    In an elastic job, after a loss of ranks, the surviving ranks or the next generation of processes call the function
    again with the state of the last commit. In other jobs, if the function raises an exception, the state is restored
    to the last commit, and the exception is raised. The decorated function is collective.
    """
    @functools.wraps(func)
    def synchronised(state: ObjectState, *args: Any, **kwargs: Any) -> R:
        def return_to_commit() -> None:
            state.restore()
            rank = runtime.current().topology.rank if runtime.is_initialized() else 0
            logger.warning("rank %d: the training function has raised an exception; the state was restored to the "
                           "last commit", rank)

        return keep_going(state, lambda: func(state, *args, **kwargs), return_to_commit)

    return synchronised
