"""The custom call: a node of a graph that XLA compiles to a call of Python.

The program that the node stands for is text, in StableHLO. The program has the number of the call's *target*, a Python
object. As with host_call, the target lives as long as the Python object of the graph.
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
    """The object that a custom call calls. It must not refer to the graph."""

    def execute(self, call: ffi.Call) -> None:
        """Called when compiled code comes to the call, in any thread. An exception becomes the error of the step."""


def custom_call(target: Target, inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType],
                shapes: Sequence[tf.TensorShape], times_rows: int = 1,
                in_place: Sequence[int] = ()) -> list[tf.Tensor]:
    """Make the node, which has no gradient.

    Args:
        target: The object that the node calls.
        inputs: At least one, of known ranks. Dimensions that are not known here are known when XLA compiles.
        dtypes, shapes: Of the results, at least one. Unknown dimensions follow from the input with the same index.
        times_rows: An unknown first dimension is that of the input, times `times_rows`. Others are those of the input.
        in_place: The indices of results that have the memory of the inputs with these indices.
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


def _program(number: int, given: _Tensors, returned: _Tensors, times_rows: int,
             in_place: Sequence[int]) -> str:
    """The program of one call. Without layouts XLA would choose the order of dimensions in memory.

    If there are unknown extents, the shapes of all results are operands too. The compiler computes and removes them.
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
    """The lines that compute the shape of a result, `%s` and its index."""
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
            raise EngineError("a compiled function with a collective was called after its tf.function was deleted, or "
                              "in another process than the one that has traced it. Trace it again in this process.")
        target.execute(call)
    except BaseException as error:
        return described(error)
    return None


_targets = Targets[Target](56, lambda: ffi.register(_NAME, "CUDA" if has_gpu() else "Host", _execute))


# -- memory on a GPU ---------------------------------------------------------------------------------------------------


def place_of(call: ffi.Call) -> "tuple[Device, GpuStream]":
    """The GPU that runs a program, and XLA's stream. Tests replace this. Raises as api.tensors.this_ranks_gpu."""
    device = this_ranks_gpu(call.device_number())
    return device, device.stream_at(call.stream())


class GpuMemory:
    """The arguments and results of one call, with these dtypes of numpy, in GPU memory: until the handler returns.

    XLA calls the handler when it launches the call. The arguments are complete only when XLA's stream reaches the call;
    before, earlier work may still use the memory of a result. So a collective begins after an event of the stream. When
    the handler returns, XLA may launch the work after the call. By then the stream waits for the collective, or the
    results are complete.
    """

    def __init__(self, call: ffi.Call, given: Sequence[Any], returned: Sequence[Any]):
        self._device, self.stream = place_of(call)
        self.arguments: list[GpuArray] = call.arguments(given, partial(GpuArray, owner=None))
        self.results: list[GpuArray] = call.results(returned, partial(GpuArray, owner=None))

    def is_in_place(self, first: int, count: int) -> bool:
        """Whether `count` results from `first` on have the memory of the arguments with these indices."""
        return all(self.arguments[index].address == self.results[index].address or not self.results[index].nbytes
                   for index in range(first, first + count))

    def tensors(self, arguments: Sequence[GpuArray], results: Sequence[GpuArray], reads: bool = True) -> GpuTensors:
        """Return some of the arguments as tensors for the engine, with the memory of their results.

        `reads`: Whether XLA's stream reads the results when the request is complete. If not, it waits for them later.
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
        """Memory for another number of rows than XLA has compiled: the call ends in an error, after the collective."""
        nbytes = math.prod(shape) * dtype.itemsize
        memory = self._device.scratch(max(nbytes, 1))
        if memory is None:
            raise EngineError(f"the GPU has no memory left for a result of {nbytes} bytes")
        return GpuArray(memory.address, shape, dtype, memory.owner)

    def on_host(self, first: int, count: int) -> list[np.ndarray]:
        """Copies of `count` arguments from `first` on. Waits for XLA's stream."""
        return host_copies_of(self._device).fetched(self.tensors(self.arguments[first:first + count], ()))

    def write_number(self, index: int, number: int) -> None:
        """Write an integer to the result with this index, in XLA's stream. The host does not wait."""
        result = self.results[index]
        with self._device.current():
            self._device.write_number(result.address, number, result.dtype.itemsize // 4, self.stream)

    def write(self, index: int, value: np.ndarray) -> None:
        """Copy the result with this index from the host. Waits for XLA's stream."""
        with self._device.current():
            tensors = self.tensors((), self.results[index:index + 1])
        host_copies_of(self._device).returned([value], tensors)

