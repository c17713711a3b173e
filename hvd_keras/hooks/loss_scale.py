"""Loss scaling (``mixed_float16``) with one decision for all ranks.

``keras.optimizers.LossScaleOptimizer`` skips an update whose gradients overflow. It checks this
rank's gradients only: if one rank skipped an update and another did not, their weights would differ
from then on. The class is patched because ``compile`` creates such optimizers by itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd_keras import ops
from hvd_keras.gradients import building, model_ranks


def wrap_apply(keras_apply: Callable[..., None]) -> Any:
    """Wrap ``LossScaleOptimizer.apply``: exchanges the scaled gradients as soon as they exist.

    Otherwise the inner optimizer would exchange them in the branch for finite gradients, where all
    gradients exist. An infinite one of any rank makes the sum infinite.
    """

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        own: Any = model_ranks.of_optimizer(self)
        # Accumulated gradients are exchanged once per update.
        if own is None or self.inner_optimizer.gradient_accumulation_steps:
            keras_apply(self, grads, trainable_variables)
            return
        own.ahead = own.begin_update(grads, trainable_variables)
        try:
            keras_apply(self, own.ahead.finish(), trainable_variables)
        finally:
            own.ahead = None

    return apply


def wrap_check_finite(local_check: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``LossScaleOptimizer.check_finite``: true if the gradients of all ranks are finite."""

    def check_finite(self: Any, grads: Sequence[Any]) -> Any:
        finite = local_check(self, grads)
        own: Any = model_ranks.of_optimizer(self)
        if own is None or own.process_set.size() == 1 or building.is_building():
            return finite
        step = own.ahead
        if step is not None and own.state is None and not step.divided and step.local is None:
            return finite  # all ranks have the same gradients now
        (everywhere,) = ops.reduce_tensors(
            [tf.cast(finite, tf.bool)],
            op=ops.Min,
            name=f"{own.name} gradients are finite",
            process_set=own.process_set,
        )
        return everywhere

    return check_finite
