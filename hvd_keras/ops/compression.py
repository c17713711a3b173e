"""Compression: sends gradients in half precision."""

from typing import Any

import tensorflow as tf


class Compressor:
    """Converts a tensor into the one that is sent, and back. Base class for your own compression.

    Both methods run on every rank, for each dense gradient and for the values of sparse gradients.
    """

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return the tensor to send, of the same shape, and a context for ``decompress``."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        """Return a tensor of the dtype that ``compress`` has received."""
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
    """The choices for the argument ``compression``.

    - ``none``: gradients are sent unchanged.
    - ``fp16``: sent as float16, with 11 significant bits and a range from 6e-8 to 65504. Larger
      gradients become infinite, on all ranks.
    - ``bf16``: sent as bfloat16, with 8 significant bits and float32's range.

    float16, bfloat16 and integers are sent unchanged. Sums are computed in float32.

    Values are rounded twice: before a rank sends them, and in the result. So the error of an
    average is at most 2**-11 (fp16) or 2**-8 (bf16) of the mean magnitude of the ranks' values,
    plus the same fraction of the average itself: 2**-10 or 2**-7 of it in total, if the ranks'
    signs agree. Below float16's smallest normal number, 6.1e-5, each rounding error is at most
    2**-25 (3e-8). Between hosts, each host's sum is rounded once more before it is sent (from
    32 hosts on twice).
    """

    none = _NoneCompressor
    fp16 = _FP16Compressor
    bf16 = _BF16Compressor


def wire_dtype(compression: type[Compressor]) -> tf.DType | None:
    """Return the dtype to which the core rounds wider ones; None for the user's own compressors."""
    wires = {
        Compression.none: tf.float64,  # no dtype is wider, so nothing is rounded
        Compression.fp16: tf.float16,
        Compression.bf16: tf.bfloat16,
    }
    return wires.get(compression)
