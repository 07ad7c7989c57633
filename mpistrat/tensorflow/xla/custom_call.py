"""The custom call: a node of a graph that XLA compiles to a call of Python.

The node contains a program, which is text in StableHLO. The program contains the number of the *target*, the Python
object to call. As for python_op.host_call, the target lives as long as the Python object of the graph.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import tensorflow as tf

from ...api.tensors import host_copies_of, this_ranks_gpu
from ...core.errors import EngineError
from ...gpu.arrays import Allocated, GpuArray, GpuStream, GpuTensors
from ..bridge.calls import set_key
from ..bridge.gpu_device import has_gpu
from ..bridge.private_names import stop_recording, xla_call_module
from ..bridge.python_op import Targets, keep_in_graph, keep_thread_state
from ..bridge.tf_errors import described
from . import ffi

if TYPE_CHECKING:
    from ...gpu.device import Device  # It needs cupy.

_NAME = "mpistrat"
_NO_GRADIENT = "MpistratNoGradient"
_STABLEHLO = 9  # the version of the node; with this one TensorFlow takes text
TYPES = {  # Of arguments and results, in StableHLO.
    tf.bool: "i1", tf.int8: "i8", tf.int16: "i16", tf.int32: "i32", tf.int64: "i64", tf.uint8: "ui8",
    tf.uint16: "ui16", tf.uint32: "ui32", tf.uint64: "ui64", tf.float16: "f16", tf.bfloat16: "bf16",
    tf.float32: "f32", tf.float64: "f64", tf.complex64: "complex<f32>", tf.complex128: "complex<f64>",
}


class Target(Protocol):
    """The Python object that a custom call calls. It must not refer to the graph, or neither would be freed."""

    def execute(self, call: ffi.Call) -> None:
        """Called by the compiled code, in any thread. An exception fails the execution of the compiled function."""


def custom_call(target: Target, inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType],
                shapes: Sequence[tf.TensorShape], times_rows: int = 1,
                in_place: Sequence[int] = ()) -> list[tf.Tensor]:
    """Add a node that XLA compiles to a call of `target`, and return its outputs. The node has no gradient.

    Args:
        target: The Python object to call.
        inputs: At least one. Their numbers of dimensions must be known. XLA learns unknown sizes when it compiles.
        dtypes, shapes: Of the results. There is at least one. An unknown size is that of the input with the same index.
        times_rows: An unknown first dimension of a result is that of the input, multiplied by this number.
        in_place: The indices of the results that have the memory of the inputs with the same indices.
    """
    number = _targets.add(target)
    keep_in_graph(target)
    given = [(t.dtype, tuple(t.shape.as_list())) for t in inputs]
    returned = [(dtype, tuple(shape.as_list())) for dtype, shape in zip(dtypes, shapes, strict=True)]
    with stop_recording(), tf.compat.v1.get_default_graph().gradient_override_map({"XlaCallModule": _NO_GRADIENT}):
        outputs: list[tf.Tensor] = list(xla_call_module(
            args=list(inputs), version=_STABLEHLO, module=_program(number, given, returned, times_rows, in_place),
            Sout=[list(shape) for _, shape in returned], Tout=list(dtypes),
            platforms=["CUDA" if has_gpu() else "CPU"]))
    set_key(outputs[0].op, number)
    return outputs


_Tensors = Sequence[tuple[tf.DType, tuple[int | None, ...]]]


def _program(number: int, given: _Tensors, returned: _Tensors, times_rows: int, in_place: Sequence[int]) -> str:
    """Return the program of one call. It fixes the order of dimensions in memory, so that XLA does not choose it.

    If a size is unknown, the shapes of all results are operands too. XLA computes and removes them when it compiles.
    """
    known = all(None not in shape for _, shape in returned)
    shapes = [] if known else [(tf.int32, (len(shape),)) for _, shape in returned]
    lines = [_shape_of_result(i, given, returned[i][1], times_rows) for i in range(len(shapes))]
    operands = ", ".join([*(f"%arg{i}" for i in range(len(given))), *(f"%s{i}" for i in range(len(shapes)))])
    parameters = ", ".join(f"%arg{i}: {_type(*each)}" for i, each in enumerate(given))
    types = ", ".join(_type(*each) for each in returned)
    indices = list(range(len(given), len(given) + len(shapes)))
    where = "" if known else f", indices_of_shape_operands = dense<{indices}> : tensor<{len(shapes)}xi64>"
    results = ", ".join(f"%r#{i}" for i in range(len(returned)))
    same = "" if not in_place else ", output_operand_aliases = [{}]".format(", ".join(
        f"#stablehlo.output_operand_alias<output_tuple_indices = [{index}], operand_index = {index}, "
        "operand_tuple_indices = []>" for index in in_place))
    lines += [
        f"%r:{len(returned)} = stablehlo.custom_call @{_NAME}({operands}) {{api_version = 4 : i32, "
        f"has_side_effect = true, backend_config = {{target = {number} : i64}}, "
        f"operand_layouts = [{_layouts([*given, *shapes])}], result_layouts = [{_layouts(returned)}]{where}{same}}} : "
        f"({', '.join(_type(*each) for each in [*given, *shapes])}) -> ({types})",
        f"return {results} : {types}"]
    body = "\n".join(lines)
    return (f"module @mpistrat attributes {{jax.uses_shape_polymorphism = {'false' if known else 'true'}}} {{\n"
            f"func.func public @main({parameters}) -> ({types}) {{\n{body}\n}}\n}}")


def _shape_of_result(index: int, given: _Tensors, shape: tuple[int | None, ...], times_rows: int) -> str:
    """Return the lines of a program that compute the shape of a result. The shape is named `%s<index>`."""
    name, lines = f"%s{index}", []
    for i, extent in enumerate(shape):
        if extent is not None:
            lines.append(f"{name}e{i} = stablehlo.constant dense<{extent}> : tensor<1xi32>")
            continue
        operand = _type(*given[index])
        lines += [
            f"{name}d{i} = stablehlo.get_dimension_size %arg{index}, dim = {i} : ({operand}) -> tensor<i32>",
            f"{name}t{i} = stablehlo.constant dense<{1 if i else times_rows}> : tensor<i32>",
            f"{name}p{i} = stablehlo.multiply {name}d{i}, {name}t{i} : tensor<i32>",
            f"{name}e{i} = stablehlo.reshape {name}p{i} : (tensor<i32>) -> tensor<1xi32>"]
    extents, types = ", ".join(f"{name}e{i}" for i in range(len(shape))), ", ".join(["tensor<1xi32>"] * len(shape))
    lines.append(f"{name} = stablehlo.concatenate {extents}, dim = 0 : ({types}) -> tensor<{len(shape)}xi32>" if shape
                 else f"{name} = stablehlo.constant dense<> : tensor<0xi32>")
    return "\n".join(lines)


def _type(dtype: tf.DType, shape: tuple[int | None, ...]) -> str:
    return f"tensor<{''.join(('?' if extent is None else str(extent)) + 'x' for extent in shape)}{TYPES[dtype]}>"


def _layouts(tensors: _Tensors) -> str:
    return ", ".join(f"dense<{list(reversed(range(len(shape)))) if shape else ''}> : tensor<{len(shape)}xindex>"
                     for _, shape in tensors)


@tf.RegisterGradient(_NO_GRADIENT)
def _no_gradient(node: tf.Operation, *upstream: tf.Tensor) -> list[None]:
    return [None] * len(node.inputs)


def _execute(call: ffi.Call) -> tuple[str, int] | None:
    keep_thread_state()
    target = _targets.get(call.number)
    try:
        if target is None:
            raise EngineError("a collective cannot run, because the compiled tf.function that contains it was deleted, "
                              "or was traced by another process. Trace the tf.function again in this process.")
        target.execute(call)
    except BaseException as error:
        return described(error)
    return None


_targets = Targets[Target](56, lambda: ffi.register(_NAME, "CUDA" if has_gpu() else "Host", _execute))


# -- memory on a GPU ---------------------------------------------------------------------------------------------------


def place_of(call: ffi.Call) -> "tuple[Device, GpuStream]":
    """Return the GPU of a call, and XLA's stream. Raises the errors of api.tensors.this_ranks_gpu. Patched in tests."""
    device = this_ranks_gpu(call.device_number())
    return device, device.stream_at(call.stream())


