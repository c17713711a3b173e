"""The ways to combine the ranks' tensors, and the dtypes that allow each."""

import enum
from typing import Any

import tensorflow as tf


class ReduceOp(enum.Enum):
    """How ``allreduce`` combines the ranks' tensors, element by element."""

    AVERAGE = "Average"
    SUM = "Sum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"
    ADASUM = "Adasum"


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
Adasum = ReduceOp.ADASUM


def chosen(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """Return the reduction that Horovod's two arguments ask for.

    Raises:
        ValueError: both are given, or ``op`` is not a ``ReduceOp``.
    """
    if average is not None and op is not None:
        raise ValueError(f"got both average={average} and op={op}. Give op alone.")
    if average is not None:
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, ReduceOp):
        raise ValueError(
            f"op is {op!r}, expected hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product or "
            "hvd.Adasum."
        )
    return op


def check_reducible(
    kind: str, tensor: Any, op: ReduceOp, prescale: float, postscale: float
) -> None:
    """Raise ValueError if this reduction does not exist for the tensor's dtype."""
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
