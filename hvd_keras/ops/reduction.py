"""Which dtypes a reduction allows, and in which precision tensors are sent."""

from typing import Any

import tensorflow as tf

from hvd_keras.runtime.reductions import Adasum, Average, Max, Min, ReduceOp, Sum


def check_reducible(
    kind: str, tensor: Any, op: ReduceOp, prescale: float, postscale: float
) -> None:
    """Raise ValueError if this reduction does not exist for the tensor's dtype."""
    try:
        float(prescale), float(postscale)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"hvd.{kind}: prescale_factor={prescale!r}, postscale_factor={postscale!r}, expected "
            "numbers."
        ) from error
    dtype = tensor.dtype
    got = f"hvd.{kind}: got a tensor of dtype {dtype.name} with op=hvd.{op.value}"
    if dtype == tf.bool and op not in (Min, Max):
        raise ValueError(f"{got}. Use hvd.Min (logical and) or hvd.Max (logical or), or cast it.")
    if not dtype.is_floating:
        if op in (Average, Adasum):
            raise ValueError(
                f"{got}, whose result would be rounded. Use op=hvd.Sum and divide by hvd.size(), "
                "or cast it to float32."
            )
        if prescale != 1.0 or postscale != 1.0:
            raise ValueError(
                f"{got} and prescale_factor={prescale}, postscale_factor={postscale}, whose "
                "result would be rounded. Cast it to float32."
            )
    if isinstance(tensor, tf.IndexedSlices) and op not in (Average, Sum):
        raise ValueError(
            f"{got} as tf.IndexedSlices, expected hvd.Average or hvd.Sum. "
            "Use tf.convert_to_tensor first."
        )


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


class _Rounding(Compressor):
    """Sends floating-point tensors as ``wire``, if that is narrower."""

    wire: tf.DType

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        wider = tensor.dtype.is_floating and tensor.dtype.size > cls.wire.size
        return (tf.cast(tensor, cls.wire) if wider else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        return tf.cast(tensor, context)


class _NoneCompressor(_Rounding):
    wire = tf.float64  # no dtype is wider, so nothing is rounded


class _FP16Compressor(_Rounding):
    wire = tf.float16


class _BF16Compressor(_Rounding):
    wire = tf.bfloat16


class _Int8Compressor(Compressor):
    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        raise ValueError(
            "hvd.Compression.int8 is for DistributedOptimizer with sync_every and fragments, where "
            "what rounding loses is sent later. Use hvd.Compression.bf16."
        )


class Compression:
    """The choices for the argument ``compression``.

    - ``none``: gradients are sent unchanged.
    - ``fp16``: sent as float16, with 11 significant bits and a range from 6e-8 to 65504. Larger
      gradients become infinite, on all ranks.
    - ``bf16``: sent as bfloat16, with 8 significant bits and float32's range.
    - ``int8``: with ``sync_every`` and ``fragments`` only, see ``DistributedOptimizer``.

    float16, bfloat16 and integers are sent unchanged. Sums are computed in float32; on GPUs, in
    the dtype that is sent.

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
    int8 = _Int8Compressor


def wire_dtype(compression: type[Compressor]) -> tf.DType | None:
    """Return the dtype to which the core rounds wider ones; None for the user's own compressors."""
    known = compression in (Compression.none, Compression.fp16, Compression.bf16)
    return compression.wire if known else None  # type: ignore[attr-defined]
