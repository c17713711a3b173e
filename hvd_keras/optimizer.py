"""``DistributedOptimizer``: one process's optimizer, fed with the gradients of all."""

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvd_keras import (
    exchange,
    keras_callbacks,
    legacy_keras,
    loss_scale,
    ops,
    rank_info,
    sync_batch_norm,
)
from hvd_keras._keras import is_legacy, keras
from hvd_keras.compat import tensorflow_v1
from hvd_keras.compression import Compression, Compressor
from hvd_keras.process_sets import ProcessSet, global_process_set

# By process set: ranks of one set make the same optimizers, those of another may make others.
_numbers: collections.defaultdict[int, Iterator[int]] = collections.defaultdict(itertools.count)


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ops.ReduceOp = ops.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Makes a Keras optimizer apply the gradients of all ranks.

    Each update first averages the gradients over the ranks, after local gradient accumulation and
    before clipping, weight decay and moving averages: N ranks with batch B behave as one process
    with batch N·B. Scale the learning rate as you would for that batch, usually by ``hvd.size()``.

    The optimizer itself is changed and returned: its class, its configuration and its state stay
    what they were, so a saved model loads without hvd_keras. It gains a method
    ``register_local_var(variable)``: a variable whose gradient stays on this rank, for layers that
    are not copies of each other.

    Args:
        optimizer: any ``keras.optimizers.Optimizer``, built or not, with all its options; one of
            tf_keras, also of its ``legacy`` family, if ``TF_USE_LEGACY_KERAS=1`` is set; or a
            ``tf.compat.v1.train.Optimizer``, whose ``compute_gradients`` averages then.
        name: identifies the optimizer on all ranks. Default: its number among those that this
            process has made.
        device_dense: the TensorFlow device on which dense gradients are exchanged; default: theirs.
        device_sparse: the same for sparse gradients.
        compression: ``hvd.Compression.fp16`` or ``.bf16`` halve the bytes of float32 gradients.
        sparse_as_dense: gradients of embeddings travel as dense tensors; pays if most rows are
            used in every step.
        gradient_predivide_factor: splits the division of the average: by this factor before the
            sum, by the rest after it. Sums are taken in float32, so it matters with fp16 only.
        op: ``hvd.Average``, or ``hvd.Sum`` to leave the division to the learning rate, or
            ``hvd.Adasum`` (with ``sparse_as_dense``) to decide between both by the gradients'
            directions.
        backward_passes_per_step: local steps whose gradients are added up before an update; sets
            the optimizer's own ``gradient_accumulation_steps``. Keras 3 only.
        average_aggregated_gradients: with ``backward_passes_per_step``, apply the mean of the local
            steps instead of their sum.
        num_groups: exchange the gradients in this many requests. Default: by size, see
            ``HVD_BUCKET_BYTES``.
        groups: the same, or lists of variables whose gradients shall travel together.
        process_set: the ranks that train this model together; only they call this.
        scale_local_gradients: divide the gradients of local variables by ``size()``, as those of
            all others are in an average.

    Returns:
        The same optimizer.

    Raises:
        TypeError: ``optimizer`` is none of the Keras in force, nor of TensorFlow 1.
        ValueError: it is distributed already, or an argument is impossible; and in the first step,
            on every rank, if the ranks' models differ.

    Example:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
        model.compile(optimizer=optimizer, loss="mse")
    """
    rank_info.rank()  # says so, if init() was not called
    is_v1 = isinstance(optimizer, tf.compat.v1.train.Optimizer)
    if not is_v1 and not isinstance(optimizer, _keras_classes()):
        raise TypeError(
            f"hvd.DistributedOptimizer: got {optimizer!r}, expected a keras.optimizers.Optimizer, "
            "such as keras.optimizers.Adam(), or a tf.compat.v1.train.Optimizer. For a name use "
            f"keras.optimizers.get(name). {_other_keras(optimizer)}"
        )
    manner = exchange.Manner(
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        device_dense=device_dense,
        device_sparse=device_sparse,
        gradient_predivide_factor=gradient_predivide_factor,
        scale_local_gradients=scale_local_gradients,
        process_set=process_set,
    )
    target = optimizer
    if not is_v1 and isinstance(optimizer, _loss_scale_class()):
        target = optimizer.inner_optimizer
    if is_distributed(target):
        raise ValueError(
            f"hvd.DistributedOptimizer: this {type(target).__name__} is distributed already. "
            "Wrap an optimizer once."
        )
    name = name or f"optimizer {next(_numbers[process_set.id()])}"
    chosen = exchange.groups(num_groups, groups)
    passes = _accumulate(target, backward_passes_per_step)
    if is_v1:
        tensorflow_v1.Distribution(target, name, manner, chosen)
        return optimizer
    sync_batch_norm.synchronize_between_processes()
    keras_callbacks.cover_all_ranks()
    if is_legacy:
        local = legacy_keras.Distribution(target, name, manner, chosen).register_local_var
        optimizer.register_local_var = local
        return optimizer
    local_sum = 1 if average_aggregated_gradients else passes
    _Distribution(target, name, manner, chosen, local_sum).attach(optimizer)
    loss_scale.agree_on_finite_gradients()
    return optimizer


def PartialDistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: keras.optimizers.Optimizer,
    *args: Any,
    local_layers: keras.layers.Layer | Iterable[keras.layers.Layer] | None = None,
    **kwargs: Any,
) -> keras.optimizers.Optimizer:
    """``DistributedOptimizer`` for models with layers that belong to one rank.

    Args:
        optimizer, args, kwargs: as in ``DistributedOptimizer``.
        local_layers: layers, built already, whose gradients stay on this rank.

    Returns:
        The same optimizer.

    Raises:
        ValueError: a local layer is not built; and as ``DistributedOptimizer``.
    """
    distributed = DistributedOptimizer(optimizer, *args, **kwargs)
    for variable in local_variables(local_layers):
        distributed.register_local_var(variable)
    return distributed


def local_variables(layers: keras.layers.Layer | Iterable[keras.layers.Layer] | None) -> list[Any]:
    """The trainable variables of layers that belong to this rank alone."""
    if layers is None:
        return []
    if isinstance(layers, keras.layers.Layer):
        layers = [layers]
    layers = list(layers)
    for layer in layers:
        if not layer.built:
            raise ValueError(
                f"local layer {layer.name!r} has no variables yet. Build the model first: give it "
                "an Input, or call it once."
            )
    return [variable for layer in layers for variable in layer.trainable_variables]


def is_distributed(optimizer: Any) -> bool:
    """Whether ``DistributedOptimizer`` was applied to this very object."""
    return hasattr(optimizer, "_hvd_distribution")


def _keras_classes() -> tuple[type, ...]:
    return legacy_keras.classes() if is_legacy else (keras.optimizers.Optimizer,)


def _loss_scale_class() -> Any:
    # tf_keras has two such classes; this name stands for both.
    home = keras.mixed_precision if is_legacy else keras.optimizers
    return home.LossScaleOptimizer


def _other_keras(optimizer: Any) -> str:
    """What to do about an optimizer of the Keras that is not in force."""
    home = type(optimizer).__module__.partition(".")[0]
    if is_legacy and home == "keras":
        return "This one is of Keras 3, but TF_USE_LEGACY_KERAS is set: unset it."
    if not is_legacy and home == "tf_keras":
        return "This one is of tf_keras: set TF_USE_LEGACY_KERAS=1 for that."
    return ""


class _Distribution(exchange.Distribution):
    """What a Keras 3 optimizer gains. Lives in it as an attribute, for its class must stay."""

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        name: str,
        manner: exchange.Manner,
        groups: exchange.Groups,
        local_sum: int,
    ) -> None:
        super().__init__(name, manner, groups)
        self.optimizer = optimizer
        self.local_sum = local_sum  # Keras averages over local steps; times this, it is their sum
        # The plan of the step, and for each gradient that Keras will clip its place in the plan,
        # or None if it stays local.
        self.step: tuple[exchange.Plan, list[int | None]] | None = None

    def attach(self, outermost: keras.optimizers.Optimizer) -> None:
        self.optimizer._hvd_distribution = self
        self.optimizer.apply = self.apply
        self.optimizer._clip_gradients = self.clip_gradients
        outermost.register_local_var = self.register_local_var

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """In place of ``Optimizer.apply``, which every step calls."""
        keras_apply = type(self.optimizer).apply
        if self.manner.process_set.size() == 1 or len(grads) == 0:
            keras_apply(self.optimizer, grads, trainable_variables)
            return
        variables = trainable_variables
        if variables is None:
            variables = self.optimizer._trainable_variables
        variables = list(variables)
        grads = self.manner.densified(grads)
        shared = [i for i, v in enumerate(variables) if exchange.key(v) not in self.local]
        plan = self.plan([variables[i] for i in shared], [grads[i] for i in shared])
        for i, gradient in zip(shared, plan.complete([grads[i] for i in shared]), strict=True):
            grads[i] = gradient
        present = [i for i, gradient in enumerate(grads) if gradient is not None]
        overwritten = [i for i in present if _overwritten(variables[i])]
        if overwritten:
            # Such "gradients" (float8 scales) are new values; Keras takes the largest of several.
            largest = ops.grouped_allreduce(
                [grads[i] for i in overwritten],
                op=ops.Max,
                name=f"{self.name} overwritten",
                process_set=self.manner.process_set,
            )
            for i, value in zip(overwritten, largest, strict=True):
                grads[i] = value
        rest = [i for i in present if i not in overwritten]
        place = {i: p for p, i in enumerate(shared)}
        self.step = plan, [place.get(i) for i in rest]
        if isinstance(self.optimizer, keras.optimizers.MultiOptimizer):
            # Its parts update, it does not.
            for i, gradient in zip(rest, self._exchange([grads[i] for i in rest]), strict=True):
                grads[i] = gradient
        keras_apply(self.optimizer, grads, trainable_variables)

    def clip_gradients(self, grads: Sequence[Any]) -> Any:
        """In place of ``_clip_gradients``, which every real update calls once, and first.

        Keras calls it after accumulation and before all that looks at the gradients.
        """
        if self.manner.process_set.size() > 1:
            grads = self._exchange(grads)
        if self.local_sum > 1:
            grads = [g if g is None else g * tf.constant(self.local_sum, g.dtype) for g in grads]
        return type(self.optimizer)._clip_gradients(self.optimizer, grads)

    def _exchange(self, grads: Sequence[Any]) -> list[Any]:
        assert self.step is not None  # apply() comes first
        plan, places = self.step
        everything: list[Any] = [None] * len(plan.entries)
        for place, gradient in zip(places, grads, strict=True):
            if place is not None:
                everything[place] = gradient
        everything = plan.exchange(everything, self.manner)
        return [
            self.manner.scale_local(gradient) if place is None else everything[place]
            for place, gradient in zip(places, grads, strict=True)
        ]


def _accumulate(optimizer: keras.optimizers.Optimizer, passes: int) -> int:
    if not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step is {passes!r}, expected an integer from 1.")
    if passes == 1:
        return 1
    if not hasattr(optimizer, "gradient_accumulation_steps"):
        raise ValueError(
            f"backward_passes_per_step is {passes}, but a {type(optimizer).__name__} of tf_keras "
            "or TensorFlow 1 cannot accumulate gradients. Use Keras 3 (unset TF_USE_LEGACY_KERAS), "
            "or leave it out and use a larger batch."
        )
    own = optimizer.gradient_accumulation_steps
    if own or optimizer.built or isinstance(optimizer, keras.optimizers.MultiOptimizer):
        raise ValueError(
            f"backward_passes_per_step is {passes}, but this {type(optimizer).__name__} "
            + (f"has gradient_accumulation_steps={own} already" if own else "is built already")
            + ". Set gradient_accumulation_steps when you make the optimizer, and leave "
            "backward_passes_per_step out."
        )
    optimizer.gradient_accumulation_steps = passes
    return passes


def _overwritten(variable: Any) -> bool:
    return bool(getattr(variable, "overwrite_with_gradient", False))
