"""Chooses the backend for GPU tensors, and connects NCCL, before the first collective on GPU tensors.

The engine's thread of each rank sends what the rank has found to all ranks, over the data plane for CPU tensors. So all
ranks make the same choice. A rank that gets an exception sends it as text, because the other ranks wait for a message.

All ranks make NCCL's communicators, or none does. ncclCommInitRank waits for all ranks without a limit: a rank that
fails would leave the others blocked. Therefore each rank connects in a separate thread, and meanwhile its engine's
thread exchanges the state (connecting, connected, failed) with the other ranks. NCCL opens the connections between
ranks in their first collective (NCCL_RUNTIME_CONNECT, the default of 2.30), and a full /dev/shm or a blocked port is an
error in that collective. Therefore connecting includes an all-reduce of one element.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import EngineError
from ..core.install import pip_extra
from ..core.interfaces import DataPlane
from ..core.request import ReduceOp
from ..core.settings import Settings
from ..core.topology import Topology, rank_list, ranks_by_value
from ..core.tuning import (
    GPU_FUSION_PADDING_BYTES,
    GPU_LEAST_FUSION_BYTES,
    NCCL_CONNECT_FIRST_SLEEP_S,
    NCCL_CONNECT_LONGEST_SLEEP_S,
    WATCHDOG_REVOKE_S,
)
from .arrays import GpuArray, GpuDevice, NcclCommunicator
from .assignment import claim, release
from .backend import within
from .copy_kernel import CopyJob
from .nccl_data import BUFFERS, OPERATIONS, UINT8, NcclData

logger = logging.getLogger(__name__)

# Returns the values of all ranks, by rank. A value is None, a number, a text, or a list of them. Collective.
Exchange = Callable[[Any], list[Any]]

# The first version code of NCCL that allows ranks to share a GPU, with NCCL_MULTI_RANK_GPU_ENABLE=1.
SHARES_GPUS = 23000
_KEEPS_ORDER_FROM = 22600  # The first version code of NCCL that knows NCCL_LAUNCH_ORDER_IMPLICIT.


class GpuInfo(NamedTuple):
    """What a rank sends to the others before the first collective on GPU tensors."""

    gpu: str  # An identifier of the rank's GPU, unique among all hosts.
    nccl: int  # NCCL's version code; 0: NCCL is missing.
    buffer_bytes: int  # The size of the fusion buffers that the rank could allocate; 0: there was no memory.
    may_share: bool  # Whether the rank's environment allows ranks to share a GPU.
    is_free: bool = True  # Whether no other process set of this rank uses NCCL on its GPU.
    problem: str = ""  # The error while the rank gathered this information; "" if none.


def why_not_nccl(ranks: Sequence[GpuInfo], wanted: str) -> str:
    """Return the reason not to use NCCL; "" to use it. `wanted`: The value of MPISTRAT_GPU_OPERATIONS.

    Raises EngineError: `wanted` is "nccl", and NCCL cannot be used.
    """
    if wanted == "staged":
        return f"MPISTRAT_GPU_OPERATIONS={wanted}"
    reason = _obstacle(ranks)
    if reason and wanted != "auto":
        raise EngineError(f"MPISTRAT_GPU_OPERATIONS={wanted}: {reason}")
    taken = [rank for rank, found in enumerate(ranks) if not found.is_free]
    if taken and not reason and wanted == "auto":
        reason = (f"ranks {rank_list(taken)} of this process set use NCCL in another process set, and NCCL may "
                  "deadlock if ranks start the collectives of two sets in different orders. If the script waits for "
                  "results of one set before it calls the other, set MPISTRAT_GPU_OPERATIONS=nccl to use NCCL in both")
    return reason


def listed(texts: Sequence[str | None]) -> str:
    """Join the texts, each with the number of its rank; "" if all are empty. `texts[r]`: The text of rank r."""
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)


def _obstacle(ranks: Sequence[GpuInfo]) -> str:
    if problems := listed([found.problem for found in ranks]):
        return f"NCCL cannot be used ({problems})"
    lacking = [rank for rank, found in enumerate(ranks) if not found.nccl]
    if lacking:
        return f"ranks {rank_list(lacking)} have no NCCL ({pip_extra('gpu')})"
    versions = sorted({found.nccl for found in ranks})
    if len(versions) > 1:
        return f"the ranks have different versions of NCCL: {', '.join(map(str, versions))}"
    shared = [together for together in ranks_by_value(found.gpu for found in ranks).values() if len(together) > 1]
    if shared and not (versions[0] >= SHARES_GPUS and all(found.may_share for found in ranks)):
        return (f"ranks {rank_list(shared[0])} share a GPU, which NCCL allows from 2.30 on, with "
                "NCCL_MULTI_RANK_GPU_ENABLE=1")
    starved = [rank for rank, found in enumerate(ranks) if not found.buffer_bytes]
    if starved:
        return f"the GPUs of ranks {rank_list(starved)} have no memory left for fusion buffers"
    return ""


def exchange_over(host: DataPlane, size: int) -> Exchange:
    """Return an Exchange, a function that gathers one value of each rank, as JSON, over the data plane `host`."""
    def exchange(value: object) -> list[Any]:
        own = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = np.empty(size, np.int64)
        host.allgather(np.array([own.size], np.int64), sizes, [1] * size)
        gathered = np.empty(int(sizes.sum()), np.uint8)
        host.allgather(own, gathered, sizes.tolist())
        ends = np.cumsum(sizes)
        return [json.loads(gathered[end - n:end].tobytes()) for end, n in zip(ends, sizes, strict=True)]
    return exchange


def connect(device: GpuDevice, topology: Topology, exchange: Exchange, host: DataPlane, settings: Settings,
            owner: object) -> tuple[NcclData | None, int]:
    """Choose NCCL or staging through host memory, and connect NCCL if it is chosen. Collective. Rank 0 logs the choice.

    Args:
        exchange, host: Connect the ranks of `topology`. `host` also reduces staged tensors.
        settings: The same on all ranks.
        owner: The object for which NCCL is claimed (see assignment.claim). It must end the claim by `release`.

    Returns:
        The NCCL backend, or None if all tensors are staged; and the fusion threshold in bytes.

    Raises EngineError: MPISTRAT_GPU_OPERATIONS=nccl and NCCL cannot be used, or NCCL fails to connect. On all ranks.
    """
    rank, size = topology.rank, topology.size
    found, buffers, own_ids = _probe(device, rank == 0, settings)
    if size > 1 and found.buffer_bytes:
        found = found._replace(is_free=claim(device, owner))
    # An id is bytes, and travels as hexadecimal digits; or, before cupy 14, a tuple.
    gathered = exchange((list(found), [each.hex() if isinstance(each, bytes) else list(each) for each in own_ids]))
    ranks, ids = [GpuInfo(*fields) for fields, _ in gathered], gathered[0][1]
    reason = why_not_nccl(ranks, settings.gpu_operations)
    if reason:
        release(device, owner)
        is_expected = not any(other.problem or (other.nccl and not other.buffer_bytes) for other in ranks)
        _log(rank, logging.INFO if is_expected else logging.WARNING,
             f"GPU tensors are staged through host memory and reduced by {host.name}: {reason}")
        return None, settings.fusion_bytes
    nbytes = min(other.buffer_bytes for other in ranks)
    fusion_bytes = min(settings.fusion_bytes, nbytes - GPU_FUSION_PADDING_BYTES)
    if fusion_bytes < settings.fusion_bytes:
        _log(rank, logging.WARNING, f"GPU memory is short: tensors are fused up to {fusion_bytes} bytes instead of "
                                    f"{settings.fusion_bytes}")
    if settings.nccl_streams > 1 and found.nccl < _KEEPS_ORDER_FROM:
        _log(rank, logging.WARNING, f"MPISTRAT_NUM_NCCL_STREAMS={settings.nccl_streams}: NCCL before 2.26 does not "
                                    "keep the order of several communicators, and may deadlock. Install NCCL 2.26.")
    communicators = make_communicators(
        lambda: (device.communicator(size, bytes.fromhex(each) if isinstance(each, str) else tuple(each), rank)
                 for each in ids), device, rank, exchange, settings.limit_s)
    _log(rank, logging.INFO, f"GPU tensors are reduced by NCCL (version code {found.nccl})")
    return NcclData(device, rank, size, communicators,
                    [buffers[i:i + BUFFERS] for i in range(0, len(buffers), BUFFERS)], nbytes, found.nccl,
                    size == 1 or all(other.is_free for other in ranks)), fusion_bytes


def _log(rank: int, level: int, text: str) -> None:
    if rank == 0:
        logger.log(level, "rank 0: %s", text)


def _probe(device: GpuDevice, makes_ids: bool, settings: Settings) -> tuple[
        GpuInfo, list[GpuArray], list[bytes | tuple[int, ...]]]:
    """Return this rank's GpuInfo, its fusion buffers and, if `makes_ids`, an id for each communicator. Never raises."""
    streams, may_share = settings.nccl_streams, os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if settings.gpu_operations == "staged":
        return GpuInfo(device.identity, 0, 0, may_share), [], []
    try:
        version = device.nccl_version()
        # The copy kernel, so that a compiler that does not work is found now, and not in the middle of a collective.
        if version:
            device.compile(CopyJob("float32", "float32"))
        buffers, nbytes = fusion_buffers(device, settings.fusion_bytes, BUFFERS * streams) if version else ([], 0)
        ids = [device.unique_id() for _ in range(streams)] if version and makes_ids else []
    except Exception as error:  # Sent to the other ranks, which wait for this rank. All ranks then act on it.
        return GpuInfo(device.identity, 0, 0, may_share, problem=f"{type(error).__name__}: {error}"), [], []
    return GpuInfo(device.identity, version, nbytes, may_share), buffers, ids


