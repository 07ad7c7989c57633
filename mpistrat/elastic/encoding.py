"""A value as bytes, and the buffers of its arrays. Arrays, numbers, texts, bytes and containers need no pickle. Pure.

The bytes are msgpack, with extensions for what Python and numpy distinguish beyond it. Objects of other classes are
pickled, and so is a whole value that contains itself. An object that is in a value twice is read as two objects, and a
bytearray as bytes.
"""

import pickle
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import msgpack
import numpy as np

from .commit_id import CommitId

_ARRAY, _SCALAR, _TUPLE, _SET, _FROZENSET, _LARGE, _COMPLEX, _COMMIT, _PICKLE = range(9)
_SEQUENCES: dict[type, tuple[int, Callable[[list[Any]], object]]] = {
    tuple: (_TUPLE, tuple), set: (_SET, set), frozenset: (_FROZENSET, frozenset)}


def encode(value: object) -> tuple[bytes, list[memoryview]]:
    """Return the bytes of a value, which refer to its arrays by their place, and the arrays' memory, not copied.

    Raises Exception: An object in it cannot be pickled.
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
    except (ValueError, RecursionError):  # It contains itself, or is nested deeper than msgpack goes.
        return bytes(msgpack.packb(msgpack.ExtType(_PICKLE, pickle.dumps(value, protocol=5)))), []


def decode(data: bytes | memoryview, buffers: Sequence[memoryview]) -> Any:
    """The inverse of `encode`. Arrays are views of the buffers. The bytes must be of a process of this user.

    Raises Exception: The bytes are of something else, or a class of the script is not there.
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
            dtype, content = found
            return np.frombuffer(content, _dtype(dtype))[0]
        if code == _COMPLEX:
            return complex(*found)
        if code == _COMMIT:
            return CommitId(*found)
        return next(make for known, make in _SEQUENCES.values() if known == code)(found)

    return unpack(data)


def _name_of(dtype: "np.dtype[Any]") -> str:
    """A name by which `_dtype` finds a type of numbers or texts; "" if there is none, as for objects and structures."""
    for name in (dtype.str, dtype.name):  # Of bfloat16 and its kind only the second is a name.
        try:
            if not dtype.hasobject and _dtype(name) == dtype:
                return name
        except (TypeError, AttributeError):
            continue
    return ""


def _dtype(name: str) -> "np.dtype[Any]":
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(getattr(import_module("ml_dtypes"), name))
