"""The format of a commit: a header with a checksum, an encoded value (`encode`), and the arrays of the value.

The agents keep a commit in memory, and the chief (rank 0) writes it to a file, in the same format. Arrays are written
without an intermediate copy, at multiples of 64 bytes. A value may contain pickles, and reading a pickle runs code. So
a file is read only if no other user can have written it. All functions are local, and any thread may call them.
"""

import contextlib
import fcntl
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from ..core.ownership import foreign, own_directory


@dataclass(frozen=True, order=True)
class CommitId:
    """The id of a commit. Later commits have greater ids."""

    generation: int  # the one that made the commit, from 1
    number: int  # in its generation, from 1

    def __str__(self) -> str:
        return f"commit {self.number} of generation {self.generation}"


# -- a value as bytes --------------------------------------------------------------------------------------------------
# Arrays, numbers, texts, bytes and containers need no pickle: the bytes are msgpack, with extensions for the types of
# Python and numpy that msgpack lacks. Objects of other classes are pickled, and so is a whole value that contains
# itself. An object that is in a value twice is read as two objects, and a bytearray is read as bytes.

_ARRAY, _SCALAR, _TUPLE, _SET, _FROZENSET, _LARGE, _COMPLEX, _COMMIT, _PICKLE = range(9)
_SEQUENCES: dict[type, tuple[int, Callable[[list[Any]], object]]] = {
    tuple: (_TUPLE, tuple), set: (_SET, set), frozenset: (_FROZENSET, frozenset)}


