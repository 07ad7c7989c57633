"""Door C: collectives on numpy and cupy arrays, and on tensors of any library that speaks DLPack, on CPU or GPU.

The result is of the kind of the input: numpy's for numbers, sequences and tensors of unknown libraries on the CPU,
cupy's for those on a GPU, and otherwise that of numpy, cupy, torch or jax.

Every function is collective. Calls of different ranks meet by `name`. Without a name a blocking call uses the name of
its operation, and an asynchronous one a number counted up in the order of calls, which must then be the same on all
ranks.
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
from .interop import Tensor, tensor_of

T = TypeVar("T")
_counters: dict[str, itertools.count] = defaultdict(itertools.count)


class AsyncResult(Generic[T]):
    """The pending result of an asynchronous collective."""

    def __init__(self, handle: Handle, finish: Callable[[list[Any]], T]):
        self._handle, self._finish = handle, finish

    @property
    def name(self) -> str:
        """The name by which the ranks meet."""
        return self._handle.name

    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._handle.done()

    def wait(self, timeout_s: float | None = None) -> T:
        """Block until the collective is complete and return its result.

        Raises:
            MismatchError: On every rank, when the ranks disagree; names the tensor, the values and the ranks.
            EngineError: The engine has ended (StallError, ShutdownError).
            TimeoutError: Not complete after `timeout_s`.
        """
        return self._finish(self._handle.wait(timeout_s))


def allreduce_async(array: Any, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
                    prescale_factor: float = 1.0, postscale_factor: float = 1.0) -> AsyncResult[Any]:
    """As allreduce, but returns at once. `array` must stay unchanged until the result is there."""
    return _allreduce([array], average, _number(name, "allreduce"), op, prescale_factor, postscale_factor, _only)


def allreduce(array: Any, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
              prescale_factor: float = 1.0, postscale_factor: float = 1.0) -> Any:
    """Return the reduction of `array` over all ranks. Collective.

    Args:
        array: A number, a sequence, a numpy or cupy array, or a tensor that speaks DLPack; any shape; the same shape
            and dtype on all ranks, and on the CPU or on a GPU on all of them.
        average: Deprecated form of `op`: True is Average, False is Sum.
        name: By which the ranks meet.
        op: Average (the default), Sum, Min, Max or Product. Half precision is summed in float32 and rounded once
            (twice where hosts of several ranks exchange sums, at every rank by NCCL); an average of integers is
            truncated toward zero.
        prescale_factor: Multiplies every value before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        A new array, the same bits on every rank.

    Raises:
        InvalidRequestError: On this rank, for a dtype that `op` has no meaning for, or a name in flight.
        MismatchError: On every rank, when the ranks disagree; names the tensor, the values and the ranks.
        EngineError: The engine has ended (StallError, ShutdownError).
        NotInitializedError: Before init() or after shutdown().
    """
    return _allreduce([array], average, name or "allreduce", op, prescale_factor, postscale_factor, _only,
                      blocking=True).wait()


def grouped_allreduce_async(arrays: Sequence[Any], average: bool | None = None, name: str | None = None,
                            op: ReduceOp | None = None, prescale_factor: float = 1.0,
                            postscale_factor: float = 1.0) -> AsyncResult[list[Any]]:
    """As grouped_allreduce, but returns at once. The arrays must stay unchanged until the result is there."""
    return _allreduce(arrays, average, _number(name, "grouped_allreduce"), op, prescale_factor, postscale_factor, list)


def grouped_allreduce(arrays: Sequence[Any], average: bool | None = None, name: str | None = None,
                      op: ReduceOp | None = None, prescale_factor: float = 1.0,
                      postscale_factor: float = 1.0) -> list[Any]:
    """As allreduce, for several arrays that are reduced together; their dtypes may differ. `[]` gives `[]`."""
    return _allreduce(arrays, average, name or "grouped_allreduce", op, prescale_factor, postscale_factor, list,
                      blocking=True).wait()


def allgather_async(array: Any, name: str | None = None) -> AsyncResult[Any]:
    """As allgather, but returns at once. `array` must stay unchanged until the result is there."""
    return _allgather(array, _number(name, "allgather"))


def allgather(array: Any, name: str | None = None) -> Any:
    """Return the ranks' arrays joined along the first dimension, in the order of the ranks. Collective.

    Args:
        array: At least one dimension; the first may differ among ranks, and be 0.
        name: By which the ranks meet.

    Raises:
        As allreduce.
    """
    return _allgather(array, name or "allgather", blocking=True).wait()


def broadcast_async(array: Any, root_rank: int, name: str | None = None) -> AsyncResult[Any]:
    """As broadcast, but returns at once. `array` must stay unchanged until the result is there."""
    return _broadcast(array, root_rank, _number(name, "broadcast"))


def broadcast(array: Any, root_rank: int, name: str | None = None) -> Any:
    """Return root_rank's `array` on every rank. Collective; shape and dtype are the same on all ranks.

    Raises:
        As allreduce.
    """
    return _broadcast(array, root_rank, name or "broadcast", blocking=True).wait()


def barrier(name: str | None = None) -> None:
    """Return when every rank has called it. Collective."""
    runtime.current().engine.run(barrier_request(name or "barrier"), []).wait()


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """Return root_rank's `obj`, pickled there and unpickled here. Collective; `obj` of other ranks is not looked at.

    cloudpickle is used where it is installed, so that functions and classes of the script travel too.
    """
    name = name or "broadcast_object"
    if runtime.current().topology.rank == root_rank:
        payload = np.frombuffer(_dumps(obj), np.uint8)
        broadcast(np.int64(payload.size), root_rank, f"{name}.size")
        broadcast(payload, root_rank, f"{name}.payload")
        return obj
    size = int(broadcast(np.int64(0), root_rank, f"{name}.size"))
    return pickle.loads(broadcast(np.empty(size, np.uint8), root_rank, f"{name}.payload").tobytes())


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the ranks' objects as a list, in the order of the ranks. Collective; pickles as broadcast_object."""
    name = name or "allgather_object"
    payload = np.frombuffer(_dumps(obj), np.uint8)
    sizes = allgather(np.array([payload.size], np.int64), f"{name}.sizes")
    payloads = allgather(payload, f"{name}.payloads")
    ends = np.cumsum(sizes)
    return [pickle.loads(payloads[end - size:end].tobytes()) for end, size in zip(ends, sizes, strict=True)]


