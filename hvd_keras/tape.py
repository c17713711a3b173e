"""``DistributedGradientTape`` for custom training loops."""

import functools
from typing import Any

import tensorflow as tf

from hvd_keras import exchange, ops, runtime


class DistributedGradientTape:
    """A ``tf.GradientTape`` whose ``gradient`` is taken over all ranks.

    Args:
        gradtape: the tape to wrap. All else of it (``watch``, ``stop_recording``, use as a context
            manager) stays as it is.
        op: ``hvd.Average`` or ``hvd.Sum``.
        sparse_as_dense: as in ``DistributedOptimizer``.

    Raises:
        TypeError: ``gradtape`` is no ``tf.GradientTape``.
        ValueError: ``op`` is neither Average nor Sum.

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
        *,
        op: ops.ReduceOp = ops.Average,
        sparse_as_dense: bool = False,
    ) -> None:
        runtime.rank()  # says so, if init() was not called
        if not isinstance(gradtape, tf.GradientTape):
            raise TypeError(
                f"hvd.DistributedGradientTape: got {gradtape!r}, expected a tf.GradientTape."
            )
        if op not in (ops.Average, ops.Sum):
            raise ValueError(
                f"hvd.DistributedGradientTape: op is {op!r}, expected hvd.Average or hvd.Sum."
            )
        self._tape = gradtape
        self._op = op
        self._as_dense = sparse_as_dense

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> "DistributedGradientTape":
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """``tf.GradientTape.gradient``, averaged (or summed) over the ranks.

        Args:
            target, sources, …: as in ``tf.GradientTape.gradient``.

        Returns:
            Gradients in the structure of ``sources``; None where no rank has one.

        Raises:
            ValueError: the ranks' sources differ in number, name, dtype or shape; on every rank.
        """
        gradients = self._tape.gradient(target, sources, *args, **kwargs)
        if runtime.size() == 1:
            return gradients
        flat = tf.nest.flatten(gradients)
        if self._as_dense:
            flat = [g if g is None else tf.convert_to_tensor(g) for g in flat]
        entries = tuple(exchange.entry(source) for source in tf.nest.flatten(sources))
        key = entries, self._as_dense
        if key not in _plans():
            _plans()[key] = exchange.Plan("tape", entries, flat)
        plan = _plans()[key]
        flat = plan.exchange(plan.complete(flat), self._op)
        return tf.nest.pack_sequence_as(sources, flat)


@functools.cache
def _plans() -> dict[tuple[tuple[exchange.Entry, ...], bool], exchange.Plan]:
    """Across tapes: a loop makes a new tape in every step."""
    return {}
