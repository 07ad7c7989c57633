"""Shared memory and channels as the ranks of a host have it, for ranks that are threads of one process."""

import os
from collections.abc import Sequence

from mpistrat.core.interfaces import DataPlane
from mpistrat.transport.pipes import PipeChannel
from mpistrat.transport.shm.data import SharedMemoryData
from mpistrat.transport.shm.memfd import map_file
from mpistrat.transport.shm.segment import HostMemory


def channels_of(ranks: Sequence[int]) -> list[PipeChannel]:
    """The channel of each of `ranks`, all those of a host."""
    channels = {rank: PipeChannel(rank) for rank in ranks}
    for rank, channel in channels.items():
        channel.connect({other: channels[other].inbox for other in ranks if other != rank})
    return list(channels.values())


def host_memories(ranks: list[int], data_bytes: int, limit_s: float) -> list[HostMemory]:
    """What each of `ranks`, all those of a host, has of one file."""
    nbytes = HostMemory.size_for(len(ranks), data_bytes)
    file = os.memfd_create("mpistrat-test")
    try:
        return [HostMemory(map_file(file, nbytes), index, ranks, limit_s) for index in range(len(ranks))]
    finally:
        os.close(file)


def shared_memory_planes(ranks: list[int], chunk: int, others: list[DataPlane],
                         limit_s: float) -> list[SharedMemoryData]:
    """The data plane of each of `ranks`, all those of a host; what it passes on is served by `others`."""
    memories = host_memories(ranks, SharedMemoryData.memory_bytes(len(ranks), chunk), limit_s)
    return [SharedMemoryData(memory, chunk, other) for memory, other in zip(memories, others, strict=True)]
