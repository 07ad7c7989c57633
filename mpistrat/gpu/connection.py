"""Which way GPU tensors go: settled by all ranks over MPI, from what each of them has found.

A rank that fails alone would leave the others waiting, so every rank says what it has found, also if that is an
exception.
"""

import logging
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..collectives.base import DataPlane
from ..collectives.cuda_aware import CudaAwareData
from ..collectives.nccl import NcclData
from ..collectives.nccl_hosts import HostsLane, NcclHosts
from ..errors import EngineError
from ..mismatch import rank_list
from ..settings import Settings
from .arrays import GpuArray
from .choice import Found, why_not_nccl
from .communicators import Exchange, make_communicators
from .pipeline import BUFFERS
from .plane import GpuPlane

logger = logging.getLogger(__name__)

# In a fusion buffer, for the gaps between up to 4,096 tensors; half of it, where hosts have slices, for what these have
# in common with nothing (32 bytes for each rank of a host).
_PADDING_BYTES = 64 * 1024
_SMALLEST_BYTES = 2**20


@dataclass(frozen=True)
class Hosts:
    """What the hierarchical way is made of.

    Attributes:
        ranks: Those of this host; every host has as many.
        across: Reduces among the ranks of the same place in their hosts' `ranks`.
    """

    ranks: Sequence[int]
    across: DataPlane


@dataclass(frozen=True)
class Ways:
    """What GPU tensors can go by, besides NCCL among all ranks and the paths for CPU tensors.

    Attributes:
        hosts: For the hierarchical way; None if it is not wanted, or hosts differ in their numbers of ranks.
        mpi: MPI calls on memory of GPUs (`collectives.device_mpi.DeviceMpi`), if the libraries of all ranks take it.
        says_mpi: What says that they do.
        why_not_mpi: Why there is no `mpi`.
    """

    hosts: Hosts | None = None
    mpi: Any = None
    says_mpi: str = ""
    why_not_mpi: str = "there is no MPI"

    def close(self) -> None:
        """Release communicators. Collective."""
        if self.mpi is not None:
            self.mpi.close()
        if self.hosts is not None:
            self.hosts.across.close()


NO_WAYS = Ways()


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
            staged: GpuPlane, ways: Ways) -> tuple[GpuPlane | None, int]:
    """Find out what serves, and connect. Collective. Says which way it is, on rank 0.

    Args:
        device: This rank's GPU.
        rank: This rank.
        size: How many ranks there are.
        exchange: Among the same ranks.
        settings: The same on all ranks.
        limit_s: How long NCCL may take to connect; 0: for ever.
        staged: The last resort, among the same ranks.
        ways: As on all ranks.

    Returns:
        The plane that reduces where it can, or None where tensors are staged; and how many bytes are fused.

    Raises:
        EngineError: On all ranks. What is wanted cannot serve, or NCCL fails to connect; names the ranks.
    """
    wanted, hosts = settings.gpu_operations, ways.hosts
    is_divided = wanted == "hierarchical"
    together = list(range(size)) if not is_divided or hosts is None else hosts.ranks
    found, buffers, own_ids = _look(device, rank == together[0], settings)
    told = exchange((found, own_ids))
    ranks = [other for other, _ in told]
    reason = why_not_nccl(ranks, wanted,
                          "the hosts have different numbers of ranks" if is_divided and hosts is None else "")
    if reason:
        buffers.clear()  # Others may need the memory.
        why_not_mpi = ""
        if wanted == "mpi" or (wanted == "auto" and ways.mpi is not None):
            over_mpi, nbytes, why_not_mpi = _over_mpi(device, exchange, settings, limit_s, staged, ways)
            if over_mpi is not None:
                _say(rank, logging.INFO, f"GPU tensors are {over_mpi.description} ({ways.says_mpi}): {reason}")
                return over_mpi, _fused(rank, nbytes, settings)
            if wanted == "mpi":
                raise EngineError(f"MPISTRAT_GPU_OPERATIONS=mpi: {why_not_mpi}")
        is_expected = not why_not_mpi and not any(other.problem or (other.nccl and not other.buffer_bytes)
                                                  for other in ranks)
        _say(rank, logging.INFO if is_expected else logging.WARNING,
             f"GPU tensors are {staged.description}: {reason}" + (f"; {why_not_mpi}" if why_not_mpi else ""))
        return None, settings.fusion_bytes
    nbytes = min(other.buffer_bytes for other in ranks)
    fusion_bytes = _fused(rank, nbytes, settings)
    communicators = make_communicators(
        lambda: [device.communicator(len(together), unique_id, together.index(rank))
                 for unique_id in told[together[0]][1]], device, exchange, limit_s)
    of_lanes = list(zip(communicators, (buffers[i:i + BUFFERS] for i in range(0, len(buffers), BUFFERS)), strict=True))
    if not is_divided or hosts is None:
        plane: GpuPlane = NcclData(device, rank, [c for c, _ in of_lanes], [b for _, b in of_lanes], nbytes)
    else:
        used = nbytes - _PADDING_BYTES // 2
        lanes = [HostsLane(device, *of_lane, together.index(rank), len(together), hosts.across, used, limit_s)
                 for of_lane in of_lanes]
        plane = NcclHosts(device, rank, lanes, used, staged)
    _say(rank, logging.INFO, f"GPU tensors are {plane.description} (version code {found.nccl})")
    return plane, fusion_bytes


