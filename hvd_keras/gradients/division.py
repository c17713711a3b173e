"""How a batch that all ranks have as a whole is divided between them, in automatic mode."""

import contextvars
import dataclasses
from collections.abc import Callable
from typing import Any

from hvd_keras.runtime import rank_info
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set

#: Whether automatic mode is on: scripts are those of one process, and every rank has all rows.
is_on = False

#: Gradients of variables that the script has computed outside of steps: the names of their targets.
own_loops: list[str] = []

#: Whether a reducer has exchanged any gradients of this process.
has_exchanged = False

OWN_LOOP = (
    "hvdrun --auto divides what fit, train_on_batch, evaluate, test_on_batch and predict of a "
    "model compute, and this script trains otherwise: {}. Either move the update into a "
    "train_step of the model, with the optimizer as an attribute of the model, or run the script "
    "without --auto, with hvd.init() as its first line, each rank's share of the rows, and "
    "hvd.DistributedGradientTape(tape).gradient(...) instead of tape.gradient(...)."
)


@dataclasses.dataclass
class Part:
    """This rank's rows of one batch. Numbers are Python's if the batch has a static size."""

    rows: Any  # of all ranks
    start: Any
    stop: Any  # behind the last row; one row if this rank has none
    is_whole: bool = False  # all ranks compute all rows, and those of the first rank count

    @property
    def count(self) -> Any:
        """The number of this rank's rows, which may be 0."""
        if self.is_whole:
            return 0 if rank_info.rank() else self.rows
        return (rank_info.rank() + 1) * self.rows // rank_info.size() - self.start

    @property
    def share(self) -> Any:
        """This rank's share of the rows, between 0 and 1."""
        return self.count / self.rows

    @property
    def is_even(self) -> bool:
        """Whether all ranks are known to have equally many rows."""
        is_divided = isinstance(self.rows, int) and not self.is_whole
        return is_divided and self.rows % rank_info.size() == 0

    def of_mine(self, rows: Any) -> Any:
        """Rows that this rank has computed, which may be more than one for each of the data."""
        import tensorflow as tf

        if self.is_even:
            return rows
        return rows[: tf.where(tf.greater(self.count, 0), tf.shape(rows)[0], 0)]

    def gather(self, value: Any, name: str) -> Any:
        """All ranks' rows of tensors in a structure; of scalars their mean by rows."""
        return gather(value, name, global_process_set, self.share, self.of_mine)


def gather(
    value: Any,
    name: str,
    process_set: ProcessSet,
    share: Any,
    of_mine: Callable[[Any], Any] = lambda rows: rows,
) -> Any:
    """All ranks' rows of tensors in a structure; the sum of scalars times the ranks' shares.

    Args:
        of_mine: returns those that count of the rows that this rank has.
    """
    import tensorflow as tf

    from hvd_keras import ops

    def of_all(part: Any, name: str) -> Any:
        part = tf.convert_to_tensor(part)
        if part.shape.rank == 0:
            part = tf.cast(share, part.dtype) * part
            (total,) = ops.reduce_tensors([part], op=ops.Sum, name=name, process_set=process_set)
            return total
        gathered = ops.allgather(of_mine(part), name=name, process_set=process_set)
        for also in ("_keras_mask", "_keras_logits"):  # which losses of Keras use
            if (rows := getattr(part, also, None)) is not None:
                rows = ops.allgather(of_mine(rows), name=name + also, process_set=process_set)
                setattr(gathered, also, rows)
        return gathered

    parts = enumerate(tf.nest.flatten(value))
    return tf.nest.pack_sequence_as(
        value, [part if part is None else of_all(part, f"{name} {i}") for i, part in parts]
    )


#: The part of the batch that the present step of a model gets.
current: contextvars.ContextVar[Part | None] = contextvars.ContextVar("part", default=None)
