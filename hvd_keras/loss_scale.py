"""Loss scaling (``mixed_float16``) that takes one decision for all ranks.

``keras.optimizers.LossScaleOptimizer`` skips an update whose gradients overflow. It looks at this
rank's gradients only: if one rank skipped and another did not, they would part for ever.
"""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_keras import ops
from hvd_keras._keras import keras


@functools.cache
def agree_on_finite_gradients() -> None:
    """From now on, a LossScaleOptimizer around a distributed optimizer asks all ranks.

    On the class, because ``compile`` makes such a wrapper by itself, of which we hear nothing.
    """
    loss_scale_optimizer = keras.optimizers.LossScaleOptimizer
    local_check = loss_scale_optimizer.check_finite

    def check_finite(self: Any, grads: Sequence[Any]) -> Any:
        finite = local_check(self, grads)
        distribution = getattr(self.inner_optimizer, "_hvd_distribution", None)
        if distribution is None:
            return finite
        return ops.allreduce(
            tf.cast(finite, tf.bool),
            op=ops.Min,
            name=f"{distribution.name} gradients are finite",
            process_set=distribution.manner.process_set,
        )

    loss_scale_optimizer.check_finite = check_finite
