"""The operation `MpistratAsyncCollective`: its kernel calls Python, and any thread may complete the operation later.

Each node of the operation calls one Python object, its *target*. The number of the target is an input tensor, not an
attribute. So TensorFlow calls no Python when it creates or deletes a kernel, and an eager call with a new target needs
no new kernel. The target gets the addresses of inputs and outputs, in GPU memory if the node is on a GPU. On a GPU,
TensorFlow calls a kernel when the work that computes its inputs is enqueued, not when this work is done.

The operation is stateful: TensorFlow neither removes it nor folds it into a constant, and a function ends only when its
stateful operations are complete. If the operation has a resource as an input, automatic control dependencies order it
only with nodes that have the same resource. Other stateful nodes do not wait for it.
"""

import ctypes
import itertools
import threading
from collections.abc import Sequence
from ctypes import c_int, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from ...core.errors import EngineError
from ...core.memory import ALIGNMENT
from ..bridge.calls import set_key
from ..bridge.private_names import SynchronousExecution, apply_op, context, eager_mode, execute_eagerly
from ..bridge.python_op import Targets, keep_in_graph, keep_thread_state
from ..bridge.tf_errors import described
from .c_api import Done, Status, api, is_deleted_by_tensorflow, require_api

NAME = "MpistratAsyncCollective"
_PROBE_S = 10.0
_LEAST_GIVEN = 32 * 1024  # Smaller arrays are copied faster than they are handed over.

_Compute = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_void_p)


# The arrays that TensorFlow holds as outputs, by the key that it passes to _take_back.
_given: dict[int, np.ndarray] = {}
_keys = itertools.count(1)


@ctypes.CFUNCTYPE(None, c_void_p, c_size_t, c_void_p)
def _take_back(data: int, nbytes: int, key: int) -> None:
    keep_thread_state()
    del _given[key]


_take_back_pointer = ctypes.cast(_take_back, c_void_p)


class Dims:
    """A shape in the form of TensorFlow's C API: a C array of int64, and the number of dimensions."""

    __slots__ = ("rank", "shape", "values")

    def __init__(self, shape: tuple[int, ...]):
        self.shape, self.rank = shape, len(shape)
        self.values = (c_int64 * max(len(shape), 1))(*shape)


class Memory(NamedTuple):
    """The addresses and shapes of tensors, the addresses of their results, and objects that keep the results alive."""

    sources: list[int]
    shapes: list[tuple[int, ...]]
    targets: list[int]
    results: list[Any]


