"""Compression: which dtype a gradient travels in. Any class with the two static methods can take its place."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from .bridge import gpu_eager, gpu_graph


class Compressor:
    """Interface: how a tensor is changed before a reduction and changed back after it."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """The tensor to reduce, and what decompress needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        """The reverse."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        return tensor


class _CastCompressor(Compressor):
    """Casts wider floating-point tensors to `dtype` and back; leaves all others as they are."""

    dtype: tf.DType

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        if tensor.dtype.is_floating and tensor.dtype.size > cls.dtype.size:
            return tf.cast(tensor, cls.dtype), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        return tensor if context is None else tf.cast(tensor, context)


class FP16Compressor(_CastCompressor):
    """Half the bytes of float32; values above 65504 overflow."""

    dtype = tf.float16


class BF16Compressor(_CastCompressor):
    """Half the bytes of float32, with its range and 8 bits of precision."""

    dtype = tf.bfloat16


class Compression:
    """The choices: `Compression.none`, `Compression.fp16`, `Compression.bf16`.

    On the CPU sums are made in float32 in any case, and on a GPU in the dtype in which gradients travel.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


class Compressed:
    """Dense tensors on their way through one of Compression, or a class in its place.

    Those on a GPU are not cast in the graph: the kernel that packs them into a fusion buffer does it on the way.

    Attributes:
        tensors: What to reduce.
        wire: As in Request.
    """

    def __init__(self, tensors: Sequence[tf.Tensor], compression: Any):
        self._compression = compression
        self.tensors, self.wire = list(tensors), ""
        self._contexts: list[Any] | None = None
        is_cast = compression in (Compression.fp16, Compression.bf16)
        if is_cast and (gpu_eager.are_on_gpu if tf.executing_eagerly() else gpu_graph.device_of)(self.tensors):
            self.wire = compression.dtype.name
            return
        pairs = [compression.compress(tensor) for tensor in tensors]
        self.tensors, self._contexts = [tensor for tensor, _ in pairs], [context for _, context in pairs]

    def restored(self, reduced: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """What has become of the tensors, in their own dtypes."""
        if self._contexts is None:
            return list(reduced)
        return [self._compression.decompress(tensor, context)
                for tensor, context in zip(reduced, self._contexts, strict=True)]
