"""Collectives on numpy and cupy arrays, and on tensors of any library that supports DLPack, on CPU or GPU.

The result is a tensor of the same library as the input for numpy, cupy, torch and jax. For numbers, sequences and other
libraries it is a numpy array, or a cupy array if the input is on a GPU.

Every function is collective, and any thread may call it. Calls of different ranks are matched by `name`. Without a
name, a blocking call uses the name of its operation. An asynchronous call without a name uses a counter, so such calls
must come in the same order on all ranks.
"""

import itertools
import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from ..core.errors import InvalidRequestError
from ..core.handle import Handle
from ..core.request import (
    DEVICE_CPU,
    DEVICE_GPU,
    ReduceOp,
    Request,
    allgather_request,
    allreduce_request,
    barrier_request,
    broadcast_request,
    resolve_op,
    specs_of,
)
from . import runtime
from .interop import Tensor, TensorLike, tensor_of

T = TypeVar("T")
_counters: dict[str, itertools.count] = defaultdict(itertools.count)


class AsyncResult(Generic[T]):
    """The pending result of an asynchronous collective. Any thread may use it."""

    def __init__(self, handle: Handle, finish: Callable[[list[Any]], T]):
        self._handle, self._finish = handle, finish

    @property
    def name(self) -> str:
        """The name by which the calls of the ranks are matched."""
        return self._handle.name

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._handle.done()

    def wait(self, timeout_s: float | None = None) -> T:
        """Block until the collective is complete and return its result.

        Raises:
            MismatchError: On every rank, when the ranks disagree; names the tensor, the values and the ranks.
            EngineError: The engine has ended (StallError, ShutdownError).
            TimeoutError: The collective is not complete after `timeout_s`. It goes on; `wait` may be called again.
        """
        return self._finish(self._handle.wait(timeout_s))


def allreduce_async(array: TensorLike, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
                    prescale_factor: float = 1.0, postscale_factor: float = 1.0) -> AsyncResult[Any]:
    """As allreduce, but returns at once. `array` must not change until the collective is complete."""
    return _allreduce([array], average, _auto_name(name, "allreduce"), op, prescale_factor, postscale_factor, _first)


def allreduce(array: TensorLike, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
              prescale_factor: float = 1.0, postscale_factor: float = 1.0) -> Any:
    """Return the reduction of `array` over all ranks. Collective.

    Args:
        array: A number, a sequence, a numpy or cupy array, or a tensor that supports DLPack, of any shape. All ranks
            must pass the same shape and dtype, and all must pass CPU tensors or all GPU tensors.
        average: Deprecated form of `op`: True is Average, False is Sum.
        name: Matches the calls of the ranks.
        op: Average (the default), Sum, Min, Max or Product. Half precision is summed in float32 and rounded once. With
            several ranks on each of several hosts it is rounded twice. NCCL rounds it at every rank. An average of
            integers is truncated toward zero.
        prescale_factor: Multiplies every value before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        A new array, the same bits on every rank.

    Raises:
        InvalidRequestError: On this rank, if `op` is not defined for the dtype.
        DuplicateNameError: On this rank, if a collective with the same name is not complete.
        MismatchError: On every rank, when the ranks disagree; names the tensor, the values and the ranks.
        EngineError: The engine has ended (StallError, ShutdownError).
        NotInitializedError: Before init() or after shutdown().
    """
    return _allreduce([array], average, name or "allreduce", op, prescale_factor, postscale_factor, _first,
                      blocking=True).wait()


def grouped_allreduce_async(arrays: Sequence[TensorLike], average: bool | None = None, name: str | None = None,
                            op: ReduceOp | None = None, prescale_factor: float = 1.0,
                            postscale_factor: float = 1.0) -> AsyncResult[list[Any]]:
    """As grouped_allreduce, but returns at once. The arrays must not change until the collective is complete."""
    return _allreduce(arrays, average, _auto_name(name, "grouped_allreduce"), op, prescale_factor, postscale_factor,
                      list)


def grouped_allreduce(arrays: Sequence[TensorLike], average: bool | None = None, name: str | None = None,
                      op: ReduceOp | None = None, prescale_factor: float = 1.0,
                      postscale_factor: float = 1.0) -> list[Any]:
    """As allreduce, for several arrays in one collective. Their dtypes may differ. `[]` returns `[]`."""
    return _allreduce(arrays, average, name or "grouped_allreduce", op, prescale_factor, postscale_factor, list,
                      blocking=True).wait()


def allgather_async(array: TensorLike, name: str | None = None) -> AsyncResult[Any]:
    """As allgather, but returns at once. `array` must not change until the collective is complete."""
    return _allgather(array, _auto_name(name, "allgather"))


