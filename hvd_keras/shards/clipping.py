"""Clips gradients by norms, where each rank has the gradients of its parts of tables."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from hvd_keras import ops, shards
from hvd_keras._keras import keras
from hvd_keras.process_sets import ProcessSet


def clips_by_variable(optimizer: Any) -> bool:
    """Whether the norm of each gradient is limited."""
    return bool(optimizer.clipnorm and optimizer.clipnorm > 0)


def clips_by_all(optimizer: Any) -> bool:
    """Whether the norm over all gradients is limited. Keras prefers ``clips_by_variable``."""
    by_all = optimizer.global_clipnorm and optimizer.global_clipnorm > 0
    return bool(by_all) and not clips_by_variable(optimizer)


def clip(
    optimizer: Any,
    gradients: Sequence[Any],
    divided: Set[int],
    name: str,
    process_set: ProcessSet,
    known: Mapping[int, Any] | None = None,
) -> Any:
    """Does what ``optimizer._clip_gradients`` does in one process that has the whole tables.

    Args:
        optimizer: with Keras's options of clipping.
        gradients: dense or sparse ones, or None; not in ``divided``, they are equal on all ranks.
        divided: the places of the gradients of parts of tables.
        name: identifies the optimizer on all ranks.
        process_set: the ranks that have the other parts.
        known: the squared norms of gradients that other ranks have, by place, for
            ``clips_by_all``.
    """
    places = [i for i in sorted(divided) if gradients[i] is not None]
    by_variable = clips_by_variable(optimizer)
    if not (places or known) or not (by_variable or clips_by_all(optimizer)):
        return type(optimizer)._clip_gradients(optimizer, gradients)
    squares: dict[int, Any] = {}
    if places:
        squares = _of_tables(gradients, places, name, process_set)
    if not by_variable:
        squares.update(known or {})
        all_squares = [
            squares[i] if i in squares else keras.ops.sum(keras.ops.square(gradient))
            for i, gradient in enumerate(gradients)
            if gradient is not None
        ]
        # As Keras does it, bit for bit.
        norm = keras.ops.sqrt(keras.ops.sum(keras.ops.stack(all_squares)))
        limit = optimizer.global_clipnorm
        scale = limit * keras.ops.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        return [g if g is None else g * scale for g in gradients]
    clipped = list(gradients)
    rest = [i for i in range(len(clipped)) if i not in squares]
    cut = type(optimizer)._clip_gradients(optimizer, [clipped[i] for i in rest])
    for i, gradient in zip(rest, cut, strict=True):
        clipped[i] = gradient
    for i, square in squares.items():
        scaled = keras.ops.multiply(clipped[i], optimizer.clipnorm)  # sparse ones stay so
        norm = tf.maximum(tf.sqrt(square), tf.cast(optimizer.clipnorm, square.dtype))
        clipped[i] = keras.ops.divide(scaled, norm)
    return clipped


def _of_tables(
    gradients: Sequence[Any], places: list[int], name: str, process_set: ProcessSet
) -> dict[int, Any]:
    """The squared norms of the gradients of whole tables, by place."""
    mine = [keras.ops.sum(keras.ops.square(gradients[i])) for i in places]
    sums = ops.reduce_tensors(
        mine, op=ops.Sum, name=f"{name} norms of tables", process_set=process_set
    )
    return dict(zip(places, sums, strict=True))


def check_alone(optimizer: Any, variables: Iterable[Any]) -> None:
    """Refuses an optimizer that would clip by norms of this rank's parts.

    Raises:
        ValueError: it is not distributed, clips by norms and updates a part of a table.
    """
    if not (getattr(optimizer, "clipnorm", None) or getattr(optimizer, "global_clipnorm", None)):
        return
    for variable in variables:
        shard = shards.of(variable)
        if shard is not None and shard.process_set.size() > 1:
            raise ValueError(
                f"{type(optimizer).__name__} clips by norms (clipnorm, global_clipnorm), but each "
                f"rank has a part of {variable.path} only. Use hvd.DistributedOptimizer, which "
                "computes the norms over all ranks, in place of a tape, or leave clipping out."
            )
