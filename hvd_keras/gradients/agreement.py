"""What the user chose about the exchange of gradients, and what the ranks agree on before it.

``reducer.GradientReducer`` exchanges them.
"""

import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from hvd_keras import ops
from hvd_keras.gradients import shards
from hvd_keras.gradients.specs import DIFFERENT_STEPS, VariableSpec
from hvd_keras.ops.reduction import Compression, Compressor
from hvd_keras.runtime import agree, process_sets
from hvd_keras.runtime.keras import has_gpu
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set
from hvd_keras.runtime.reductions import check_of_gradients

Kind = Literal["dense", "sparse"]

# As sent between ranks, one byte per variable. The maximum over the ranks wins.
_KINDS: tuple[Kind | None, ...] = (None, "sparse", "dense")


@dataclasses.dataclass(frozen=True)
class ExchangeOptions:
    """What the user chose about the exchange. Raises ValueError if that is impossible."""

    op: ops.ReduceOp = ops.Average
    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    device_dense: str = ""
    device_sparse: str = ""
    gradient_predivide_factor: float = 1.0
    scale_local_gradients: bool = True
    process_set: ProcessSet = global_process_set

    def __post_init__(self) -> None:
        process_sets.check(self.process_set, "DistributedOptimizer or hvd.DistributedGradientTape")
        # Impossible arguments raise where the optimizer is made, not in the first step.
        check_of_gradients(self.op, self.gradient_predivide_factor)
        if not (isinstance(self.compression, type) and issubclass(self.compression, Compressor)):
            raise ValueError(
                f"compression is {self.compression!r}, expected hvd.Compression.none, .fp16 or "
                ".bf16, or a class derived from hvd.Compressor."
            )
        if self.compression is Compression.int8:
            self.compression.compress(None)  # raises

    def scale_local(self, gradient: Any, is_divided: bool = False) -> Any:
        """Scale a gradient that stays on this rank."""
        # That of a divided table is the sum over all ranks: it becomes what op makes of others,
        # before it is accumulated, so that the sum is that of any number of ranks.
        scale = self.op is ops.Average if is_divided else self.scale_local_gradients
        if gradient is None or not scale:
            return gradient
        factor = tf.constant(1 / self.process_set.size(), gradient.dtype)
        return tf.math.scalar_mul(factor, gradient)  # sparse ones stay so

    def of_dense(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "compression": self.compression,
            "device_dense": self.device_dense,
            # The core divides by the size besides, as op is Average then.
            "prescale_factor": 1 / self.gradient_predivide_factor,
            "postscale_factor": self.gradient_predivide_factor,
        }

    def can_overlap(self) -> bool:
        """Whether a GPU can compute while it sums: nothing is done to each bucket's sums."""
        is_plain = self.compression is Compression.none and not self.device_dense
        return is_plain and has_gpu()

    def densified(self, gradients: Sequence[Any]) -> list[Any]:
        if not self.sparse_as_dense:
            return list(gradients)
        return [g if g is None else tf.convert_to_tensor(g) for g in gradients]


def overwrite(
    gradients: list[Any], variables: Sequence[Any], name: str, process_set: ProcessSet
) -> list[int]:
    """Replace "gradients" that are new values (float8 scales) by the ranks' maximum, as Keras does.

    Returns:
        Their indices.
    """
    indices = [
        i
        for i, variable in enumerate(variables)
        if gradients[i] is not None and getattr(variable, "overwrite_with_gradient", False)
    ]
    if indices:
        values = [gradients[i] for i in indices]
        name = f"{name} overwritten"
        largest = ops.reduce_tensors(values, op=ops.Max, name=name, process_set=process_set)
        for i, value in zip(indices, largest, strict=True):
            gradients[i] = value
    return indices


def refuse_strategies() -> None:
    """Raise ValueError if a ``tf.distribute.Strategy`` distributes the same training."""
    if tf.distribute.has_strategy():
        raise ValueError(
            f"a {type(tf.distribute.get_strategy()).__name__} is in force, but hvd_keras "
            "distributes the training already, with one process per device. Remove "
            "`with strategy.scope():` and strategy.run from the script."
        )


# The number of the present step of fit in eager code, and its graph.
_step_of_fit: contextvars.ContextVar[tuple[int, Any]]
_step_of_fit = contextvars.ContextVar("step of fit", default=(0, None))


def in_step_of_fit(number: int) -> contextlib.AbstractContextManager[None]:
    """Within a step of Keras's, so many of which this process has begun or traced."""
    return agree.within(_step_of_fit, (number, tf.compat.v1.get_default_graph()))


def handle_of(value: Any) -> Any:
    """The handle of a new variable. Not in a graph."""
    # A tf.function that is being traced would take a tf.Variable for one of its own.
    name = f"hvd_keras {next(_handles)}"
    handle = tf.raw_ops.VarHandleOp(dtype=value.dtype, shape=value.shape, shared_name=name)
    tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    return handle


_handles = itertools.count()