def encode(value: object) -> tuple[bytes, list[memoryview]]:
    """Return the encoded value, which has an index in place of each array, and the memory of the arrays (not copied).

    Raises Exception: An object in the value cannot be pickled.
    """
    buffers: list[memoryview] = []

    def pack(part: object) -> bytes:
        return bytes(msgpack.packb(part, default=extension, strict_types=True, unicode_errors="surrogatepass"))

    def extension(part: object) -> msgpack.ExtType:
        if type(part) is np.ndarray and (dtype := _name_of(part.dtype)):
            is_turned = part.flags.f_contiguous and not part.flags.c_contiguous
            flat = np.ascontiguousarray(part.T if is_turned else part).reshape(-1)
            buffers.append(flat.view(np.uint8).data)
            return msgpack.ExtType(_ARRAY, pack([dtype, list(part.shape), "F" if is_turned else "C", len(buffers) - 1]))
        if isinstance(part, np.generic) and (dtype := _name_of(part.dtype)):
            return msgpack.ExtType(_SCALAR, pack([dtype, part.tobytes()]))
        if isinstance(part, tuple | set | frozenset) and type(part) in _SEQUENCES:
            return msgpack.ExtType(_SEQUENCES[type(part)][0], pack(list(part)))
        if type(part) is int:  # msgpack has 64 bits.
            return msgpack.ExtType(_LARGE, part.to_bytes(part.bit_length() // 8 + 1, "little", signed=True))
        if type(part) is complex:
            return msgpack.ExtType(_COMPLEX, pack([part.real, part.imag]))
        if type(part) is CommitId:
            return msgpack.ExtType(_COMMIT, pack([part.generation, part.number]))
        return msgpack.ExtType(_PICKLE, pickle.dumps(part, protocol=5))

    try:
        return pack(value), buffers
    except (ValueError, RecursionError):  # The value contains itself, or is nested too deeply for msgpack.
        return bytes(msgpack.packb(msgpack.ExtType(_PICKLE, pickle.dumps(value, protocol=5)))), []


def decode(data: bytes | memoryview, buffers: Sequence[memoryview]) -> Any:
    """Return the value that `encode` has encoded as `data` and `buffers`. Its arrays are views of `buffers`.

    `data` must come from this user, because a pickle in it runs code. Raises Exception: `data` is malformed.
    """
    def unpack(part: bytes | memoryview) -> Any:
        return msgpack.unpackb(part, ext_hook=extension, strict_map_key=False, unicode_errors="surrogatepass")

    def extension(code: int, part: bytes) -> object:
        if code == _LARGE:
            return int.from_bytes(part, "little", signed=True)
        if code == _PICKLE:
            return pickle.loads(part)
        found = unpack(part)
        if code == _ARRAY:
            dtype, shape, order, place = found
            return np.ndarray(shape, _dtype(dtype), buffers[place], order=order)
        if code == _SCALAR:
            return np.frombuffer(found[1], _dtype(found[0]))[0]
        if code == _COMPLEX:
            return complex(*found)
        if code == _COMMIT:
            return CommitId(*found)
        return next(make for known, make in _SEQUENCES.values() if known == code)(found)

    return unpack(data)


def _name_of(dtype: "np.dtype[Any]") -> str:
    """Return a name that the function `_dtype` turns into `dtype`; "" if none, as for structured dtypes and object."""
    for name in (dtype.str, dtype.name):  # For bfloat16 and similar dtypes, only `dtype.name` is such a name.
        with contextlib.suppress(TypeError, AttributeError):
            if not dtype.hasobject and _dtype(name) == dtype:
                return name
    return ""


def _dtype(name: str) -> "np.dtype[Any]":
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(getattr(import_module("ml_dtypes"), name))


# -- commits -----------------------------------------------------------------------------------------------------------

FILE = "commit.mpistrat"  # the name of the file in a directory of commits
_LOCK = "lock"
_MAGIC = b"mpistrat commit\3"
_START = struct.Struct("<16sI")  # magic, checksum of all bytes that follow
_COUNTS = struct.Struct("<IQ")  # number of parts, bytes of the whole commit
_HEADER_BYTES = _START.size + _COUNTS.size
_PART = struct.Struct("<QQ")  # start and length of a part; the first part is the value
_ALIGNMENT = 64
_OTHERS = 0o022  # permissions that other users may not have for a file that is read, and for its directory


class DamagedCommitError(Exception):
    """The bytes are not a whole commit."""


class Packed:
    """A value, encoded as a commit. The arrays are not copied, so they must not change before `write` returns."""

    def __init__(self, value: object):
        encoded, buffers = encode(value)
        parts = [memoryview(encoded), *buffers]
        start = _HEADER_BYTES + _PART.size * len(parts)
        self._parts: list[tuple[int, memoryview]] = []
        for part in parts:
            start += -start % _ALIGNMENT
            self._parts.append((start, part))
            start += part.nbytes
        self.nbytes = start  # The size of the commit.

    def write(self, memory: memoryview) -> None:
        """Write the commit to the start of `memory`, which must have at least `self.nbytes` bytes."""
        table = _COUNTS.pack(len(self._parts), self.nbytes) + b"".join(
            _PART.pack(start, part.nbytes) for start, part in self._parts)
        checksum, end = zlib.crc32(table), _START.size + len(table)
        memory[_START.size:end] = table
        for start, part in self._parts:
            memory[end:start] = bytes(start - end)
            memory[start:start + part.nbytes] = part
            checksum = zlib.crc32(part, zlib.crc32(bytes(start - end), checksum))
            end = start + part.nbytes
        memory[:_START.size] = _START.pack(_MAGIC, checksum)


def read(memory: memoryview) -> Any:
    """Return the value of the commit in `memory`. Its arrays are views of `memory`. Raises DamagedCommitError."""
    if memory.nbytes < _HEADER_BYTES:
        raise DamagedCommitError(f"a commit has at least {_HEADER_BYTES} bytes, but this one has {memory.nbytes}")
    magic, checksum = _START.unpack_from(memory)
    count, nbytes = _COUNTS.unpack_from(memory, _START.size)
    if magic != _MAGIC:
        raise DamagedCommitError(f"a commit begins with {_MAGIC!r}, but this one with {bytes(memory[:16])!r}")
    if nbytes > memory.nbytes:
        raise DamagedCommitError(f"the commit was written with {nbytes} bytes, but has {memory.nbytes}")
    if nbytes < _HEADER_BYTES or zlib.crc32(memory[_START.size:nbytes]) != checksum:
        raise DamagedCommitError("the checksum of the commit is wrong")
    table = memory[_HEADER_BYTES:_HEADER_BYTES + count * _PART.size]
    encoded, *buffers = (memory[start:start + length] for start, length in _PART.iter_unpack(table))
    return decode(encoded, buffers)


def claim(directory: Path) -> tuple[int, str]:
    """Lock a directory for the commits of this job, and delete the partial files that killed jobs have left there.

    Make the directory if it does not exist. Return (descriptor, ""). The lock ends when the descriptor is closed or the
    process ends. If the file system has no locks, delete nothing, and return (descriptor, the reason).

    Raises OSError: Another job holds the lock, the directory cannot be made, or other users can write to it.
    """
    own_directory(directory, 0o700, _OTHERS)
    lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    problem = ""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 1000, 0).decode(errors="replace")
        os.close(lock)
        raise BlockingIOError(f"another job saves its commits in this directory ({holder})") from None
    except OSError as error:
        problem = str(error.strerror)
    os.truncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
    for partial in () if problem else directory.glob(f"{FILE}.*.tmp"):  # Without a lock, another job may write them.
        partial.unlink()
    return lock, problem


def save(packed: Packed, path: str) -> None:
    """Write a commit to a file atomically: the file is never partial. Only this user can read the file.

    Raises OSError: The file cannot be written (an existing file then stays), or others can write to its directory.
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
    """Return the value of the commit in a file. Raises DamagedCommitError: The file is not a whole commit.

    Raises OSError: The file cannot be read, or another user may have written it.
    """
    own_directory(Path(path).parent.resolve(), 0o700, _OTHERS)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        if problem := foreign(os.fstat(file.fileno()), os.geteuid(), _OTHERS):
            raise PermissionError(f"the file {problem}, and may have been written by another user")
        return read(memoryview(file.read()))
