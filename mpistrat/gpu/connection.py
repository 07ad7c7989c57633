"""Which way GPU tensors go, and NCCL's communicators: settled by all ranks over MPI before and after they are made.

A rank that fails alone would leave the others in ncclCommInitRank, which waits for all ranks without a limit. So every
rank says what it has found, also if that is an exception; connects in a thread of its own; and meanwhile keeps asking
the others how far they are.
"""

import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..collectives.base import DataPlane
from ..collectives.nccl import NcclData
from ..collectives.nccl_hosts import HostsLane, NcclHosts
from ..errors import EngineError
from ..settings import Settings
from .arrays import GpuArray
from .choice import Found, why_not_nccl
from .plane import GpuPlane

logger = logging.getLogger(__name__)

Exchange = Callable[[Any], list[Any]]  # of this rank's value for everybody's; collective

# In a fusion buffer, for the gaps between up to 4,096 tensors; half of it, where hosts have slices, for what these have
# in common with nothing (32 bytes for each rank of a host).
_PADDING_BYTES = 64 * 1024
_SMALLEST_BYTES = 2**20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1e-3, 0.1  # between two questions of how far the others are


@dataclass(frozen=True)
class Hosts:
    """What the hierarchical way is made of.

    Attributes:
        ranks: Those of this host; every host has as many.
        across: Reduces among the ranks of the same place in their hosts' `ranks`.
    """

    ranks: Sequence[int]
    across: DataPlane


def exchange_over(host: DataPlane, size: int) -> Exchange:
    """What exchanges values among `size` ranks by way of `host`."""
    def exchange(value: Any) -> list[Any]:
        own = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = np.empty(size, np.int64)
        host.allgather(np.array([own.size], np.int64), sizes, [1] * size)
        everybody = np.empty(int(sizes.sum()), np.uint8)
        host.allgather(own, everybody, sizes.tolist())
        ends = np.cumsum(sizes)
        return [pickle.loads(everybody[end - n:end].tobytes()) for end, n in zip(ends, sizes, strict=True)]
    return exchange


def connect(device: Any, rank: int, size: int, exchange: Exchange, settings: Settings, limit_s: float,
            staged: GpuPlane, hosts: Hosts | None) -> tuple[GpuPlane | None, int]:
    """Find out whether NCCL serves, and connect. Collective. Says which way it is, on rank 0.

    Args:
        device: This rank's GPU.
        rank: This rank.
        size: How many ranks there are.
        exchange: Among the same ranks.
        settings: The same on all ranks.
        limit_s: How long NCCL may take to connect; 0: for ever.
        staged: The other way, among the same ranks.
        hosts: None if they differ in their numbers of ranks.

    Returns:
        The plane that uses NCCL, or None where tensors are staged; and how many bytes are fused.

    Raises:
        EngineError: On all ranks. NCCL is wanted and cannot serve, or fails to connect; names the ranks.
    """
    is_divided = settings.gpu_operations == "hierarchical"
    together = list(range(size)) if not is_divided or hosts is None else hosts.ranks
    found, buffers, own_ids = _look(device, rank == together[0], settings)
    told = exchange((found, own_ids))
    ranks = [other for other, _ in told]
    reason = why_not_nccl(ranks, settings.gpu_operations,
                          "the hosts have different numbers of ranks" if is_divided and hosts is None else "")
    if reason:
        is_expected = not any(other.problem or (other.nccl and not other.buffer_bytes) for other in ranks)
        _say(rank, logging.INFO if is_expected else logging.WARNING, f"GPU tensors are {staged.description}: {reason}")
        return None, settings.fusion_bytes
    nbytes = min(other.buffer_bytes for other in ranks)
    fusion_bytes = min(settings.fusion_bytes, nbytes - _PADDING_BYTES)
    if fusion_bytes < settings.fusion_bytes:
        _say(rank, logging.WARNING, f"GPU memory is short: tensors are fused up to {fusion_bytes} bytes instead of "
                                    f"{settings.fusion_bytes}")
    communicators = make_communicators(
        lambda: [device.communicator(len(together), unique_id, together.index(rank))
                 for unique_id in told[together[0]][1]], device, exchange, limit_s)
    if not is_divided or hosts is None:
        plane: GpuPlane = NcclData(device, rank, communicators, buffers, nbytes)
    else:
        used = nbytes - _PADDING_BYTES // 2
        lanes = [HostsLane(device, *of_lane, together.index(rank), len(together), hosts.across, used, limit_s)
                 for of_lane in zip(communicators, buffers, strict=True)]
        plane = NcclHosts(device, rank, lanes, used, staged)
    _say(rank, logging.INFO, f"GPU tensors are {plane.description} (version code {found.nccl})")
    return plane, fusion_bytes


