"""States of a training script that can be committed, restored and synchronised: Horovod's elastic API.

In a job of `mpistrat run --elastic` a commit outlives the processes: when ranks or hosts are lost, the surviving ranks,
or newly started ranks (the next generation), resume from the commit. In other jobs a commit is only a copy in memory,
and the loss of a rank ends the job. `sync` is collective. `commit` is collective in jobs of `mpistrat run --elastic`.
"""

import copy
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..core import forked
from ..core.errors import CollectiveError, ElasticError, RecoveryError
from ..core.handle import require_no_driver
from ..elastic import membership
from ..elastic.commits import CommitId, DamagedCommitError
from ..transport.mpi import mpi_library
from . import array_ops, runtime
from .job import Job

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..elastic.member import Member

logger = logging.getLogger(__name__)
R = TypeVar("R")
Snapshot = dict[str, Any]


class HostsUpdatedInterrupt(Exception):  # noqa: N818 - Horovod's name
    """Raised by commit() on all ranks when hosts change. elastic.run then ends the process; new processes continue."""


class ElasticSampler:
    """Distributes the rows that are not processed yet in this epoch. Each rank gets the same number of row indices.

        sampler = hvd.elastic.ElasticSampler(x)
        state = hvd.elastic.TensorFlowKerasState(model, sampler=sampler)
        for number, rows in enumerate(batched(sampler, 32)):
            train_step(x[rows], y[rows])
            sampler.record_batch(number, 32)
            state.commit()

    A sampler that is an attribute of a state is saved, restored and synchronised with the state. `sync` exchanges the
    indices of processed rows, and distributes the rest. A restart repeats no row processed before the last commit.

    Args:
        dataset: Any object with a length.
        shuffle: Whether the order of the rows is random. Each epoch has a different order.
        seed: The seed of the random order, the same on all ranks.

    Attributes:
        epoch: The number of the epoch.
        processed_indices: The indices of the rows that this rank knows to be processed.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0):
        self._count, self._shuffle, self._seed = len(dataset), shuffle, seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, in which no row is processed yet. Local; all ranks must pass the same epoch."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that this rank has processed its batch `batch_idx`. All batches have `batch_size` rows. Local."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that the rows with these indices are processed. Local."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the indices of the rows in batch `batch_idx` of this rank. Local."""
        return self._indices[batch_idx * batch_size:(batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the indices of the processed rows. Local."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the epoch and processed rows from a result of state_dict(). Distribute the remaining rows. Local."""
        self.epoch, self.processed_indices = state_dict["epoch"], set(state_dict["processed_indices"])
        self.reset()

    def sync(self, root_rank: int = 0) -> None:
        """Adopt the epoch of root_rank, and merge the rows that the ranks have processed in that epoch. Collective."""
        states = array_ops.allgather_object(self.state_dict(), name="elastic.sampler")
        self.load_state_dict(self.together([states[root_rank], *states]))

    @staticmethod
    def together(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return a state_dict() with the epoch of `states[0]`, and the processed rows of all states of that epoch."""
        epoch = states[0]["epoch"]
        done = [state["processed_indices"] for state in states if state["epoch"] == epoch]
        return {"epoch": epoch, "processed_indices": set().union(*done)}

    def reset(self) -> None:
        """Distribute the remaining rows, which are not processed yet, to the current ranks. Local.

        All ranks get the same number of rows. If the rows do not divide evenly, some of the first rows are used twice.
        """
        rank, size = (runtime.current().topology.rank, runtime.current().topology.size) \
            if runtime.is_initialized() else (0, 1)
        order = np.random.default_rng([self._seed, self.epoch]).permutation(self._count) if self._shuffle \
            else np.arange(self._count)
        remaining = [index for index in order.tolist() if index not in self.processed_indices]
        each = math.ceil(len(remaining) / size)
        self._indices = [remaining[i % len(remaining)] for i in range(rank, each * size, size)]

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        """The number of rows of this rank."""
        return len(self._indices)


class ObjectState:
    """The state of a training script: Python objects, which are attributes of the ObjectState.

    If an attribute is an ElasticSampler, `sync` and `commit` exchange the processed rows of all ranks.

    Args:
        bcast_object: Called instead of broadcast_object, for compatibility with Horovod.
        get_rank: Accepted for compatibility with Horovod, ignored.
        kwargs: The names and the initial values of the attributes. copy.deepcopy and pickle must support the values.
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
        """Copy the state, for a later restore(). Local, except in an elastic job.

        In an elastic job commit() is collective. The first rank of each host then hands the copy, in a background
        thread, to the agent of the host, a process that outlives the ranks.

        Raises:
            HostsUpdatedInterrupt: On all ranks of an elastic job, if hosts were added or removed. The copy is kept.
            ElasticError: The background thread could not write the previous commit.
            MismatchError: On all ranks of an elastic job, if variables of the state differ among the ranks.
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
        """Give all ranks the same state, and save that state on each rank. Collective.

        In an elastic job with a commit, all ranks get the newest commit. Otherwise all ranks get the state of rank 0.
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
        """Do nothing, for compatibility with Horovod. mpistrat checks in commit() whether the hosts have changed."""

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Register functions that on_reset() calls. Local."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the functions of register_reset_callbacks(), as elastic.run does after a loss of ranks. Local."""
        for callback in self._reset_callbacks:
            callback()

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def _snapshot(self) -> Snapshot:
        """Return a copy of the state. Later training does not change the copy."""
        return {"values": copy.deepcopy(self._values_but_samplers()),
                "samplers": {name: getattr(self, name).state_dict() for name in self._samplers()}}

    def _take(self, snapshot: Snapshot) -> None:
        """Restore the state from a snapshot that this or another process has made."""
        self._set(copy.deepcopy(snapshot["values"]))
        for name, state in snapshot["samplers"].items():
            getattr(self, name).load_state_dict(state)

    def _portable(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot in a form that can be pickled. A background thread calls it."""
        return snapshot

    def _compare(self, number: int) -> bool:
        """Check before commit `number` that the ranks have equal states, or make the states equal. Collective.

        Returns True if it has changed the state of any rank. This base class only returns False.
        """
        return False

    def _broadcast(self, root: int) -> None:
        """Copy the objects of rank `root` to all ranks. Collective."""
        own = self._values_but_samplers()
        values = self._broadcast_object(own) if self._broadcast_object is not None else \
            array_ops.broadcast_object(own, root, name="elastic.state")
        self._names = [*values, *(name for name in self._names if name not in own)]
        self._set(values)

    def _needs_new_processes(self) -> str:
        """Return why the surviving processes cannot continue with this state after a loss; "" if they can."""
        return ""

    # -- elastic jobs --------------------------------------------------------------------------------------------------

    def _restore_newest(self, own: "Member") -> tuple[int | None, CommitId | None]:
        """Restore the newest commit: on all ranks if all have it, otherwise on the first rank that has it. Collective.

        Returns the rank whose state the caller must broadcast: rank 0 if there is no commit, None if all ranks have the
        commit. Also returns the commit's id: None if there is no commit, or if only the job's checkpoint file has it.
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
        """Return the id and the state of the newest commit that this host's agent process keeps, or (None, None)."""
        if own.newest is None:
            return None, None
        try:
            found, snapshot = own.read()
        except DamagedCommitError as error:
            logger.warning("%s on this host is damaged: %s", own.newest, error)
            return None, None
        return found, snapshot

    def _take_processed(self, by_rank: list[dict[str, dict[str, Any]]]) -> None:
        """Add the rows that any rank has processed to this rank's samplers, and to the saved states of the samplers."""
        for name in self._samplers():
            state = ElasticSampler.together([samplers[name] for samplers in by_rank])
            getattr(self, name).processed_indices |= state["processed_indices"]
            self._saved["samplers"][name] = state

    def _where(self) -> str:
        """Return a text on the progress of the training, for messages: up to three integers of the state."""
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
    """Call state.sync() and train(). In an elastic job, repeat both after each loss, from the last commit. Collective.

    If `train` fails for a different reason, `when_it_fails` is called, and then the exception is raised again.
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
    """Reconnect the surviving ranks if a loss of ranks has caused the current exception. Collective over these ranks.

    Returns False if the exception has a different cause, or the job cannot survive a loss; otherwise True. If the ranks
    cannot reconnect, or the text `why_not` is not empty, this process ends, and new processes continue the job.
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
        recover()
    except RecoveryError as error:
        own.leave_now(str(error))
    topology = runtime.current().topology
    own.rename(topology.rank, topology.size)
    return True


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorate a training function whose first argument is a state. The state is synchronised before each call.

    In an elastic job, after a loss of ranks, the surviving ranks or newly started processes call the function again
    with the state of the last commit. After any other exception, and after every exception in other jobs, the state is
    restored to the last commit, and the exception is raised again. The decorated function is collective.
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


# -- recovery ---------------------------------------------------------------------------------------------------------

# After a loss of ranks, the surviving ranks reconnect in the same processes, with new rank numbers. It needs Open MPI
# under `mpirun --with-ft ulfm`. All parts of the job are made again over the surviving ranks: communicators, shared
# memory, engines, roles and process sets. Objects of the script are kept: models, optimizers, traced functions,
# strategies, ProcessSet objects.

_DISCARD_S = 0.2  # Time for MPI to end the requests on the old communicators.
_QUIET_S = 0.02  # Recovery begins when no further rank was lost for this long.
_NEWS_S, _NEWS_POLL_S = 0.5, 0.01  # Time for MPI to learn of a loss that another rank has noticed.


def recover(limit_s: float = 5.0) -> None:
    """Reconnect the surviving ranks after a RanksLostError. Collective over these ranks. Call it in the main thread.

    The surviving ranks are renumbered in their old order, so rank(), size() and so on change. Averages divide by the
    new size. Lost ranks are removed from process sets, and a set without any surviving rank is removed. Collectives
    that were in flight are not completed.

    Args:
        limit_s: The time limit in seconds, which includes the wait for ranks that are still computing.

    Raises:
        RecoveryError: The limit has passed, MPI fails, or the job cannot recover. The caller must then end the process
            with os._exit, since threads may hang in MPI.
    """
    forked.require_rank()
    require_no_driver("recover()")
    former = runtime.current()
    if not former.losses.is_tolerant:
        raise RecoveryError("a job can recover only with several ranks, Open MPI, and mpirun --with-ft ulfm.")
    began = time.monotonic()
    if former.losses.interruption.error is None:
        former.losses.lose(())
    for rank, why in former.losses.irreplaceable.items():
        if any(each.rank == rank for each in former.losses.lost):
            raise RecoveryError(f"rank {rank} is lost. {why}")
    attempt = _Attempt(former, began + limit_s)
    thread = threading.Thread(target=attempt.run, name="mpistrat-recovery", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise RecoveryError(f"the recovery has taken more than {limit_s:g} s: rank {former.topology.rank} still "
                            f"{attempt.stage}. Without `mpistrat run --elastic`, start the job again.")
    if attempt.made is None:
        raise RecoveryError(f"rank {former.topology.rank} cannot recover: {attempt.problem}") from attempt.problem
    runtime.replace(former, attempt.made)
    logger.info("rank %d of %d: recovered in %.2f s; was rank %d of %d", attempt.made.topology.rank,
                attempt.made.topology.size, time.monotonic() - began, former.topology.rank, former.topology.size)


class _Attempt:
    """One recovery. `run` has a thread of its own, so that the caller can stop waiting if a call of MPI hangs."""

    def __init__(self, former: Job, deadline: float):
        self._former, self._deadline = former, deadline
        self.stage = "tries to end its engines"  # The current step of this rank, for errors.
        self.made: Job | None = None  # The new Job; None before it is made.
        self.problem: Exception | None = None  # The error of `run`, if it has failed.

    def run(self) -> None:
        try:
            self.made = self._recovered()
        except Exception as error:  # Of any kind: `recover` raises it.
            logger.debug("rank %d: the recovery failed", self._former.topology.rank, exc_info=True)
            self.problem = error

    def _recovered(self) -> Job:
        from ..transport.mpi import ulfm
        base = self._former.comm
        assert base is not None  # The job is tolerant.
        # Often several ranks end together. Open MPI 5.0.11 has crashed if a rank ended during MPIX_Comm_shrink.
        known = -1
        while known < len(self._former.losses.lost) and time.monotonic() < self._deadline:
            known = len(self._former.losses.lost)
            time.sleep(_QUIET_S)
        ulfm.report_failed(base, [each.rank for each in self._former.losses.lost], to_all=False)
        ulfm.discard(self._former.revoke(self._deadline - time.monotonic()), _DISCARD_S)
        comm = base
        while True:
            self.stage = "waits until the other ranks agree on which ranks are left"
            earlier, comm = comm, ulfm.survivors(comm)
            if earlier is not base:
                ulfm.discard([earlier], 0.0)
            self.stage = "connects to the ranks that are left"
            made, problem = self._connected(comm, base)
            self.stage = "waits until the other ranks are connected"
            if ulfm.have_all(comm, problem is None) and made is not None:
                ulfm.discard([base], 0.0)
                return made
            if made is not None:
                made.losses.lose(())
                ulfm.discard(made.revoke(self._deadline - time.monotonic()), _DISCARD_S)
            if problem is not None and not self._is_lost_by_now(comm):
                raise problem
            logger.debug("rank %d: ranks were lost during the recovery, which begins again", self._former.topology.rank)

    def _connected(self, comm: "MPI.Intracomm", base: "MPI.Intracomm") -> tuple[Job | None, Exception | None]:
        """Return the new Job over `comm` (None: not made), and the error (None: no error). Collective over `comm`."""
        made = None
        try:
            former_ranks = mpi_library.ranks_in(comm, base)
            new_ranks = {former: rank for rank, former in enumerate(former_ranks)}
            # Open MPI may crash if a rank ends while a communicator is made, so make as few as possible.
            hosts = [self._former.topology.host_of[rank] for rank in former_ranks]
            made = runtime.connected(comm, binds=False, hosts=hosts)
            made.spans_hosts = self._former.spans_hosts
            made.registry.restore(self._former.registry, new_ranks)
            made.losses.irreplaceable.update((new_ranks[rank], why) for rank, why in
                                             self._former.losses.irreplaceable.items() if rank in new_ranks)
            return made, None
        except Exception as error:  # Of any kind: the other ranks must not wait for this one.
            logger.debug("rank %d: the ranks that are left are not connected", self._former.topology.rank,
                         exc_info=True)
            comm.Revoke()
            return made, error

    def _is_lost_by_now(self, comm: "MPI.Intracomm") -> bool:
        """Return whether a rank of `comm` is lost. Waits up to 0.5 s for MPI to learn of a loss."""
        from ..transport.mpi import ulfm
        until = min(time.monotonic() + _NEWS_S, self._deadline)
        while not ulfm.failed_ranks(comm):
            if time.monotonic() > until:
                return False
            time.sleep(_NEWS_POLL_S)
        return True
