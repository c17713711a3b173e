"""Loss scaling (``mixed_float16``) that takes one decision for all ranks.

``keras.optimizers.LossScaleOptimizer`` skips an update whose gradients overflow. It looks at this
rank's gradients only: if one rank skipped and another did not, they would differ ever after.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd_keras import ops
from hvd_keras.training import building, together


def wrap_check_finite(local_check: Callable[..., Any]) -> Callable[..., Any]:
    """For a LossScaleOptimizer around a distributed optimizer: asks all ranks.

    On the class, because ``compile`` makes such a wrapper by itself.
    """

    def check_finite(self: Any, grads: Sequence[Any]) -> Any:
        finite = local_check(self, grads)
        own = together.of_optimizer(self)
        if own is None or own.process_set.size() == 1 or building.is_building():
            return finite
        return ops.allreduce(
            tf.cast(finite, tf.bool),
            op=ops.Min,
            name=f"{own.name} gradients are finite",
            process_set=own.process_set,
        )

    return check_finite
