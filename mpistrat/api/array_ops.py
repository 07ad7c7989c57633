"""Collectives on numpy and cupy arrays, and on tensors of any library that supports DLPack, on CPU or GPU.

The result is a tensor of the input's library, made by the `from_dlpack` of that library. For numbers, sequences,
and libraries without `from_dlpack`, the result is a numpy array, or a cupy array if the input is on a GPU.

Every function with an argument `process_set` is collective over the ranks of that set (default: all ranks). Any thread
may call it. Calls of different ranks with the same `name` are one collective. The default name of a blocking call is
the name of its operation. The default name of an asynchronous call also has a number, therefore all ranks of the set
must make such calls in the same order. The numbers restart after a join().
"""

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Generic, TypeVar

import numpy as np

from ..core.errors import InvalidRequestError
from ..core.handle import Handle
from ..core.request import (
    DEVICE_CPU,
    DEVICE_GPU,
    CollectiveType,
    ReduceOp,
    Request,
    allgather_request,
    allreduce_request,
    alltoall_request,
    barrier_request,
    broadcast_request,
    join_request,
    reducescatter_request,
    scaled_op,
    specs_of,
)
from ..core.rows import even_splits, int32_splits
from ..gpu.arrays import GpuTensors
from . import runtime
from .process_sets import ProcessSet, global_process_set, resolved
from .tensors import Restore, TensorLike, tensors_of

# The names that mpistrat exports; allgather_object and broadcast_object are exported by common.
__all__ = [
    "AsyncResult", "allgather", "allgather_async", "allreduce", "allreduce_async", "alltoall", "alltoall_async",
    "barrier", "broadcast", "broadcast_async", "grouped_allreduce", "grouped_allreduce_async", "grouped_reducescatter",
    "join", "reducescatter", "reducescatter_async",
]

T = TypeVar("T")

_FIRST: Callable[[list[Any]], Any] = itemgetter(0)


class AsyncResult(Generic[T]):
    """The pending result of an asynchronous collective. Any thread may use it."""

    def __init__(self, handle: Handle, restore: Restore, finish: Callable[[list[Any]], T]):
        self._handle, self._restore, self._finish = handle, restore, finish

    @property
    def name(self) -> str:
        """The name of the collective. Calls with the same name on different ranks are one collective."""
        return self._handle.name

    def done(self) -> bool:
        """Return whether the collective is complete or has failed. If so, `wait` does not block."""
        return self._handle.is_done

    def wait(self, timeout_s: float | None = None) -> T:
        """Block until the collective is complete and return its result.

        Raises:
            MismatchError: On every rank, if the ranks' arguments do not match. The text names tensor, values and ranks.
            EngineError: The engine has ended. A subclass, for example StallError or ShutdownError, tells the cause.
            TimeoutError: `timeout_s` seconds have passed. The collective continues, and `wait` may be called again.
        """
        return self._finish(self._restore(self._handle.wait(timeout_s)))


def allreduce_async(array: TensorLike, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
                    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                    process_set: ProcessSet = global_process_set) -> AsyncResult[Any]:
    """Start an allreduce and return at once. `array` must not change until the collective is complete."""
    return _collective([array], _auto_name(name, "allreduce", process_set), process_set, _FIRST,
                       partial(allreduce_request, scaled=scaled_op(op, prescale_factor, postscale_factor, average)))


def allreduce(array: TensorLike, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
              prescale_factor: float = 1.0, postscale_factor: float = 1.0,
              process_set: ProcessSet = global_process_set) -> Any:
    """Return the reduction of `array` over all ranks. Collective.

    Args:
        array: A number, a sequence, a numpy or cupy array, or a tensor that supports DLPack, of any shape. All ranks
            must pass the same shape and dtype. Either all ranks pass CPU tensors, or all ranks pass GPU tensors.
        average: Deprecated form of `op`: True is Average, False is Sum.
        name: Calls with the same name on different ranks are one collective.
        op: Average (the default), Sum, Min, Max, Product or Adasum. Half precision is summed in float32 and rounded
            once, or twice if several hosts have several ranks each. NCCL rounds the partial sum on every rank. An
            average of integers is truncated toward zero.
        prescale_factor: Multiplies every value before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part. An average divides by the number of these ranks.

    Returns:
        A new array with the same bits on every rank.

    Raises:
        InvalidRequestError: On this rank, if `op` is not defined for the dtype, or the rank is not in the process set.
        DuplicateNameError: On this rank, if a collective with the same name is in flight.
        MismatchError: On every rank, if the ranks' arguments do not match. The text names tensor, values and ranks.
        EngineError: The engine has ended. A subclass, for example StallError or ShutdownError, tells the cause.
        NotInitializedError: Before init() or after shutdown().
    """
    return _collective([array], _name(name, "allreduce"), process_set, _FIRST,
                       partial(allreduce_request, scaled=scaled_op(op, prescale_factor, postscale_factor, average)),
                       blocking=True).wait()


