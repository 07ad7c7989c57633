"""Which way GPU tensors go: settled by all ranks over MPI, from what each of them has found.

A rank that fails alone would leave the others waiting, so every rank says what it has found, also if that is an
exception.
"""

import logging
import os
import pickle
from typing import Any

import numpy as np

from ..core.interfaces import DataPlane
from ..core.settings import Settings
from .arrays import GpuArray
from .nccl.communicators import Exchange, make_communicators
from .nccl.data import NcclData
from .pipeline import BUFFERS
from .selection import GpuInfo, why_not_nccl

logger = logging.getLogger(__name__)

# Alignment padding of a fusion buffer, for up to 4,096 tensors.
_PADDING_BYTES = 64 * 1024
_SMALLEST_BYTES = 2**20


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


def connect(device: Any, rank: int, size: int, exchange: Exchange, host: DataPlane,
            settings: Settings) -> tuple[NcclData | None, int]:
    """Find out whether NCCL serves, and connect. Collective. Says which way tensors go, on rank 0.

    Args:
        device: This rank's GPU.
        rank: This rank.
        size: How many ranks there are.
        exchange: Among the same ranks.
        host: Reduces CPU tensors of the same ranks, and staged ones.
        settings: The same on all ranks.

    Returns:
        NCCL's plane, or None where all tensors are staged; and how many bytes are fused.

    Raises:
        EngineError: On all ranks. What is wanted cannot serve, or NCCL fails to connect; names the ranks.
    """
    found, buffers, own_ids = _probe(device, rank == 0, settings)
    told = exchange((found, own_ids))
    ranks = [other for other, _ in told]
    reason = why_not_nccl(ranks, settings.gpu_operations)
    if reason:
        is_expected = not any(other.problem or (other.nccl and not other.buffer_bytes) for other in ranks)
        _say(rank, logging.INFO if is_expected else logging.WARNING,
             f"GPU tensors are staged through host memory and reduced by {host.in_use}: {reason}")
        return None, settings.fusion_bytes
    nbytes = min(other.buffer_bytes for other in ranks)
    fusion_bytes = _fused(rank, nbytes, settings)
    communicators = make_communicators(
        lambda: [device.communicator(size, unique_id, rank) for unique_id in told[0][1]], device, exchange,
        settings.limit_s)
    of_lanes = [buffers[i:i + BUFFERS] for i in range(0, len(buffers), BUFFERS)]
    _say(rank, logging.INFO, f"GPU tensors are reduced by NCCL (version code {found.nccl})")
    return NcclData(device, rank, communicators, of_lanes, nbytes), fusion_bytes


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


def _probe(device: Any, makes_ids: bool, settings: Settings) -> tuple[GpuInfo, list[GpuArray], list[Any]]:
    """What this rank has, its fusion buffers, and the ids of communicators if it makes them. Does not raise."""
    lanes, may_share = settings.nccl_streams, os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if settings.gpu_operations == "staged":
        return GpuInfo(device.identity, 0, 0, may_share), [], []
    try:
        version = device.nccl_version()
        buffers, nbytes = fusion_buffers(device, settings.fusion_bytes, BUFFERS * lanes) if version else ([], 0)
        ids = [device.unique_id() for _ in range(lanes)] if version and makes_ids else []
    except Exception as error:  # Told to the others, which wait for this rank's word; all ranks then act on it.
        return GpuInfo(device.identity, 0, 0, may_share, f"{type(error).__name__}: {error}"), [], []
    return GpuInfo(device.identity, version, nbytes, may_share), buffers, ids


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