class GpuMemory:
    """The arguments and results of one custom call in GPU memory. They are valid until the handler returns.

    XLA calls the handler when it launches the call. Until XLA's stream reaches the call, arguments may be incomplete,
    and earlier work may still use the memory of results. So a collective begins after an event of the stream. When the
    handler returns, XLA may launch later work. By then the stream waits for the collective, or the results are
    complete. (With xla_collective.Started, a later call waits.)
    """

    def __init__(self, call: ffi.Call, given: Sequence[Any], returned: Sequence[Any]):
        self._device, self.stream = place_of(call)
        self.arguments: list[GpuArray] = call.arguments(given, partial(GpuArray, owner=None))
        self.results: list[GpuArray] = call.results(returned, partial(GpuArray, owner=None))

    def is_in_place(self, first: int, count: int) -> bool:
        """Return whether `count` results, from index `first` on, have the memory of the arguments at these indices."""
        return all(self.arguments[index].address == self.results[index].address or not self.results[index].nbytes
                   for index in range(first, first + count))

    def tensors(self, arguments: Sequence[GpuArray], results: Sequence[GpuArray], reads: bool = True) -> GpuTensors:
        """Return some of the arguments in the engine's form, with the memory of their results.

        `reads`: Whether XLA may read the results after this call. If False, a later call waits for them first.
        """
        def allocate(shapes: Sequence[tuple[int, ...]]) -> Allocated:
            made = [result if shape == result.shape else self._other(shape, result.dtype)
                    for shape, result in zip(shapes, results, strict=True)]
            return Allocated([array.address for array in made], made, None)

        tensors = GpuTensors(self._device, [array.address for array in arguments], [array.shape for array in arguments],
                             [array.dtype for array in arguments], None, [self.stream],
                             ([self.stream] if reads else []) if self._device.can_wait(self.stream) else None, allocate)
        tensors.prepare(keeps_shapes=False)
        return tensors

    def _other(self, shape: tuple[int, ...], dtype: np.dtype) -> GpuArray:
        """Return memory for a result of an unexpected shape. The collective needs it; afterwards the call fails."""
        nbytes = math.prod(shape) * dtype.itemsize
        memory = self._device.scratch(max(nbytes, 1))
        if memory is None:
            raise EngineError(f"the GPU has no memory left for a result of {nbytes} bytes")
        return GpuArray(memory.address, shape, dtype, memory.owner)

    def on_host(self, first: int, count: int) -> list[np.ndarray]:
        """Return copies in host memory of the `count` arguments from index `first` on. Waits for XLA's stream."""
        return host_copies_of(self._device).fetched(self.tensors(self.arguments[first:first + count], ()))

    def write_number(self, index: int, number: int) -> None:
        """Write an integer to the result with this index, in XLA's stream. The host does not wait."""
        result = self.results[index]
        with self._device.current():
            self._device.write_number(result.address, number, result.dtype.itemsize // 4, self.stream)

    def write(self, index: int, value: np.ndarray) -> None:
        """Copy `value` from the host to the result with this index. Waits for XLA's stream."""
        with self._device.current():
            tensors = self.tensors((), self.results[index:index + 1])
        host_copies_of(self._device).returned([value], tensors)

