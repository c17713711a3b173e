"""Compression: gradients are sent in half precision."""

from typing import Any

import tensorflow as tf


class Compressor:
    """Turns a tensor into one that is sent, and back. Derive your own compression from it.

    Both methods run on every rank, for each dense gradient, and for the values of sparse ones.
    """

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns the tensor to send, and a context for ``decompress``."""
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
    """How gradients are sent.

    ``none``: unchanged. ``fp16``: as float16, 11 significant bits, from 6e-8 to 65504: gradients
    beyond overflow to infinity, on all ranks. ``bf16``: as bfloat16, 8 significant bits and
    float32's range. float16, bfloat16 and integers are sent unchanged.

    Values are rounded twice: before each rank sends its own, and in the result. So an average errs
    by at most 2**-11 (fp16) or 2**-8 (bf16) of the mean magnitude of the ranks' values, and as much
    of the average: where the ranks' signs agree, 2**-10 or 2**-7 of it. Below float16's least
    normal number, 6.1e-5, each rounding errs by at most 2**-25 (3e-8). The sum is computed in
    float32. Between hosts, each host's sum is rounded once more before it is sent (with
    ``HVD_ALLREDUCE=ring`` once for every host).
    """

    none = _NoneCompressor
    fp16 = _FP16Compressor
    bf16 = _BF16Compressor


def wire_dtype(compression: type[Compressor]) -> tf.DType | None:
    """The dtype in which the core sends wider ones; None for the user's own compressors."""
    wires = {
        Compression.none: tf.float64,  # unchanged: no dtype is wider
        Compression.fp16: tf.float16,
        Compression.bf16: tf.bfloat16,
    }
    return wires.get(compression)
