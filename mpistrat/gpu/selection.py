"""Decides whether to use NCCL, from what each rank has found. Pure: all ranks decide alike."""

from collections.abc import Sequence
from typing import NamedTuple

from ..core.errors import EngineError
from ..core.install import pip_extra
from ..core.topology import rank_list

# The first version code of NCCL that allows ranks to share a GPU, with NCCL_MULTI_RANK_GPU_ENABLE=1.
SHARES_GPUS = 23000


class GpuInfo(NamedTuple):
    """What a rank sends to the others before the first collective on GPU tensors."""

    gpu: str  # An identifier of its GPU, unique among all hosts.
    nccl: int  # NCCL's version code; 0: NCCL is missing.
    buffer_bytes: int  # The size of the fusion buffers that it could allocate; 0: it could not.
    may_share: bool  # Whether its environment allows ranks to share a GPU.
    is_free: bool = True  # Whether no other group of its ranks uses NCCL on its GPU.
    problem: str = ""  # The error while it gathered this; "" if none.


def why_not_nccl(ranks: Sequence[GpuInfo], wanted: str) -> str:
    """The reason not to use NCCL; "" to use it.

    Args:
        ranks: The GpuInfo of each rank.
        wanted: The setting gpu_operations.

    Raises:
        EngineError: The setting demands NCCL, and it cannot be used.
    """
    if wanted == "staged":
        return f"MPISTRAT_GPU_OPERATIONS={wanted}"
    reason = _obstacle(ranks)
    if reason and wanted != "auto":
        raise EngineError(f"MPISTRAT_GPU_OPERATIONS={wanted}: {reason}")
    taken = [rank for rank, found in enumerate(ranks) if not found.is_free]
    if taken and not reason and wanted == "auto":
        reason = (f"ranks {rank_list(taken)} of this process set use NCCL in another one, and NCCL may wait for ever "
                  "where ranks start the collectives of two sets in different orders. MPISTRAT_GPU_OPERATIONS=nccl "
                  "uses it in both, for scripts that wait for one set before they call the other")
    return reason


def _obstacle(ranks: Sequence[GpuInfo]) -> str:
    troubled = [f"rank {rank}: {found.problem}" for rank, found in enumerate(ranks) if found.problem]
    if troubled:
        return f"NCCL cannot be used ({'; '.join(troubled)})"
    lacking = [rank for rank, found in enumerate(ranks) if not found.nccl]
    if lacking:
        return f"ranks {rank_list(lacking)} have no NCCL ({pip_extra('gpu')})"
    versions = sorted({found.nccl for found in ranks})
    if len(versions) > 1:
        return f"the ranks have different versions of NCCL: {', '.join(map(str, versions))}"
    users: dict[str, list[int]] = {}
    for rank, found in enumerate(ranks):
        users.setdefault(found.gpu, []).append(rank)
    shared = [together for together in users.values() if len(together) > 1]
    if shared and not (versions[0] >= SHARES_GPUS and all(found.may_share for found in ranks)):
        return (f"ranks {rank_list(shared[0])} share a GPU, which NCCL allows from 2.30 on, with "
                "NCCL_MULTI_RANK_GPU_ENABLE=1")
    starved = [rank for rank, found in enumerate(ranks) if not found.buffer_bytes]
    if starved:
        return f"the GPUs of ranks {rank_list(starved)} have no memory left for fusion buffers"
    return ""