def _over_mpi(device: Any, exchange: Exchange, settings: Settings, limit_s: float, staged: GpuPlane,
              ways: Ways) -> tuple[GpuPlane | None, int, str]:
    """What uses MPI on memory of GPUs and the size of its buffers; or None, and why there is none. Collective."""
    if ways.mpi is None:
        return None, 0, ways.why_not_mpi
    buffers, own_bytes = fusion_buffers(device, settings.fusion_bytes, BUFFERS + 1)
    of_all = exchange(own_bytes)
    starved = [rank for rank, nbytes in enumerate(of_all) if not nbytes]
    if starved:
        return None, 0, f"the GPUs of ranks {rank_list(starved)} have no memory left for the buffers of MPI"
    return CudaAwareData(device, ways.mpi, buffers, min(of_all), limit_s, staged), min(of_all), ""


def _fused(rank: int, nbytes: int, settings: Settings) -> int:
    """How many bytes of tensors are fused with buffers of `nbytes`."""
    fusion_bytes = min(settings.fusion_bytes, nbytes - _PADDING_BYTES)
    if fusion_bytes < settings.fusion_bytes:
        _say(rank, logging.WARNING, f"GPU memory is short: tensors are fused up to {fusion_bytes} bytes instead of "
                                    f"{settings.fusion_bytes}")
    return fusion_bytes


def _say(rank: int, level: int, text: str) -> None:
    if rank == 0:
        logger.log(level, "%s", text)


def _look(device: Any, makes_ids: bool, settings: Settings) -> tuple[Found, list[GpuArray], list[Any]]:
    """What this rank has, its fusion buffers, and the ids of communicators if it makes them. Does not raise."""
    lanes, may_share = settings.nccl_streams, os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if settings.gpu_operations in ("mpi", "staged"):
        return Found(device.identity, 0, 0, may_share), [], []
    try:
        version = device.nccl_version()
        buffers, nbytes = fusion_buffers(device, settings.fusion_bytes, BUFFERS * lanes) if version else ([], 0)
        ids = [device.unique_id() for _ in range(lanes)] if version and makes_ids else []
    except Exception as error:  # Told to the others, which wait for this rank's word; all ranks then act on it.
        return Found(device.identity, 0, 0, may_share, f"{type(error).__name__}: {error}"), [], []
    return Found(device.identity, version, nbytes, may_share), buffers, ids


def fusion_buffers(device: Any, fusion_bytes: int, count: int) -> tuple[list[GpuArray], int]:
    """Buffers, and how large they are; half as large as long as there is no memory for all of them.

    No buffers, and 0, when there is no memory for small ones either.
    """
    nbytes = fusion_bytes + _PADDING_BYTES
    while True:
        made: list[GpuArray | None] = []
        while len(made) < count and None not in made:
            made.append(device.scratch(nbytes))
        fitting = [buffer for buffer in made if buffer is not None]
        if len(fitting) == count:
            return fitting, nbytes
        # What there was memory for must not take the place of the smaller ones.
        made.clear()
        fitting.clear()
        if nbytes <= _SMALLEST_BYTES:
            return [], 0
        nbytes //= 2
