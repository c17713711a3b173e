"""Broadcast: every rank gets one rank's tensor."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_keras.ops import validate
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Give every rank the root rank's tensor.

    Args:
        tensor: a tensor of any numeric dtype or bool, of the same dtype and shape on all ranks.
        root_rank: the rank of the job whose values all ranks get.
        name, ignore_name_scope, process_set: as in ``allreduce``.

    Returns:
        A tensor of the same dtype and shape, with the root's values.

    Raises:
        TypeError: the tensor's dtype is not supported.
        ValueError: ``root_rank`` or this rank is not in the process set.
        tf.errors.FailedPreconditionError: (on every rank) dtypes, shapes or roots differ.
    """
    del ignore_name_scope
    validate.check("broadcast", process_set)
    return grouped_broadcast(
        [tensor], root_rank, validate.name("broadcast", name, process_set), process_set
    )[0]


def grouped_broadcast(
    tensors: Sequence[Any],
    root_rank: int,
    name: str,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """``broadcast`` of several tensors as one request."""
    validate.check("broadcast", process_set)
    empty = {"tensors": [validate.EMPTY], "root_rank": process_set.ranks[0]}
    with validate.on_all_ranks("broadcast", name, process_set, **empty):
        checked = [tf.convert_to_tensor(validate.checked("broadcast", x)) for x in tensors]
        check_root(root_rank, process_set)
    return list(
        validate.raw.hvd_broadcast(
            checked, tensor_name=name, root_rank=root_rank, process_set=process_set.id()
        )
    )


def check_root(root_rank: int, process_set: ProcessSet) -> None:
    """Raise ValueError if the root is not one of the ranks that take part."""
    if not isinstance(root_rank, int) or root_rank not in process_set.ranks:
        raise ValueError(
            f"root_rank is {root_rank!r}, expected one of the ranks that take part: "
            f"{process_set.text()}."
        )
