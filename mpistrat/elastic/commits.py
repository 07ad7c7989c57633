"""A commit as bytes: a header with a checksum, a pickle, and the arrays that the pickle refers to.

The same bytes are kept in memory by the keepers and in files by the chief. Arrays are written without a copy in
between (pickle protocol 5, PEP 574), at multiples of 64 bytes. Local; any thread may call the functions.
"""

import os
import pickle
import struct
import zlib
from dataclasses import dataclass
from typing import Any

_MAGIC = b"mpistrat commit\1"
_HEADER = struct.Struct("<16sIIQ")  # magic, checksum of all that follows, number of parts, bytes in all
_PART = struct.Struct("<QQ")  # start and length of a part; the first part is the pickle
_ALIGNMENT = 64


class DamagedCommitError(Exception):
    """The bytes are not a whole commit."""


@dataclass(frozen=True, order=True)
class CommitId:
    """Which commit: later ones are greater.

    Attributes:
        generation: The generation that has made it, from 1.
        number: How many commits this generation had made with it.
    """

    generation: int
    number: int

    def __str__(self) -> str:
        return f"commit {self.number} of generation {self.generation}"


class Packed:
    """A value that is ready to be written. It refers to the arrays of the value, which must not change until then.

    Args:
        value: Anything that can be pickled.

    Attributes:
        nbytes: The size of the commit.
    """

    def __init__(self, value: object):
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(pickled), *(buffer.raw() for buffer in buffers)]
        start = _HEADER.size + _PART.size * len(parts)
        self._parts: list[tuple[int, memoryview]] = []
        for part in parts:
            start += -start % _ALIGNMENT
            self._parts.append((start, part))
            start += part.nbytes
        self.nbytes = start

    def write(self, memory: memoryview) -> None:
        """Write the commit to the first `nbytes` bytes of `memory`."""
        table = b"".join(_PART.pack(start, part.nbytes) for start, part in self._parts)
        memory[_HEADER.size:_HEADER.size + len(table)] = table
        checksum, end = zlib.crc32(table), _HEADER.size + len(table)
        for start, part in self._parts:
            memory[end:start] = bytes(start - end)
            memory[start:start + part.nbytes] = part
            checksum = zlib.crc32(part, zlib.crc32(bytes(start - end), checksum))
            end = start + part.nbytes
        memory[:_HEADER.size] = _HEADER.pack(_MAGIC, checksum, len(self._parts), self.nbytes)


def read(memory: memoryview) -> Any:
    """Return the value of the commit in `memory`. Its arrays are views of the memory.

    Raises:
        DamagedCommitError: The bytes are not a whole commit.
    """
    if memory.nbytes < _HEADER.size:
        raise DamagedCommitError(f"a commit has at least {_HEADER.size} bytes, here are {memory.nbytes}")
    magic, checksum, count, nbytes = _HEADER.unpack(memory[:_HEADER.size])
    if magic != _MAGIC:
        raise DamagedCommitError(f"a commit does not begin with {bytes(memory[:16])!r}")
    if nbytes > memory.nbytes:
        raise DamagedCommitError(f"the commit has {nbytes} bytes, and {memory.nbytes} of them are here")
    if zlib.crc32(memory[_HEADER.size:nbytes]) != checksum:
        raise DamagedCommitError("its checksum is wrong")
    table = memory[_HEADER.size:_HEADER.size + count * _PART.size]
    pickled, *buffers = (memory[start:start + length] for start, length in _PART.iter_unpack(table))
    return pickle.loads(pickled, buffers=buffers)


def save(packed: Packed, path: str) -> None:
    """Write a commit to a file, which is complete or absent whatever happens meanwhile.

    Raises:
        OSError: The file cannot be written. One that was there before is intact.
    """
    memory = bytearray(packed.nbytes)
    packed.write(memoryview(memory))
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(memory)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
