"""Compression: which dtype a gradient travels in. Any class with the two static methods can take its place."""

from typing import Any

import tensorflow as tf


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
    """The choices: `Compression.none`, `Compression.fp16`, `Compression.bf16`. Sums are made in float32 in any case."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
