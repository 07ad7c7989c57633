"""A commit as bytes: a header with a checksum, a value (encoding.py), and the arrays that the value refers to.

The same bytes are kept in memory by the keepers and in files by the chief. Arrays are written without a copy in
between, at multiples of 64 bytes. A value may have pickles of the script's own objects, so a file is read only if no
other user can have written it. Local; any thread may call the functions.
"""

import contextlib
import os
import struct
import zlib
from pathlib import Path
from typing import Any

from ..core.ownership import foreign, own_directory
from .commit_id import CommitId as CommitId
from .encoding import decode, encode

_MAGIC = b"mpistrat commit\2"
_HEADER = struct.Struct("<16sIIQ")  # magic, checksum of all that follows, number of parts, bytes in all
_PART = struct.Struct("<QQ")  # start and length of a part; the first part is the value
_ALIGNMENT = 64
_OTHERS = 0o022  # permissions that nobody else may have for a file that is read, and its directory


class DamagedCommitError(Exception):
    """The bytes are not a whole commit."""


class Packed:
    """A value that is ready to be written. It refers to the arrays of the value, which must not change until then.

    `value`: Anything that can be encoded.
    """

    def __init__(self, value: object):
        encoded, buffers = encode(value)
        parts = [memoryview(encoded), *buffers]
        start = _HEADER.size + _PART.size * len(parts)
        self._parts: list[tuple[int, memoryview]] = []
        for part in parts:
            start += -start % _ALIGNMENT
            self._parts.append((start, part))
            start += part.nbytes
        self.nbytes = start  # The size of the commit.

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

    Raises DamagedCommitError: The bytes are not a whole commit.
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
    encoded, *buffers = (memory[start:start + length] for start, length in _PART.iter_unpack(table))
    return decode(encoded, buffers)


def save(packed: Packed, path: str) -> None:
    """Write a commit to a file, which is complete or absent whatever happens meanwhile. Only this user can read it.

    Raises OSError: The file cannot be written, or others can write to its directory. A file that was there is intact.
    """
    own_directory(Path(path).parent.resolve(), 0o700, _OTHERS)
    memory = bytearray(packed.nbytes)
    packed.write(memoryview(memory))
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(memory)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def load(path: str) -> Any:
    """Return the value of the commit in a file.

    Raises:
        OSError: It cannot be read, or may have been written by another user.
        DamagedCommitError: It is no whole commit.
    """
    own_directory(Path(path).parent.resolve(), 0o700, _OTHERS)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        if problem := foreign(os.fstat(file.fileno()), os.geteuid(), _OTHERS):
            raise PermissionError(f"it {problem}, and may have been written by another user")
        return read(memoryview(file.read()))
