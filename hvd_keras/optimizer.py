"""``DistributedOptimizer``: one process's optimizer, fed with the gradients of all."""

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvd_keras import exchange, loss_scale, ops, runtime

_numbers = itertools.count()


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    *,
    op: ops.ReduceOp = ops.Average,
    sparse_as_dense: bool = False,
) -> keras.optimizers.Optimizer:
    """Makes a Keras optimizer apply the gradients of all ranks.

    Each update first averages the gradients over the ranks, after local gradient accumulation and
    before clipping, weight decay and moving averages: N ranks with batch B behave as one process
    with batch N·B. Scale the learning rate as you would for that batch, usually by ``hvd.size()``.

    The optimizer itself is changed and returned: its class, its configuration and its state stay
    what they were, so a saved model loads without hvd_keras.

    Args:
        optimizer: any ``keras.optimizers.Optimizer``, built or not, with all its options.
        name: identifies the optimizer on all ranks. Default: its number among those that this
            process has made.
        op: ``hvd.Average``, or ``hvd.Sum`` to leave the division to the learning rate.
        sparse_as_dense: gradients of embeddings travel as dense tensors; pays if most rows are
            used in every step.

    Returns:
        The same optimizer.

    Raises:
        TypeError: ``optimizer`` is none of Keras 3.
        ValueError: it is distributed already, or ``op`` is neither Average nor Sum; and in the
            first step, on every rank, if the ranks' models differ.

    Example:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
        model.compile(optimizer=optimizer, loss="mse")
    """
    runtime.rank()  # says so, if init() was not called
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"hvd.DistributedOptimizer: got {optimizer!r}, expected a keras.optimizers.Optimizer, "
            "such as keras.optimizers.Adam(). For a name use keras.optimizers.get(name)."
        )
    if op not in (ops.Average, ops.Sum):
        raise ValueError(
            f"hvd.DistributedOptimizer: op is {op!r}, expected hvd.Average or hvd.Sum."
        )
    target = optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        target = optimizer.inner_optimizer
    if is_distributed(target):
        raise ValueError(
            f"hvd.DistributedOptimizer: this {type(target).__name__} is distributed already. "
            "Wrap an optimizer once."
        )
    number = next(_numbers)
    _Distribution(target, name or f"optimizer {number}", op, sparse_as_dense).attach()
    loss_scale.agree_on_finite_gradients()
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Whether ``DistributedOptimizer`` was applied to this very object."""
    return hasattr(optimizer, "_hvd_distribution")


class _Distribution:
    """What an optimizer gains. Lives in the optimizer as an attribute, for its class must stay."""

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, name: str, op: ops.ReduceOp, as_dense: bool
    ) -> None:
        self.optimizer = optimizer
        self.name = name
        self.op = op
        self.as_dense = as_dense
        self.plans: dict[tuple[exchange.Entry, ...], exchange.Plan] = {}
        self.current: tuple[exchange.Plan, list[int]] | None = None

    def attach(self) -> None:
        self.optimizer._hvd_distribution = self
        self.optimizer.apply = self.apply
        self.optimizer._clip_gradients = self.clip_gradients

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """In place of ``Optimizer.apply``, which every step calls."""
        keras_apply = type(self.optimizer).apply
        if runtime.size() == 1 or len(grads) == 0:
            keras_apply(self.optimizer, grads, trainable_variables)
            return
        variables = trainable_variables
        if variables is None:
            variables = self.optimizer._trainable_variables
        variables = list(variables)
        plan, grads = self._complete(list(grads), variables)
        present = [i for i, gradient in enumerate(grads) if gradient is not None]
        overwritten = [i for i in present if _overwritten(variables[i])]
        if overwritten:
            # Such "gradients" (float8 scales) are new values; Keras takes the largest of several.
            largest = ops.grouped_allreduce(
                [grads[i] for i in overwritten], op=ops.Max, name=f"{self.name} overwritten"
            )
            for i, value in zip(overwritten, largest, strict=True):
                grads[i] = value
        if isinstance(self.optimizer, keras.optimizers.MultiOptimizer):
            grads = plan.exchange(grads, self.op)  # its parts update, it does not
        else:
            self.current = plan, [i for i in present if i not in overwritten]
        keras_apply(self.optimizer, grads, trainable_variables)

    def clip_gradients(self, grads: Sequence[Any]) -> Any:
        """In place of ``_clip_gradients``, which every real update calls once, and first.

        Keras calls it after accumulation and before all that looks at the gradients.
        """
        keras_clip = type(self.optimizer)._clip_gradients
        if runtime.size() > 1 and self.current is not None:
            plan, left = self.current
            everything: list[Any] = [None] * len(plan.entries)
            for i, gradient in zip(left, grads, strict=True):
                everything[i] = gradient
            everything = plan.exchange(everything, self.op)
            grads = [everything[i] for i in left]
        return keras_clip(self.optimizer, grads)

    def _complete(self, grads: list[Any], variables: list[Any]) -> tuple[exchange.Plan, list[Any]]:
        if self.as_dense:
            grads = [g if g is None else tf.convert_to_tensor(g) for g in grads]
        entries = tuple(exchange.entry(v) for v in variables)
        if entries not in self.plans:
            self.plans[entries] = exchange.Plan(self.name, entries, grads)
        plan = self.plans[entries]
        return plan, plan.complete(grads)


def _overwritten(variable: Any) -> bool:
    return bool(getattr(variable, "overwrite_with_gradient", False))