class Call:
    """One execution of the kernel. `complete` or `fail` must be called once, in any thread.

    Until then TensorFlow keeps the memory of inputs and outputs. If neither was called when the Call is deleted, the
    execution fails.
    """

    __slots__ = ("_api", "_context", "_done", "_status", "is_ended")

    def __init__(self, of_kernel: int, done: int):
        self._api, self._context, self._done, self._status = require_api(), of_kernel, Done(done), Status()
        self.is_ended = False

    def address(self, index: int) -> int:
        """Return the address of the input with this index."""
        found, own = c_void_p(), self._api
        own.TF_GetInput(self._context, index, found, self._status.pointer)
        if not found:
            self._status.check()
        address: int = own.TF_TensorData(found)
        own.TF_DeleteTensor(found)
        return address

    def exchange(self, first: int, known: "Sequence[Dims | None]",
                 allocates: bool) -> tuple[list[int], list[tuple[int, ...]], list[int]]:
        """Return the addresses and the shapes of inputs, and the addresses of outputs with the same shapes.

        One loop does all of this, because a step has hundreds of tensors. An output may reuse the memory of its input.

        Args:
            first: The index of the first input. The first output has the index 0.
            known: One element for each input: its shape, or None if TensorFlow must be asked for the shape.
            allocates: Whether to allocate the outputs. If False, the addresses of the outputs are [].
        """
        own, context, status = self._api, self._context, self._status.pointer
        get, data, delete, make = (own.TF_GetInput, own.TF_TensorData, own.TF_DeleteTensor,
                                   own.TF_ForwardInputOrAllocateOutput)
        found, instead_of = c_void_p(), (c_int * 1)()
        sources, shapes, targets = [], [], []
        for i, dims in enumerate(known):
            instead_of[0] = first + i
            get(context, first + i, found, status)
            if not found:
                self._status.check()
            if dims is None:
                dims = Dims(tuple([own.TF_Dim(found, j) for j in range(own.TF_NumDims(found))]))
            sources.append(data(found) or 0)
            delete(found)  # The reference; with a second one, the output would not get the memory.
            found.value = None
            shapes.append(dims.shape)
            if allocates:
                made = make(context, instead_of, 1, i, dims.values, dims.rank, None, status)
                if not made:
                    self._status.check()
                targets.append(data(made) or 0)
                delete(made)
        self._status.check()
        return sources, shapes, targets

    def number(self, index: int) -> int:
        """Return the value of the input with this index, an int64 scalar in host memory."""
        return c_int64.from_address(self.address(index)).value

    def output(self, index: int, shape: Sequence[int]) -> int:
        """Allocate an output of this shape; return its address."""
        own, dims = self._api, Dims(tuple(shape))
        made = own.TF_ForwardInputOrAllocateOutput(self._context, (c_int * 1)(), 0, index, dims.values, dims.rank,
                                                   None, self._status.pointer)
        self._status.check()
        address = own.TF_TensorData(made) or 0
        own.TF_DeleteTensor(made)
        return address

    def give(self, index: int, array: np.ndarray, kind: int) -> None:
        """Set the output with this index, in host memory, to a C-contiguous array, which must not change afterwards.

        Large arrays are not copied. `kind`: The number of the dtype in TensorFlow.
        """
        nbytes = array.nbytes
        if nbytes < _LEAST_GIVEN or array.ctypes.data % ALIGNMENT:
            address = self.output(index, array.shape)
            if nbytes:
                ctypes.memmove(address, array.ctypes.data, nbytes)
            return
        own, dims, key = self._api, Dims(array.shape), next(_keys)
        _given[key] = array
        made = own.TF_NewTensor(kind, dims.values, dims.rank, array.ctypes.data, nbytes, _take_back_pointer, key)
        own.TF_SetOutput(self._context, index, made, self._status.pointer)
        own.TF_DeleteTensor(made)
        self._status.check()

    @property
    def iteration(self) -> tuple[int, int]:
        """The id of the loop around the node (0: no loop; new in each outer iteration), and the iteration's number."""
        return self._api.TF_GetFrameId(self._context), self._api.TF_GetIterId(self._context)

    def write_number(self, index: int, value: int) -> None:
        """Set the output with this index, in host memory, to an int64 scalar."""
        c_int64.from_address(self.output(index, ())).value = value

    def complete(self) -> None:
        """Tell TensorFlow that the operation is complete and all outputs are set."""
        self.is_ended = True
        self._done.run()

    def fail(self, message: str, code: int) -> None:
        """Fail the operation, and the execution of its graph. `code` is one of the error codes of tf.errors."""
        self.is_ended = True
        self._status.set(code, message)
        self._api.TF_OpKernelContext_Failure(self._context, self._status.pointer)
        self._done.run()

    def __del__(self) -> None:
        if not self.is_ended:
            self.fail("the thread that waited for the collective was interrupted.", tf.errors.CANCELLED)


class Target(Protocol):
    """A Python object that a node calls. It must not refer to the graph, or neither would ever be freed."""

    def compute(self, call: Call) -> None:
        """Called for each execution of the node, in a TensorFlow thread. Must not block. An exception fails `call`."""


def node(target: Target, tensors: Sequence[tf.Tensor], past: Sequence[tf.Tensor] = (),
         order: Sequence[tf.Tensor] = (), numbers: int = 0) -> list[tf.Tensor]:
    """Add a node to the graph, on the current device. The node calls `target`, which the graph keeps alive.

    Args:
        tensors: At least one. The node's inputs are the id of `target`, and then `past`, `order` and `tensors`.
        past: int64 scalars in host memory, outputs of nodes that must run before this node.
        order: Resources. TensorFlow runs nodes that have a resource in common one after the other.
        numbers: The node has an output of unknown shape for each tensor, and then this many int64 outputs, on the host.
    """
    number = _targets.add(target)
    keep_in_graph(target)
    constant = tf.constant(number, tf.int32)  # A constant int32 on a GPU is in host memory.
    results, scalars = apply_op(NAME, target=constant, past=list(past), order=list(order), tensors=list(tensors),
                                K=numbers)
    set_key(results[0].op, number)
    return [*results, *scalars]


