"""``DistributedGradientTape`` for custom training loops."""

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvd_keras import ops
from hvd_keras.gradients import agreement, model_ranks, reducer, shards
from hvd_keras.ops.reduction import Compression, Compressor
from hvd_keras.optimizer import local_variables
from hvd_keras.runtime import rank_info
from hvd_keras.runtime.keras import keras
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set


class DistributedGradientTape:
    """A ``tf.GradientTape`` whose ``gradient`` is taken over all ranks.

    Args:
        gradtape: the tape to wrap. Its other methods (``watch``, ``stop_recording``, use as a
            context manager) stay the same.
        device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor,
            num_groups, groups, process_set, scale_local_gradients: as in ``DistributedOptimizer``.

    Raises:
        TypeError: ``gradtape`` is not a ``tf.GradientTape``.
        ValueError: an argument is impossible, or ``init()`` was not called.

    Example:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    """

    def __init__(
        self,
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: type[Compressor] = Compression.none,
        sparse_as_dense: bool = False,
        op: ops.ReduceOp = ops.Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[Any]] | None = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        rank_info.rank()  # raises if init() was not called
        if not isinstance(gradtape, tf.GradientTape):
            raise TypeError(
                f"hvd.DistributedGradientTape: got {gradtape!r}, expected a tf.GradientTape."
            )
        self._tape = gradtape
        options = agreement.ExchangeOptions(
            *(op, compression, sparse_as_dense, device_dense, device_sparse),
            *(gradient_predivide_factor, scale_local_gradients, process_set),
        )
        self._reducer = _reducer(options, agreement.groups(num_groups, groups))
        self._local: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name == "_tape":  # of a copy that is being made
            raise AttributeError(name)
        if name in ("jacobian", "batch_jacobian"):
            raise NotImplementedError(
                f"hvd.DistributedGradientTape has no {name} over all ranks. Call that of the "
                "tf.GradientTape, and hvd.allreduce its result."
            )
        return getattr(self._tape, name)

    def __enter__(self) -> "DistributedGradientTape":
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def register_local_source(self, source: Any) -> None:
        """Keep the gradient of this variable or tensor on this rank: it is not exchanged."""
        self._local.append(source)
        if hasattr(source, "assign") and self._reducer.process_set.size() > 1:
            model_ranks.local_variables.add(source)

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """``tf.GradientTape.gradient``, averaged (or summed) over the ranks.

        Args:
            target, sources, …: as in ``tf.GradientTape.gradient``.

        Returns:
            Gradients in the structure of ``sources``; None if no rank has one.

        Raises:
            ValueError: (on every rank) the ranks' sources differ in number, name, dtype or shape.
        """
        # This rank's, of any structure; they travel as a flat list.
        gradients = self._tape.gradient(target, sources, *args, **kwargs)
        reduced = self._reducer.reduce(
            tf.nest.flatten(gradients), tf.nest.flatten(sources), self._local
        )
        for gradient in reduced:
            if gradient is not None:
                gradient._hvd_reduced = True  # a distributed optimizer does not reduce it again
        return tf.nest.pack_sequence_as(sources, reduced)


def PartialDistributedGradientTape(  # noqa: N802 (Horovod's name)
    gradtape: tf.GradientTape,
    *args: Any,
    local_layers: keras.layers.Layer | Iterable[keras.layers.Layer] | None = None,
    **kwargs: Any,
) -> DistributedGradientTape:
    """``DistributedGradientTape`` for models with layers that belong to one rank.

    Args:
        gradtape, args, kwargs: as in ``DistributedGradientTape``.
        local_layers: built layers whose gradients stay on this rank.

    Returns:
        The tape.

    Raises:
        ValueError: a local layer is not built, or none; and as ``DistributedGradientTape``.
    """
    tape = DistributedGradientTape(gradtape, *args, **kwargs)
    for variable in local_variables(local_layers):
        tape.register_local_source(variable)
    return tape


_reducers: dict[Any, reducer.GradientReducer] = {}


def _reducer(
    options: agreement.ExchangeOptions, groups: agreement.Groups
) -> reducer.GradientReducer:
    """The reducer for all tapes with these options, since a loop makes a new tape in each step."""
    ids: Any = groups  # the reducer keeps the variables, so no other one gets their ids
    if not isinstance(groups, int):
        ids = tuple(tuple(map(shards.variable_id, group)) for group in groups)
    if (options, ids) not in _reducers:
        _reducers[options, ids] = reducer.GradientReducer("tape", options, groups)
    return _reducers[options, ids]