def grouped_allreduce_async(arrays: Sequence[TensorLike], average: bool | None = None, name: str | None = None,
                            op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                            process_set: ProcessSet = global_process_set) -> AsyncResult[list[Any]]:
    """Start a grouped_allreduce and return at once. The arrays must not change until the collective is complete."""
    return _collective(arrays, _auto_name(name, "grouped_allreduce", process_set), process_set, list,
                       partial(allreduce_request, scaled=scaled_op(op, prescale_factor, postscale_factor, average)))


def grouped_allreduce(arrays: Sequence[TensorLike], average: bool | None = None, name: str | None = None,
                      op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set) -> list[Any]:
    """Reduce several arrays as one collective; see allreduce. Arrays may have different dtypes. `[]` returns `[]`."""
    return _collective(arrays, _name(name, "grouped_allreduce"), process_set, list,
                       partial(allreduce_request, scaled=scaled_op(op, prescale_factor, postscale_factor, average)),
                       blocking=True).wait()


def allgather_async(array: TensorLike, name: str | None = None,
                    process_set: ProcessSet = global_process_set) -> AsyncResult[Any]:
    """Start an allgather and return at once. `array` must not change until the collective is complete."""
    return _collective([array], _auto_name(name, "allgather", process_set), process_set, _FIRST,
                       partial(allgather_request))


