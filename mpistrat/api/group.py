"""Group: ranks that communicate, with separate backends and a separate engine.

All ranks of the job are one group. Each process set is another group, a job inside the job: its ranks are numbered
from 0. Groups share only the processes and their GPUs. So two sets that overlap may run their collectives in any order,
and sets without a common rank do not wait for each other. Only NCCL needs one order for all work on a GPU. So of sets
that overlap, only the first set with a collective on GPU tensors uses NCCL (gpu.assignment).
"""

import hashlib
import itertools
import time
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.interfaces import Observer
from ..core.interruption import Interruption
from ..core.request import DEVICE_GPU, Request, allgather_request, specs_of
from ..core.settings import Settings
from ..core.topology import Topology
from ..core.tuning import KEPT_REQUESTS, RECORDED_OPERATIONS
from ..engine.controller import Controller
from ..engine.engine import Engine
from ..engine.executor import Executor
from ..engine.not_finite import FiniteWatch
from ..gpu.arrays import GpuTensors
from ..gpu.gpu_executor import GpuExecutor
from ..process import error_text
from ..process.procfs import Process
from ..trace.records import OperationRing, Traced
from .backends import Backends

if TYPE_CHECKING:
    from mpi4py import MPI

_LAST_OPERATIONS = 3  # The number of last operations in a report.


class Group:
    """One rank's part in a group. Constructing it starts the engine.

    Args:
        settings: The settings, the same on all ranks.
        backends: The backends that connect these ranks.
        comm: A communicator of these ranks; None for one rank.
        interruption: Ends the engine. The backends have the same object, which ends their waits.
        tracer: Exchanges messages over this engine; only for the group of all ranks. None: there is no tracer.
        processes: The known processes of other ranks of this host, by their rank in the job.
    """

    def __init__(self, settings: Settings, topology: Topology, backends: Backends, comm: "MPI.Intracomm | None",
                 interruption: Interruption, tracer: Observer | None = None,
                 processes: Mapping[int, Process] = MappingProxyType({})):
        self.topology, self.comm = topology, comm
        self._backends, self.feedback = backends, backends.feedback
        # The value of `joins` when counting began, and the counters by key.
        self._numbers: tuple[int, defaultdict[Hashable, itertools.count]] = 0, defaultdict(itertools.count)
        self._requests: dict[str, tuple[object, Request]] = {}  # By name: the arguments of a request, and the request.
        ring = OperationRing(RECORDED_OPERATIONS if settings.is_recorded else 0, tracer)
        self._device = GpuExecutor(topology, backends.data, settings, ring)
        # Checks gradients for Inf and NaN; None: they are not checked.
        self.finite = FiniteWatch(topology.job_rank) if settings.nan_warning else None
        executor = Executor(backends.data, topology, settings.fusion_bytes, self._device, ring, self.finite)
        controller = Controller(topology, backends.control, executor, settings, backends.agreement,
                                interruption=interruption, where=partial(_where, ring),
                                look=partial(error_text.look, processes))
        # The recorded operations of this group.
        self.traced = Traced(ring, topology.size, backends.data.name, controller.queue.in_flight,
                             backends.data.measured_choices)
        self.engine = Engine(controller)  # Executes the collectives of the group.
        self.engine.start()

    def request_on_gpu(self, name: str, tensors: GpuTensors, make_request: "partial[Request]") -> Request:
        """Return the request for tensors on a GPU. It is cached for calls with equal arguments. Any thread may call it.

        `make_request`: Takes the name, the specs of the tensors, and `device=`.
        """
        known = self._requests.get(name)
        kind = make_request.func, make_request.keywords, list(tensors.shapes), tensors.dtypes
        if known is None or known[0] != kind:
            if len(self._requests) >= KEPT_REQUESTS:
                self._requests.clear()
            known = self._requests[name] = kind, make_request(name, specs_of(tensors), device=DEVICE_GPU)
        return known[1]

    @property
    def data_name(self) -> str:
        """The name of the backend that reduces CPU tensors."""
        return self._backends.data.name

    def await_gpu(self) -> None:
        """Wait until the GPU has done the collectives that are complete on this rank. Local. Raises EngineError."""
        self._device.await_kept()

    @property
    def joins(self) -> int:
        """The number of times that all ranks have completed a join()."""
        return self.engine.controller.joins

    @property
    def executed(self) -> int:
        """The number of operations that this rank has executed."""
        return self.engine.controller.queue.completed

    @property
    def error(self) -> Exception | None:
        """The error that ended the engine; None while it runs, and after a shutdown of all ranks."""
        return self.engine.controller.life.error

    def next_number(self, key: Hashable) -> int:
        """Return the number of earlier calls with `key`. Local.

        Ranks of the group that make the same calls in the same order get the same numbers. Counting restarts after a
        join(), since some ranks may have made fewer calls before it.
        """
        joins = self.engine.controller.joins
        if self._numbers[0] != joins:
            self._numbers = joins, defaultdict(itertools.count)
        return next(self._numbers[1][key])

    def allgather_bytes(self, payload: bytes, name: str) -> list[bytes]:
        """Return the payloads of all ranks of the group, in rank order. Collective over the group."""
        return self.exchange(payload, name)[0]

    def exchange(self, payload: bytes, name: str, marks: Sequence[int] = ()) -> tuple[list[bytes], list[list[int]]]:
        """Return the payloads and the marks of all ranks of the group, in rank order. Collective over the group.

        If the digests show that all payloads are equal, this is one operation, otherwise two. The marks are 64-bit
        integers. Their values may differ among the ranks, but all ranks must pass the same number of marks.
        """
        digest = np.frombuffer(hashlib.blake2b(payload, digest_size=16).digest(), np.int64)
        head = np.array([[len(payload), *digest, *marks]], np.int64)
        heads, = self.engine.run(allgather_request(f"{name}.heads", specs_of([head])), [head]).wait()
        sizes, of_ranks = heads[:, 0].tolist(), heads[:, 3:].tolist()
        if (heads[:, :3] == head[:, :3]).all():
            return [payload] * len(heads), of_ranks
        own = np.frombuffer(payload, np.uint8)
        together, = self.engine.run(allgather_request(f"{name}.payloads", specs_of([own])), [own]).wait()
        return [together[end - size:end].tobytes() for end, size in zip(np.cumsum(sizes), sizes, strict=True)], of_ranks

    def revoke(self) -> list[Any]:
        """Give up all resources after a loss of ranks. Local; after the engine has ended. See DataPlane.revoke."""
        return [*self._backends.revoke(), *([] if self.comm is None else [self.comm])]

    def free(self) -> None:
        """Free all resources. Collective; after the engine has ended without an error."""
        self._device.close()
        self._backends.close()
        if self.comm is not None:
            self.comm.Free()


def _where(ring: OperationRing) -> str:
    """Return the position of this rank in the script and its last collectives, for reports on ranks that are late.

    Not a method, which would be a reference cycle of engine and group, and keep their memory after a recovery.
    """
    now = time.monotonic_ns()
    last = [f"{each.request.name} ({(now - each.delivered) / 1e9:.1f} s ago)"
            for each in ring.since(0)[-_LAST_OPERATIONS:]]
    return error_text.where() + (f"\nIts last collectives: {', '.join(last)}" if last else "")