def fusion_buffers(device: GpuDevice, fusion_bytes: int, count: int) -> tuple[list[GpuArray], int]:
    """Allocate `count` fusion buffers of equal size. Return them, and their size in bytes.

    Halves the size while GPU memory is short. Returns ([], 0) if the size would be below GPU_LEAST_FUSION_BYTES.
    """
    nbytes = fusion_bytes + GPU_FUSION_PADDING_BYTES
    while True:
        made: list[GpuArray] = []
        while len(made) < count and (buffer := device.scratch(nbytes)) is not None:
            made.append(buffer)
        if len(made) == count:
            return made, nbytes
        made.clear()  # This frees the buffers, to make room for smaller ones.
        if nbytes <= GPU_LEAST_FUSION_BYTES:
            return [], 0
        nbytes //= 2


# -- communicators -----------------------------------------------------------------------------------------------------


def make_communicators(make: Callable[[], Iterable[NcclCommunicator]], device: GpuDevice, rank: int, exchange: Exchange,
                       limit_s: float, clock: Callable[[], float] = time.monotonic) -> list[NcclCommunicator]:
    """Make communicators and connect them. Return them when the communicators of all ranks are connected. Collective.

    A separate thread calls `make`, which may wait for the other ranks. `exchange` must work while `make` waits.
    Connecting fails after `limit_s` seconds (0: never).

    Raises EngineError: Some rank could not connect. All ranks raise it soon afterwards. The message has the ranks and
    their errors. All communicators are aborted. The separate thread may stay blocked in NCCL until its process ends.
    """
    attempt, began, pause_s = _Attempt(make, device, rank), clock(), NCCL_CONNECT_FIRST_SLEEP_S
    while True:
        state = attempt.state
        if state is None and 0 < limit_s < clock() - began:
            state = f"not connected after {limit_s:g} s"
        states = exchange(state)
        if failed := listed(states):
            attempt.give_up()
            raise EngineError(f"NCCL cannot connect the ranks: {failed}. Set MPISTRAT_GPU_OPERATIONS=staged to reduce "
                              "without NCCL.")
        if None not in states:
            return attempt.made
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, NCCL_CONNECT_LONGEST_SLEEP_S)


