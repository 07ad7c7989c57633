"""Shared memory and channels as the ranks of a host have it, for ranks that are threads of one process."""

import os
from collections.abc import Sequence

from mpistrat.core.interfaces import DataPlane
from mpistrat.transport.host_link import HostFile
from mpistrat.transport.shm.segment import HostMemory
from mpistrat.transport.shm.shm_data import SharedMemoryData
from mpistrat.transport.unix_socket import ChannelSockets, UnixSocketChannel


def host_files(count: int) -> list[HostFile]:
    """One anonymous file, as each of `count` ranks has it."""
    descriptor = os.memfd_create("mpistrat-test")
    try:
        return [HostFile(os.dup(descriptor)) for _ in range(count)]
    finally:
        os.close(descriptor)


def channels_of(ranks: Sequence[int]) -> list[UnixSocketChannel]:
    """The channel of each of `ranks`, all those of a host. Each has descriptors of its own, as processes have."""
    made = ChannelSockets.make(ranks)
    try:
        return [UnixSocketChannel(rank, ChannelSockets(made[rank].inbox, {r: s.dup() for r,
                                                                          s in made[rank].outboxes.items()}))
                for rank in ranks]
    finally:
        for outbox in made[ranks[0]].outboxes.values():
            outbox.close()


def host_memories(ranks: list[int], data_bytes: int, limit_s: float) -> list[HostMemory]:
    """What each of `ranks`, all those of a host, has of one file."""
    nbytes = HostMemory.size_for(len(ranks), data_bytes)
    found = []
    for index, file in enumerate(host_files(len(ranks))):
        found.append(HostMemory(file.map(nbytes), index, ranks, limit_s))
        file.close()
    return found


def shared_memory_planes(ranks: list[int], chunks: Sequence[int], others: list[DataPlane],
                         limit_s: float) -> list[SharedMemoryData]:
    """The data plane of each of `ranks`, all those of a host; what it passes on is served by `others`."""
    memories = host_memories(ranks, SharedMemoryData.memory_bytes(len(ranks), chunks[-1]), limit_s)
    return [SharedMemoryData(memory, chunks, other) for memory, other in zip(memories, others, strict=True)]