def _allreduce(arrays: Sequence[Any], average: bool | None, name: str, op: ReduceOp | None, prescale: float,
               postscale: float, finish: Callable[[list[Any]], T], blocking: bool = False) -> AsyncResult[T]:
    tensors = [tensor_of(array) for array in arrays]
    request = allreduce_request(name, specs_of([t.array for t in tensors]), resolve_op(op, average), float(prescale),
                                float(postscale), device=_device_of(name, tensors))
    return _submit(request, tensors, finish, blocking)


def _allgather(array: Any, name: str, blocking: bool = False) -> AsyncResult[Any]:
    tensors = [tensor_of(array)]
    request = allgather_request(name, specs_of([t.array for t in tensors]), _device_of(name, tensors))
    return _submit(request, tensors, _only, blocking)


def _broadcast(array: Any, root_rank: int, name: str, blocking: bool = False) -> AsyncResult[Any]:
    tensors = [tensor_of(array)]
    request = broadcast_request(name, specs_of([t.array for t in tensors]), root_rank,
                                runtime.current().topology.size, device=_device_of(name, tensors))
    return _submit(request, tensors, _only, blocking)


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


def _only(arrays: list[Any]) -> Any:
    return arrays[0]


def _number(name: str | None, operation: str) -> str:
    return name or f"{operation}.{next(_counters[operation])}"


def _dumps(obj: Any) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(obj)
    return bytes(cloudpickle.dumps(obj))
