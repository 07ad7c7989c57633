"""Compression: the dtype in which gradients are sent. Users may pass any class with the two methods of Compressor."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ..api import array_ops, runtime
from ..api.process_sets import ProcessSet, global_process_set, resolved
from ..core.errors import InvalidRequestError
from ..core.quantised import INT8
from ..core.request import Sum
from .async_op import call_site

logger = logging.getLogger(__name__)

_told: list[str] = []  # The formats for which the warning "has no effect here" was logged.


class Compressor:
    """Interface: converts a tensor before a reduction, and converts the result back."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return the tensor to reduce, and a context for decompress."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        """Return the result of the reduction in the form of the original tensor."""
        raise NotImplementedError


def require_compression(compression: object) -> None:
    """Raise InvalidRequestError unless `compression` is one of Compression, or a class with Compressor's methods."""
    if not (isinstance(compression, type) and hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise InvalidRequestError("compression must be one of Compression, for example hvd.Compression.int8. Received: "
                                  f"{compression!r}")


class NoneCompressor(Compressor):
    """Does not change tensors."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        return tensor


class _CastCompressor(Compressor):
    """Casts wider floating-point tensors to `dtype` and back; does not change other tensors."""

    dtype: tf.DType

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        if tensor.dtype.is_floating and tensor.dtype.size > cls.dtype.size:
            return tf.cast(tensor, cls.dtype), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, context: tf.DType | None) -> tf.Tensor:
        return tensor if context is None else tf.cast(tensor, context)


class FP16Compressor(_CastCompressor):
    """Half the bytes of float32; values above 65504 overflow."""

    dtype = tf.float16


class BF16Compressor(_CastCompressor):
    """Half the bytes of float32, with the range of float32 and 8 bits of precision."""

    dtype = tf.bfloat16


class Int8Compressor(NoneCompressor):
    """A quarter of the bytes of float32 between hosts: 8-bit integers, with one scale for each 256 integers.

    `compress` does not change tensors: the engine converts the values when it sends them.
    """


class _Choices(type):
    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(f"Compression has no attribute {name!r}. Use one of Compression."
                             f"{', '.join(each for each in vars(cls) if isinstance(vars(cls)[each], type))}.")


class Compression(metaclass=_Choices):
    """The compressions to choose from: `Compression.none`, `fp16`, `bf16` and `int8`.

    With fp16 and bf16, CPUs sum in float32, and GPUs sum in the dtype in which gradients are sent.

    int8 compresses only the data between hosts. Each host sums in float32. int8 has an effect only if floating-point
    tensors are all-reduced with Sum or Average, and if the tensors that are reduced together have at least 16 KiB.
    int8 has no effect on one host and on `tf.IndexedSlices`. Error feedback adds the rounding error of a gradient to
    the next gradient of the same variables, and takes up to 4 bytes of host memory for each value.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor

    @staticmethod
    def error_feedback(process_set: ProcessSet = global_process_set) -> dict[str, np.ndarray]:
        """Return the error feedback of int8 from all ranks, for a checkpoint. Collective.

        Call this between two steps. A saved model does not contain the error feedback; a commit of an elastic job does.

        Returns:
            A dict from the names of collectives to flat float32 arrays, the same on all ranks. int8 has no effect on
            one host, so the dict then contains only what the last restore_error_feedback() has set.
        """
        feedback = resolved(process_set).group("error_feedback").feedback
        return {name: array_ops.allreduce(own, op=Sum, name=f"error feedback of {name}", process_set=process_set)
                for name, own in (feedback.own() if feedback is not None else {}).items()}

    @staticmethod
    def restore_error_feedback(errors: Mapping[str, np.ndarray], process_set: ProcessSet = global_process_set) -> None:
        """Set the error feedback to a result of error_feedback(), from a job of any size. Local; call on all ranks."""
        feedback = resolved(process_set).group("restore_error_feedback").feedback
        if feedback is not None:
            feedback.restore(errors)


class Compressed:
    """Dense tensors that are compressed for a reduction.

    `tensors`: The tensors to reduce. `wire_dtype`: The dtype to which the engine converts them when it sends them; ""
    if it does not. TensorFlow casts tensors to fp16 or bf16; on a GPU the engine does this. If the reduction is a
    reduce-scatter (`is_scattered`), TensorFlow casts GPU tensors too, because they are copied to the host.
    """

    def __init__(self, tensors: Sequence[tf.Tensor], compression: type[Compressor], is_scattered: bool = False,
                 process_set: int = 0):
        require_compression(compression)
        self._compression = compression
        self.tensors, self.wire_dtype = list(tensors), ""
        self._contexts: list[Any] | None = None
        if compression is Compression.none:
            return
        if compression is Compression.int8:
            self.wire_dtype = INT8
            topology = runtime.group_of("compression", process_set).topology
            reason = "all ranks run on one host" if len(topology.hosts) == 1 else (
                "this is a reduce-scatter (Compression.bf16 compresses reduce-scatters)" if is_scattered else "")
            if reason and topology.rank == 0 and not _told:
                _told.append(self.wire_dtype)
                logger.warning("mpistrat: Compression.%s has no effect here: it compresses only all-reduces between "
                               "hosts, and %s.", self.wire_dtype, reason)
            return
        is_cast = compression in (Compression.fp16, Compression.bf16)
        is_on_gpu = call_site.are_on_gpu if tf.executing_eagerly() else call_site.device_of
        if is_cast and not is_scattered and is_on_gpu(self.tensors, process_set):
            self.wire_dtype = compression.dtype.name  # type: ignore[attr-defined]
            return
        pairs = [compression.compress(tensor) for tensor in tensors]
        self.tensors, self._contexts = [tensor for tensor, _ in pairs], [context for _, context in pairs]

    def restored(self, reduced: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the reduced tensors, decompressed."""
        if self._contexts is None:
            return list(reduced)
        return [self._compression.decompress(tensor, context)
                for tensor, context in zip(reduced, self._contexts, strict=True)]