def check_step(name: str, steps: Any, process_set: ProcessSet) -> None:
    """Let a step of a graph fail on all ranks if some skip it and others another one.

    In a branch, ranks compare how often the function around all branches has run.

    Args:
        steps: the handle of a variable that counts that, int64.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    outer = None
    # The branches around a step are Keras's, and other functions may call the step's.
    while graph is not _step_of_fit.get()[1] and getattr(graph, "building_function", False):
        graph, inner = getattr(graph, "outer_graph", None), graph
        if type(inner).__name__ == "CondBranchFuncGraph":
            outer = graph
    if outer is None:
        return
    with outer.as_default():  # in which all ranks count each step
        tf.raw_ops.AssignAddVariableOp(resource=steps, value=tf.constant(1, tf.int64))
    # Read here: a tf.function between the two may be called from other graphs, too.
    step = tf.raw_ops.ReadVariableOp(resource=steps, dtype=tf.int64)
    gathered = ops.allgather(step[tf.newaxis], name=f"{name} step", process_set=process_set)

    def fail() -> tf.Tensor:
        # XLA drops assertions; of these, which differ in shape, no rank gets one.
        mine = tf.zeros([1 + process_set.rank()])
        failing = f"{name}: {DIFFERENT_STEPS}"
        (zeros,) = ops.reduce_tensors([mine], op=ops.Sum, name=failing, process_set=process_set)
        return zeros[0]

    tf.cond(tf.reduce_all(gathered == step), lambda: tf.constant(0.0), fail)


def kinds_of(gradients: Sequence[Any]) -> tuple[Kind | None, ...]:
    """How this rank has each gradient: dense, sparse, or not at all."""
    return tuple(
        None if g is None else "sparse" if isinstance(g, tf.IndexedSlices) else "dense"
        for g in gradients
    )


def agree_on_kinds(
    name: str, kinds: Sequence[Kind | None], process_set: ProcessSet, factors: Sequence[float]
) -> tuple[tuple[Kind | None, ...], Any]:
    """How each gradient is sent: dense if dense on any rank, None only if no rank has it.

    And the ``factors`` of each rank, as many on all, as float32 of [ranks, factors].
    """
    own = np.array(factors, np.float32).view(np.uint8)
    numbers = [_step_of_fit.get()[0] % 256, *own, *(_KINDS.index(kind) for kind in kinds)]
    mine = np.array([numbers], np.uint8)  # [1, 1 + factors * 4 + variables]
    call = {"name": f"{name}.kinds", "process_set": process_set.id()}
    (gathered,) = agree.run("allgather", [mine], **call)
    if tf.executing_eagerly() and np.ptp(gathered[:, 0]):
        raise ValueError(f"{name}: {DIFFERENT_STEPS}.")
    first = 1 + len(own)
    # [ranks, variables]: what one rank has dense, all send dense.
    agreed = tuple(_KINDS[i] for i in gathered[:, first:].max(axis=0))
    return agreed, np.ascontiguousarray(gathered[:, 1:first]).view(np.float32)


def completed(gradient: Any, kind: Kind | None, spec: VariableSpec) -> Any:
    """A rank's gradient in the kind that the ranks agreed on; zero where this rank has none."""
    if kind is None:
        return None
    if gradient is None:
        if kind == "dense":
            return tf.zeros(spec.shape, spec.dtype)
        # No rows: an allgather takes any number from each rank.
        none = tf.zeros((0, *spec.shape[1:]), spec.dtype)
        return tf.IndexedSlices(none, tf.zeros(0, tf.int64), tf.constant(spec.shape, tf.int64))
    if kind == "dense":
        return tf.convert_to_tensor(gradient)
    # One dtype on all ranks: a lookup by int32 ids has int32 indices.
    return tf.IndexedSlices(
        gradient.values, tf.cast(gradient.indices, tf.int64), tf.constant(spec.shape, tf.int64)
    )


# The number of requests, or lists of variables that share one.
Groups = int | Sequence[Sequence[Any]]


def groups(num_groups: int, groups: int | Sequence[Sequence[Any]] | None) -> Groups:
    """Combine Horovod's two arguments. Raises ValueError if both or an impossible one is given."""
    if num_groups and groups is not None:
        raise ValueError(
            f"got both num_groups={num_groups} and groups={groups!r}. Give groups alone."
        )
    chosen = num_groups if groups is None else groups
    if isinstance(chosen, int):
        if chosen < 0:
            raise ValueError(
                f"groups is {chosen}, expected the number of groups, or 0 to group by size."
            )
        return chosen
    every = [chosen, *chosen] if isinstance(chosen, Sequence) else [chosen]
    if any(isinstance(group, str) or not isinstance(group, Sequence) for group in every):
        raise ValueError(f"groups is {chosen!r}, expected an integer or lists of variables.")
    return chosen


def group_indices(groups: Groups, variables: Sequence[Any]) -> list[list[int]]:
    """Return the groups as indices into the list of variables."""
    if isinstance(groups, int):
        # Neighbours, whose gradients become ready one after another; groups of equal size.
        count = min(groups, len(variables))
        return [part.tolist() for part in np.array_split(range(len(variables)), count or 1)][:count]
    index = {shards.variable_id(v): i for i, v in enumerate(variables)}
    return [
        [index[shards.variable_id(v)] for v in group if shards.variable_id(v) in index]
        for group in groups
    ]