def _say(rank: int, level: int, text: str) -> None:
    if rank == 0:
        logger.log(level, "%s", text)


def _look(device: Any, makes_ids: bool, settings: Settings) -> tuple[Found, list[list[GpuArray]], list[Any]]:
    """What this rank has, its fusion buffers, and the ids of communicators if it makes them. Does not raise."""
    lanes, may_share = settings.nccl_streams, os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if settings.gpu_operations == "staged":
        return Found(device.identity, 0, 0, may_share), [], []
    try:
        version = device.nccl_version()
        buffers, nbytes = fusion_buffers(device, settings.fusion_bytes, lanes) if version else ([], 0)
        ids = [device.unique_id() for _ in range(lanes)] if version and makes_ids else []
    except Exception as error:  # Told to the others, which wait for this rank's word; all ranks then act on it.
        return Found(device.identity, 0, 0, may_share, f"{type(error).__name__}: {error}"), [], []
    return Found(device.identity, version, nbytes, may_share), buffers, ids


def fusion_buffers(device: Any, fusion_bytes: int, lanes: int) -> tuple[list[list[GpuArray]], int]:
    """Two buffers for each lane, and how large they are; half as large as long as there is no memory for all of them.

    No buffers, and 0, when there is no memory for small ones either.
    """
    nbytes = fusion_bytes + _PADDING_BYTES
    while True:
        made: list[GpuArray | None] = []
        while len(made) < 2 * lanes and None not in made:
            made.append(device.scratch(nbytes))
        fitting = [buffer for buffer in made if buffer is not None]
        if len(fitting) == 2 * lanes:
            return [fitting[2 * lane:2 * lane + 2] for lane in range(lanes)], nbytes
        # What there was memory for must not take the place of the smaller ones.
        made.clear()
        fitting.clear()
        if nbytes <= _SMALLEST_BYTES:
            return [], 0
        nbytes //= 2


def make_communicators(make: Callable[[], list[Any]], device: Any, exchange: Exchange, limit_s: float,
                       clock: Callable[[], float] = time.monotonic) -> list[Any]:
    """What `make` returns, when it has returned on all ranks. Collective.

    Args:
        make: Makes this rank's communicators; waits for the other ranks as it likes. Called in another thread.
        device: This rank's GPU.
        exchange: Among the same ranks; it must not need what `make` waits for.
        limit_s: How long it may take; 0: for ever.
        clock: Seconds, from any origin.

    Raises:
        EngineError: On all ranks, soon after it has failed on one of them; names the ranks and their errors. What the
            others have made is aborted; a thread of theirs may stay behind in NCCL until the process ends.
    """
    attempt, began, pause_s = _Attempt(make, device), clock(), _FIRST_PAUSE_S
    while True:
        state = attempt.state
        if state is None and 0 < limit_s < clock() - began:
            state = f"not connected after {limit_s:g} s"
        told = exchange(state)
        failed = {rank: text for rank, text in enumerate(told) if text}
        if failed:
            attempt.give_up()
            raise EngineError("NCCL cannot connect the ranks: " + "; ".join(
                f"rank {rank}: {text}" for rank, text in failed.items()) +
                ". MPISTRAT_GPU_OPERATIONS=staged does without NCCL.")
        if None not in told:
            return attempt.made
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class _Attempt:
    """Communicators in the making, in a thread that may wait for ever.

    Attributes:
        made: The communicators.
        state: None as long as they are being made, then "", or what has gone wrong.
    """

    def __init__(self, make: Callable[[], list[Any]], device: Any):
        self.made: list[Any] = []
        self.state: str | None = None
        self._is_given_up = False
        self._lock = threading.Lock()
        threading.Thread(target=self._run, args=(make, device), name="mpistrat-nccl-connect", daemon=True).start()

    def _run(self, make: Callable[[], list[Any]], device: Any) -> None:
        state = ""
        try:
            with device.current():
                self.made = make()
        except Exception as error:  # Told to all ranks, this one included.
            state = str(error) or repr(error)
        with self._lock:
            self.state = state
            if self._is_given_up:
                _abort(self.made)

    def give_up(self) -> None:
        """Abort what has been made, now or when it is."""
        with self._lock:
            self._is_given_up = True
            if self.state is not None:
                _abort(self.made)


def _abort(communicators: Sequence[Any]) -> None:
    for communicator in communicators:
        try:
            communicator.abort()
        except Exception:  # The failure that led here is the one to report.
            logger.debug("a communicator could not be aborted", exc_info=True)