def allgather(array: TensorLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return the arrays of all ranks, concatenated along the first dimension in rank order. Collective.

    allgather raises the same errors as allreduce.

    Args:
        array: An array of one dimension or more. The first dimension may differ among the ranks, and may be 0.
        name: Calls with the same name on different ranks are one collective.
        process_set: The ranks that take part.
    """
    return _collective([array], _name(name, "allgather"), process_set, _FIRST,
                       partial(allgather_request), blocking=True).wait()


def broadcast_async(array: TensorLike, root_rank: int, name: str | None = None,
                    process_set: ProcessSet = global_process_set) -> AsyncResult[Any]:
    """Start a broadcast and return at once. `array` must not change until the collective is complete."""
    return _broadcast(array, root_rank, _auto_name(name, "broadcast", process_set), process_set)


def broadcast(array: TensorLike, root_rank: int, name: str | None = None,
              process_set: ProcessSet = global_process_set) -> Any:
    """Return root_rank's `array` on every rank. Collective; all ranks must pass the same shape and dtype.

    For the errors see allreduce. `root_rank` is always a rank of the job, not an index in `process_set`.
    """
    return _broadcast(array, root_rank, _name(name, "broadcast"), process_set, blocking=True).wait()


def reducescatter_async(array: TensorLike, name: str | None = None, op: ReduceOp | None = None,
                        prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                        process_set: ProcessSet = global_process_set) -> AsyncResult[Any]:
    """Start a reducescatter and return at once. `array` must not change until the collective is complete."""
    return _collective([array], _auto_name(name, "reducescatter", process_set), process_set, _FIRST,
                       partial(reducescatter_request, scaled=scaled_op(op, prescale_factor, postscale_factor)))


def reducescatter(array: TensorLike, name: str | None = None, op: ReduceOp | None = None, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set) -> Any:
    """Return this rank's rows of the reduction of `array` over all ranks. Collective.

    Each rank gets consecutive rows, in rank order. If the rows do not divide evenly, the first ranks get one more row
    each. reducescatter raises the same errors as allreduce.

    Args:
        array: An array of one dimension or more, with the same shape and dtype on all ranks.
        name: Calls with the same name on different ranks are one collective.
        op: Average (the default) or Sum.
        prescale_factor: Multiplies every value before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.
    """
    return _collective([array], _name(name, "reducescatter"), process_set, _FIRST,
                       partial(reducescatter_request, scaled=scaled_op(op, prescale_factor, postscale_factor)),
                       blocking=True).wait()


def grouped_reducescatter(arrays: Sequence[TensorLike], name: str | None = None, op: ReduceOp | None = None,
                          prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                          process_set: ProcessSet = global_process_set) -> list[Any]:
    """Run reducescatter on several arrays as one collective. Arrays may have different dtypes. `[]` returns `[]`."""
    return _collective(arrays, _name(name, "grouped_reducescatter"), process_set, list,
                       partial(reducescatter_request, scaled=scaled_op(op, prescale_factor, postscale_factor)),
                       blocking=True).wait()


def alltoall_async(array: TensorLike, splits: Sequence[int] | np.ndarray | None = None, name: str | None = None,
                   process_set: ProcessSet = global_process_set) -> AsyncResult[Any]:
    """Start an alltoall and return at once. `array` must not change until the collective is complete."""
    return _alltoall(array, splits, _auto_name(name, "alltoall", process_set), process_set)


def alltoall(array: TensorLike, splits: Sequence[int] | np.ndarray | None = None, name: str | None = None,
             process_set: ProcessSet = global_process_set) -> Any:
    """Send rows of `array` to each rank, and return the rows that all ranks have sent to this rank. Collective.

    alltoall raises the same errors as allreduce.

    Args:
        array: An array of one dimension or more. The first dimension may differ among the ranks.
        splits: The number of rows to send to each rank, in rank order. The sum may be less than the number of rows.
            Default: equal numbers; the number of rows must then be divisible by the number of ranks.
        name: Calls with the same name on different ranks are one collective.
        process_set: The ranks that take part.

    Returns:
        The received rows, in the order of the sending ranks. With `splits`, a pair: the rows, and a numpy int32 array
        with the number of rows from each rank.
    """
    return _alltoall(array, splits, _name(name, "alltoall"), process_set, blocking=True).wait()


def barrier(name: str | None = None, process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the set has called barrier(). Collective."""
    name = _name(name, "barrier")
    resolved(process_set).group(name).engine.run(barrier_request(name), []).wait()


def join(process_set: ProcessSet = global_process_set) -> int:
    """Wait until every rank of the set has called join(). Collectives of the other ranks continue without this rank.

    join() is for ranks with different numbers of batches: each rank calls join() after its last batch. Collective.

    - allreduce: this rank contributes nothing, and an average divides by the number of ranks that have submitted a
      tensor. With MPISTRAT_JOIN_AVERAGE=all, an average divides by the number of all ranks, as in Horovod.
    - allgather, allgather_object: the result has nothing from this rank. broadcast, barrier: this rank is not needed.
    - alltoall, reducescatter, a broadcast from this rank, and Min, Max and Product with a prescale factor: the other
      ranks raise MismatchError, because these collectives have no result without this rank.

    This rank does not get the results of these collectives. The rank that joins last has taken part in all collectives.
    So after join(), broadcast the weights with the returned rank as the root.

    Args:
        process_set: The ranks that wait for each other. Collectives of other process sets wait for this rank.

    Returns:
        The rank of the job that joined last. All ranks return the same number.

    Raises:
        DuplicateNameError: Another thread of this rank is already in join().
        EngineError: The engine has ended. A subclass, for example StallError or ShutdownError, tells the cause.
    """
    group = resolved(process_set).group("join")
    # `submit`, not `run`: the ranks vote on operations of `run`, and join() cannot be voted on.
    last, = group.engine.submit(join_request(), []).wait()
    return group.topology.job_ranks[int(last)]


def dumps(obj: object) -> bytes:
    """Return an object as pickled bytes. Functions and classes of the script need cloudpickle, which is optional."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(obj)
    return bytes(cloudpickle.dumps(obj))


def broadcast_object(obj: object = None, root_rank: int = 0, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Any:
    """Return root_rank's `obj` on every rank. Collective. The `obj` of other ranks is ignored.

    The object is pickled by cloudpickle if it is installed, and by pickle otherwise. Only cloudpickle can pickle
    functions and classes that the script defines.
    """
    name = _name(name, "broadcast_object")
    if runtime.current().topology.rank == root_rank:
        payload = np.frombuffer(dumps(obj), np.uint8)
        broadcast(np.int64(payload.size), root_rank, f"{name}.size", process_set)
        broadcast(payload, root_rank, f"{name}.payload", process_set)
        return obj
    size = int(broadcast(np.int64(0), root_rank, f"{name}.size", process_set))
    return pickle.loads(broadcast(np.empty(size, np.uint8), root_rank, f"{name}.payload", process_set).tobytes())


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """Return the `obj` of every rank, as a list in rank order. Collective; pickles objects as broadcast_object does."""
    return exchange(obj, (), _name(name, "allgather_object"), process_set)[0]


def exchange(obj: T, marks: Sequence[int], name: str, process_set: ProcessSet) -> tuple[list[T], list[list[int]]]:
    """Return two lists in rank order: the `obj` of each rank, and the `marks` (integers) of each rank. Collective."""
    payloads, of_ranks = resolved(process_set).group(name).exchange(dumps(obj), name, marks)
    return [pickle.loads(payload) for payload in payloads], of_ranks


def _collective(arrays: Sequence[TensorLike], name: str, process_set: ProcessSet, finish: Callable[[list[Any]], T],
                make_request: "partial[Request]", blocking: bool = False) -> AsyncResult[T]:
    """Make a request for `arrays` with `make_request`, and submit it. `finish` converts the list of results."""
    group, (tensors, restore) = resolved(process_set).group(name), tensors_of(name, arrays)
    if isinstance(tensors, GpuTensors):
        request = group.request_on_gpu(name, tensors, make_request)
        tensors.prepare(request.kind in (CollectiveType.ALLREDUCE, CollectiveType.BROADCAST))
    else:
        request = make_request(name, specs_of(tensors), device=DEVICE_CPU)
    return AsyncResult((group.engine.run if blocking else group.engine.submit)(request, tensors), restore, finish)


def _alltoall(array: TensorLike, splits: Sequence[int] | np.ndarray | None, name: str, process_set: ProcessSet,
              blocking: bool = False) -> AsyncResult[Any]:
    group, (arrays, restore) = resolved(process_set).group(name), tensors_of(name, [array])
    size, shape, on_gpu = group.topology.size, arrays[0].shape, isinstance(arrays, GpuTensors)
    own = int32_splits(name, even_splits(name, shape[0] if shape else 0, size) if splits is None else splits)
    request = alltoall_request(name, (*specs_of(arrays), *specs_of([own])), size, DEVICE_GPU if on_gpu else DEVICE_CPU)
    if isinstance(arrays, GpuTensors):
        arrays.prepare(keeps_shapes=False)
    both: list[Any] = [arrays if on_gpu else arrays[0], own]
    handle = (group.engine.run if blocking else group.engine.submit)(request, both)
    return AsyncResult(handle, lambda results: [*restore(results[:1]), results[1]],
                       _FIRST if splits is None else tuple)


def _broadcast(array: TensorLike, root_rank: int, name: str, process_set: ProcessSet,
               blocking: bool = False) -> AsyncResult[Any]:
    ranks = resolved(process_set).group(name).topology.job_ranks
    return _collective([array], name, process_set, _FIRST,
                       partial(broadcast_request, root_rank=root_rank, ranks=ranks), blocking)


def _auto_name(name: str | None, operation: str, process_set: ProcessSet) -> str:
    """Return `name`. If it is None, return the operation with a number, as "allreduce.3"; see Group.next_number."""
    if name is not None:
        return _name(name, operation)
    return f"{operation}.{resolved(process_set).group(operation).next_number(operation)}"


def _name(name: str | None, operation: str) -> str:
    """Return `name`, or the name of the operation if `name` is None.

    Raises InvalidRequestError: `name` is not a string, or is empty.
    """
    if name is None:
        return operation
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{operation}: name must be None or a string that is not empty. Received: {name!r}")
    return str(name)  # The fingerprint of a request uses repr(), which differs for numpy's strings.