class _Attempt:
    """An attempt to make and connect communicators, in a separate thread that may block for ever in NCCL."""

    def __init__(self, make: Callable[[], Iterable[NcclCommunicator]], device: GpuDevice, rank: int):
        self._device, self._rank = device, rank
        self.made: list[NcclCommunicator] = []
        self.state: str | None = None  # None while they are being made and connected, then "", or the error.
        self._is_given_up = False
        self._lock = threading.Lock()
        threading.Thread(target=self._run, args=(make,), name="mpistrat-nccl-connect", daemon=True).start()

    def _run(self, make: Callable[[], Iterable[NcclCommunicator]]) -> None:
        state = ""
        try:
            with self._device.current():
                for communicator in make():
                    with self._lock:
                        self.made.append(communicator)
                    if self._is_given_up:
                        break
                    self._reduce_one_element(communicator)
        except Exception as error:  # Sent to all ranks, including this one.
            state = str(error) or repr(error)
        with self._lock:
            self.state = state
            if self._is_given_up:
                self._abort()

    def _reduce_one_element(self, communicator: NcclCommunicator) -> None:
        memory, stream = self._device.scratch(1), self._device.stream()
        if memory is None:
            raise MemoryError("the GPU has no memory left")
        communicator.allReduce(memory.address, memory.address, 1, UINT8, OPERATIONS[ReduceOp.MAX], stream.ptr)
        end = self._device.record(stream)
        while not end.done and not self._is_given_up:
            communicator.check_async_error()
            time.sleep(NCCL_CONNECT_FIRST_SLEEP_S)

    def give_up(self) -> None:
        """Abort the communicators, because some rank could not connect.

        An abort frees memory that the connecting thread may use. While that thread runs, `give_up` only revokes the
        communicators. NCCL's calls then return, and that thread aborts. If NCCL cannot revoke, `give_up` itself aborts.
        """
        with self._lock:
            self._is_given_up = True
            revoked = [within(WATCHDOG_REVOKE_S, communicator.revoke) for communicator in self.made] \
                if self.state is None else [False]
            if not all(revoked):
                self._abort()

    def _abort(self) -> None:
        for communicator in self.made:
            try:
                communicator.abort()
            except Exception:  # The first failure is reported.
                logger.debug("rank %d: an NCCL communicator could not be aborted", self._rank, exc_info=True)
