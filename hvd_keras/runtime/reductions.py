"""How tensors are combined."""

import enum


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
