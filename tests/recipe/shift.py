"""The toy collective: every rank gets the tensor of its left neighbour. Lands in hvd_keras/ops."""

from typing import Any

import tensorflow as tf

from hvd_keras.ops import validate
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set


def shift(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tf.Tensor:
    """Returns the left neighbour's tensor; the first rank's left neighbour is the last rank."""
    validate.check("shift", process_set)
    name = validate.name("shift", name, process_set)
    with validate.on_all_ranks("shift", name, process_set):
        checked = tf.convert_to_tensor(validate.checked("shift", tensor))
    return validate.raw.hvd_shift([checked], tensor_name=name, process_set=process_set.id())[0]