def allgather(array: TensorLike, name: str | None = None) -> Any:
    """Return the arrays of all ranks, concatenated along the first dimension in rank order. Collective.

    It raises the same errors as allreduce.

    Args:
        array: At least one dimension. The first dimension may differ among ranks, and may be 0.
        name: Matches the calls of the ranks.
    """
    return _allgather(array, name or "allgather", blocking=True).wait()


def broadcast_async(array: TensorLike, root_rank: int, name: str | None = None) -> AsyncResult[Any]:
    """As broadcast, but returns at once. `array` must not change until the collective is complete."""
    return _broadcast(array, root_rank, _auto_name(name, "broadcast"))


def broadcast(array: TensorLike, root_rank: int, name: str | None = None) -> Any:
    """Return root_rank's `array` on every rank. Collective; all ranks must pass the same shape and dtype.

    It raises the same errors as allreduce.
    """
    return _broadcast(array, root_rank, name or "broadcast", blocking=True).wait()


def barrier(name: str | None = None) -> None:
    """Wait until every rank has called it. Collective."""
    runtime.current().engine.run(barrier_request(name or "barrier"), []).wait()


def broadcast_object(obj: object = None, root_rank: int = 0, name: str | None = None) -> Any:
    """Return root_rank's `obj` on every rank. Collective. The `obj` of other ranks is ignored.

    The object is sent with pickle. If cloudpickle is installed it is used instead; it also sends functions and classes
    that the script defines.
    """
    name = name or "broadcast_object"
    if runtime.current().topology.rank == root_rank:
        payload = np.frombuffer(_dumps(obj), np.uint8)
        broadcast(np.int64(payload.size), root_rank, f"{name}.size")
        broadcast(payload, root_rank, f"{name}.payload")
        return obj
    size = int(broadcast(np.int64(0), root_rank, f"{name}.size"))
    return pickle.loads(broadcast(np.empty(size, np.uint8), root_rank, f"{name}.payload").tobytes())


def allgather_object(obj: T, name: str | None = None) -> list[T]:
    """Return a list of the objects of all ranks, in rank order. Collective; sends objects as broadcast_object does."""
    name = name or "allgather_object"
    payload = np.frombuffer(_dumps(obj), np.uint8)
    sizes = allgather(np.array([payload.size], np.int64), f"{name}.sizes")
    payloads = allgather(payload, f"{name}.payloads")
    ends = np.cumsum(sizes)
    return [pickle.loads(payloads[end - size:end].tobytes()) for end, size in zip(ends, sizes, strict=True)]


def _allreduce(arrays: Sequence[TensorLike], average: bool | None, name: str, op: ReduceOp | None, prescale: float,
               postscale: float, finish: Callable[[list[Any]], T], blocking: bool = False) -> AsyncResult[T]:
    tensors = [tensor_of(array) for array in arrays]
    request = allreduce_request(name, specs_of([t.array for t in tensors]), resolve_op(op, average), float(prescale),
                                float(postscale), device=_device_of(name, tensors))
    return _submit(request, tensors, finish, blocking)


def _allgather(array: TensorLike, name: str, blocking: bool = False) -> AsyncResult[Any]:
    tensors = [tensor_of(array)]
    request = allgather_request(name, specs_of([t.array for t in tensors]), _device_of(name, tensors))
    return _submit(request, tensors, _first, blocking)


def _broadcast(array: TensorLike, root_rank: int, name: str, blocking: bool = False) -> AsyncResult[Any]:
    tensors = [tensor_of(array)]
    request = broadcast_request(name, specs_of([t.array for t in tensors]), root_rank,
                                runtime.current().topology.size, device=_device_of(name, tensors))
    return _submit(request, tensors, _first, blocking)


def _submit(request: Request, tensors: Sequence[Tensor], finish: Callable[[list[Any]], T],
            blocking: bool) -> AsyncResult[T]:
    engine = runtime.current().engine
    handle = (engine.run if blocking else engine.submit)(request, [t.array for t in tensors])
    return AsyncResult(handle, lambda results: finish([t.restore(r) for t, r in zip(tensors, results, strict=True)]))


def _device_of(name: str, tensors: Sequence[Tensor]) -> str:
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise InvalidRequestError(f"{name}: a group must be on the CPU or on the GPU as a whole. "
                                  f"Received: {[tensor.device for tensor in tensors]}")
    return DEVICE_GPU if DEVICE_GPU in devices else DEVICE_CPU


def _first(arrays: list[Any]) -> Any:
    return arrays[0]


def _auto_name(name: str | None, operation: str) -> str:
    """Return `name`, or else the name of the operation with the next number."""
    return name or f"{operation}.{next(_counters[operation])}"


def _dumps(obj: object) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(obj)
    return bytes(cloudpickle.dumps(obj))