def execute(target: Target, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Execute the operation on the device of the first of the eager `tensors`. Blocks until it is complete."""
    number = _targets.add(target)
    with SynchronousExecution():
        with tf.device("CPU:0"):
            constant = tf.constant(number, tf.int32)
        with tf.device(tensors[0].backing_device):
            kinds = [tensor.dtype.as_datatype_enum for tensor in tensors]
            return list(execute_eagerly(NAME, len(tensors), [constant, *tensors], ("N", 0, "M", 0, "T", kinds, "K", 0),
                                        context()))


@_Compute
def _compute(kernel: int | None, of_kernel: int, done: int) -> None:
    keep_thread_state()
    call = Call(of_kernel, done)
    try:
        target = _targets.get(c_int32.from_address(call.address(0)).value)
        if target is None:
            raise EngineError("a collective cannot run, because its tf.function or graph was deleted, or was created "
                              "by another process. Create the tf.function or graph again in this process.")
        target.compute(call)
    except BaseException as error:
        call.fail(*described(error))


def _register() -> None:
    own, status, name = require_api(), Status(), NAME.encode()
    builder = own.TF_NewOpDefinitionBuilder(name)
    for attribute in (b"N: int >= 0", b"M: int >= 0", b"K: int >= 0", b"T: list(type) >= 1"):
        own.TF_OpDefinitionBuilderAddAttr(builder, attribute)
    for given in (b"target: int32", b"past: N * int64", b"order: M * resource", b"tensors: T"):
        own.TF_OpDefinitionBuilderAddInput(builder, given)
    for returned in (b"results: T", b"numbers: K * int64"):
        own.TF_OpDefinitionBuilderAddOutput(builder, returned)
    own.TF_OpDefinitionBuilderSetIsStateful(builder, True)
    # A function of the library: one of Python's would take Python's lock where TensorFlow has locks of a graph.
    unknown = ctypes.cast(own.TF_ShapeInferenceContextSetUnknownShape, c_void_p)
    own.TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, unknown)
    own.TF_RegisterOpDefinition(builder, status.pointer)
    status.check()
    for device in (b"CPU", b"GPU"):
        kernel = own.TF_NewAsyncKernelBuilder(name, device, None, ctypes.cast(_compute, c_void_p), None)
        for argument in (b"target", b"past", b"order", b"numbers"):
            own.TF_KernelBuilder_HostMemory(kernel, argument)
        own.TF_RegisterKernelBuilder(name, kernel, status.pointer)
        status.check()


_targets = Targets[Target](30, _register)
if api() is not None:
    _targets.prepare()  # A MetaGraph with such nodes can be read in a process that makes none.
tf.no_gradient(NAME)


class _Lending:
    """The Python object that the operation calls for `lent`. `found`: The tensors' addresses and shapes."""

    def __init__(self, count: int, shapes: Sequence[tuple[int, ...]] | None):
        self._count, self._shapes = count, shapes

    def compute(self, call: Call) -> None:
        sources, shapes, targets = call.exchange(1, [None] * self._count, self._shapes is None)
        if self._shapes is not None:
            targets = [call.output(i, shape) for i, shape in enumerate(self._shapes or [(0,)] * self._count)]
        self.found = sources, shapes, targets
        call.complete()


def lent(tensors: Sequence[tf.Tensor], shapes: Sequence[tuple[int, ...]] | None) -> Memory:
    """Create an uninitialised tensor for each of the eager `tensors`, on their device; return the memory of both.

    Does not wait for the GPU. `shapes`: The shapes of the new tensors. None: the shapes of `tensors`. (): the new
    tensors have no elements, because only the addresses of `tensors` are needed.
    """
    target = _Lending(len(tensors), shapes)
    results = execute(target, tensors)
    return Memory(*target.found, results)


class _RoundTrip:
    """The Python object that the test in why_not calls: adds 1 to a float after the kernel has returned."""

    def compute(self, call: Call) -> None:
        (source,), _, (target,) = call.exchange(1, [None], True)

        def go_on() -> None:
            ctypes.c_float.from_address(target).value = ctypes.c_float.from_address(source).value + 1
            call.complete()

        threading.Timer(0.01, go_on).start()


@cache
def why_not() -> str:
    """Return why this process cannot use this module's operation; "" if it can. The first call tests it on the CPU."""
    if api() is None:
        return f"TensorFlow {tf.__version__} lacks the C API for asynchronous operations"
    if is_deleted_by_tensorflow() is None:
        return f"TensorFlow {tf.__version__} passes completion functions of a type that mpistrat does not know"
    results: list[object] = []

    def go() -> None:
        try:
            with eager_mode(), tf.device("CPU:0"):  # A thread is not eager after tf.compat.v1.disable_eager_execution.
                results.extend(float(result) for result in execute(_RoundTrip(), [tf.constant(1.5)]))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=go, name="mpistrat-probe", daemon=True)
    thread.start()
    thread.join(_PROBE_S)
    return "" if results == [2.5] else f"a test of an asynchronous operation returned {results} instead of [2.5]"
