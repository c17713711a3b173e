"""Loss scaling (``mixed_float16``) with one decision for all ranks.

``keras.optimizers.LossScaleOptimizer`` skips an update whose gradients overflow. It checks this
rank's gradients only: if one rank skipped an update and another did not, their weights would differ
from then on.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd_keras import ops
from hvd_keras.training import building, together


def wrap_check_finite(local_check: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``LossScaleOptimizer.check_finite``: true if the gradients of all ranks are finite.

    The class is patched because ``compile`` creates such optimizers by itself.
    """

    def check_finite(self: Any, grads: Sequence[Any]) -> Any:
        finite = local_check(self, grads)
        own = together.of_optimizer(self)
        if own is None or own.process_set.size() == 1 or building.is_building():
            return finite
        (everywhere,) = ops.reduce_tensors(
            [tf.cast(finite, tf.bool)],
            op=ops.Min,
            name=f"{own.name} gradients are finite",
            process_set=own.process_set,
        )
        return everywhere

    return check_finite
