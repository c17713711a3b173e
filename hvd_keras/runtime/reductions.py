"""How tensors are combined."""

import enum
import numbers


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


def check_of_gradients(op: ReduceOp, predivide_factor: float) -> None:
    """Raise ValueError if gradients cannot be combined so."""
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"op is {op!r}, expected hvd.Average, hvd.Sum or hvd.Adasum.")
    if not isinstance(predivide_factor, numbers.Real) or predivide_factor <= 0:
        raise ValueError(
            f"gradient_predivide_factor is {predivide_factor!r}, expected a number above 0."
        )
    if predivide_factor != 1 and op is not Average:
        raise ValueError(
            "gradient_predivide_factor splits the division of an average; with "
            f"op=hvd.{op.value} nothing is divided. Leave one of them out."
        )
