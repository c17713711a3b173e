"""Clips gradients by norms, where each rank has the gradients of its parts of tables."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from hvd_keras import ops
from hvd_keras.runtime.keras import keras


def clips_by_variable(optimizer: Any) -> bool:
    """Whether the norm of each gradient is limited."""
    return bool(optimizer.clipnorm and optimizer.clipnorm > 0)


def clips_by_all(optimizer: Any) -> bool:
    """Whether the norm over all gradients is limited. Keras prefers ``clips_by_variable``."""
    by_all = optimizer.global_clipnorm and optimizer.global_clipnorm > 0
    return bool(by_all) and not clips_by_variable(optimizer)


def clip(
    own: Any,
    gradients: Sequence[Any],
    divided: Set[int],
    local: Set[int] | None,
    known: Mapping[int, Any] | None = None,
) -> Any:
    """Do what ``optimizer._clip_gradients`` does in one process that has all variables.

    Args:
        own: the reducer of an optimizer with Keras's options of clipping.
        gradients: dense or sparse ones, or None; equal on all ranks, except those at the places
            ``divided`` (parts of tables) and ``local`` (this rank's own variables; None if no rank
            has such).
        known: for ``clips_by_all``, the squared norms of gradients that other ranks have, by place.
    """
    optimizer = own.optimizer
    indices = [i for i in sorted(divided) if gradients[i] is not None]
    by_variable = clips_by_variable(optimizer)
    if by_variable:
        local = None  # the norm of each is known here
    # Keras does it, where this rank has all gradients, or nothing is clipped by norms.
    if not (indices or known or local is not None) or not (by_variable or clips_by_all(optimizer)):
        return type(optimizer)._clip_gradients(optimizer, gradients)
    # Scalars: the squared norms of this rank's parts, whose sums over the ranks are the tables'.
    mine = [square(gradients[i]) for i in indices]
    if local is not None:
        # Ranks may have different numbers of them, so one number stands for all.
        of_local = [square(gradients[i]) for i in sorted(local) if gradients[i] is not None]
        of_local = [tf.cast(one, keras.backend.floatx()) for one in of_local]
        mine.append(tf.add_n(of_local) if of_local else tf.zeros([], keras.backend.floatx()))
    sums: list[Any] = []
    if mine:
        name = f"{own.name} norms of parts"
        sums = ops.reduce_tensors(mine, op=ops.Sum, name=name, process_set=own.process_set)
    # strict=False: the sum of the local ones, if any, is one more.
    squares: dict[int, Any] = dict(zip(indices, sums, strict=False))
    if not by_variable:
        squares.update(known or {})
        all_squares = [
            squares[i] if i in squares else square(gradient)
            for i, gradient in enumerate(gradients)
            if gradient is not None and i not in (local or ())
        ]
        all_squares += sums[len(indices) :]
        # As Keras does it, bit for bit.
        norm = keras.ops.sqrt(keras.ops.sum(keras.ops.stack(all_squares)))
        limit = optimizer.global_clipnorm
        # norm - norm is 0, and NaN if the norm is infinite.
        scale = limit * keras.ops.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        return [g if g is None else g * scale for g in gradients]
    clipped = list(gradients)
    # By variable: Keras clips those whose norm this rank knows, and the others' follow.
    rest = [i for i in range(len(clipped)) if i not in squares]
    cut = type(optimizer)._clip_gradients(optimizer, [clipped[i] for i in rest])
    for i, gradient in zip(rest, cut, strict=True):
        clipped[i] = gradient
    for i, of_all in squares.items():
        scaled = keras.ops.multiply(clipped[i], optimizer.clipnorm)  # sparse ones stay so
        norm = tf.maximum(tf.sqrt(of_all), tf.cast(optimizer.clipnorm, of_all.dtype))
        clipped[i] = keras.ops.divide(scaled, norm)
    return clipped


def square(gradient: Any) -> Any:
    """The squared norm."""
    return keras.ops.sum(keras.ops.square(gradient))
