"""``DistributedOptimizer``, the tape and ``load_model`` as ``horovod.tensorflow`` has them.

One script runs on all ranks there: on a rank outside of the process set they do nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvd_keras import tape
from hvd_keras.gradients import agreement, missing_calls
from hvd_keras.horovod import of_keras
from hvd_keras.layers import model_files
from hvd_keras.ops.compression import Compression, Compressor
from hvd_keras.optimizer import local_variables
from hvd_keras.runtime.process_sets import global_process_set


@of_keras.in_order(
    "optimizer name use_locking device_dense device_sparse compression sparse_as_dense "
    "backward_passes_per_step op gradient_predivide_factor average_aggregated_gradients "
    "num_groups groups process_set scale_local_gradients"
)
def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any, use_locking: Any = None, **arguments: Any
) -> Any:
    """``hvd_keras.DistributedOptimizer`` with the arguments of ``horovod.tensorflow``.

    ``use_locking`` has no effect: the optimizer itself has such an argument.

    Raises:
        As ``hvd_keras.DistributedOptimizer``.
    """
    del use_locking
    return of_keras.DistributedOptimizer(optimizer, **arguments)


class DistributedGradientTape(tape.DistributedGradientTape):
    """``hvd_keras.DistributedGradientTape``; on a rank outside of the process set a plain tape."""

    def __init__(self, gradtape: tf.GradientTape, *args: Any, **kwargs: Any) -> None:
        self._alone = of_keras.is_outside(kwargs.get("process_set", global_process_set))
        if self._alone:
            kwargs.pop("process_set")
        super().__init__(gradtape, *args, **kwargs)

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """As ``hvd_keras.DistributedGradientTape.gradient``."""
        kwargs.pop("use_generic_names", None)
        if self._alone:
            missing_calls.mark_reduced(tf.nest.flatten(sources))
            return self._tape.gradient(target, sources, *args, **kwargs)
        return super().gradient(target, sources, *args, **kwargs)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Sequence[Any],
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """``gradient``, by whether a source belongs to this rank.

        Args:
            target, sources, output_gradients: as in ``tf.GradientTape.gradient``.
            use_generic_names: has no effect: names are generic always.

        Returns:
            The sources that were registered as local, with their gradients; and all others, with
            theirs over all ranks. Both in the order of ``sources``.

        Raises:
            As ``gradient``.
        """
        gradients = self.gradient(target, sources, output_gradients)
        own = {agreement.variable_id(source) for source in self._local}
        pairs: tuple[list[Any], list[Any]] = [], []
        for source, gradient in zip(sources, gradients, strict=True):
            pairs[agreement.variable_id(source) not in own].append((source, gradient))
        return pairs


@of_keras.in_order(
    "gradtape device_dense device_sparse compression sparse_as_dense op gradient_predivide_factor "
    "num_groups groups process_set local_layers scale_local_gradients"
)
def PartialDistributedGradientTape(  # noqa: N802 (Horovod's name)
    gradtape: Any = None, local_layers: Any = None, **arguments: Any
) -> DistributedGradientTape:
    """``hvd_keras.PartialDistributedGradientTape``.

    Raises:
        As ``hvd_keras.PartialDistributedGradientTape``.
    """
    variables = local_variables(local_layers)
    partial = DistributedGradientTape(gradtape, **arguments)
    for variable in variables:
        partial.register_local_source(variable)
    return partial


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """``hvd_keras.load_model``.

    Args:
        legacy_opts: not needed: the file names the optimizer's class.
        filepath, custom_optimizers, custom_objects, compression: as in ``hvd_keras.load_model``.

    Raises:
        As ``hvd_keras.load_model``.
    """
    del legacy_opts
    return model_files.load_model(filepath, custom_optimizers, custom_objects, compression)
