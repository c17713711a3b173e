"""Fewer bytes on the way: gradients travel in half precision."""

from typing import Any

import tensorflow as tf


class Compressor:
    """Turns a tensor into one that travels, and back. Derive from it for a compression of your own.

    Both methods run on every rank, for each dense gradient, and for the values of sparse ones.
    """

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns what travels, and whatever ``decompress`` must know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        """Returns a tensor of the dtype that ``compress`` was given."""
        raise NotImplementedError


class _NoneCompressor(Compressor):
    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        return tensor


def _cast(tensor: tf.Tensor, dtype: tf.DType) -> tuple[tf.Tensor, Any]:
    wider = tensor.dtype.is_floating and tensor.dtype.size > dtype.size
    return (tf.cast(tensor, dtype) if wider else tensor), tensor.dtype


class _FP16Compressor(Compressor):
    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return _cast(tensor, tf.float16)

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        return tf.cast(tensor, context)


class _BF16Compressor(_FP16Compressor):
    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return _cast(tensor, tf.bfloat16)


class Compression:
    """How gradients travel.

    ``none``: as they are. ``fp16``: as float16, 11 significant bits, from 6e-8 to 65504: gradients
    beyond overflow. ``bf16``: as bfloat16, 8 significant bits and float32's range. Sums are taken
    in float32, so the relative error of an average is at most that of rounding twice: 2**-10 for
    fp16 (above 6e-5), 2**-7 for bf16.
    """

    none = _NoneCompressor
    fp16 = _FP16Compressor
    bf16 = _BF16Compressor
