"""``DistributedOptimizer`` and ``DistributedGradientTape``: fed with the gradients of all."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvd_keras import ops
from hvd_keras.compat import legacy_keras, tensorflow_v1
from hvd_keras.gradients import (
    agreement,
    missing_calls,
    model_ranks,
    origin,
    reducer,
    shards,
    zero,
)
from hvd_keras.ops.reduction import Compression, Compressor, wire_dtype
from hvd_keras.runtime import agree, log, rank_info
from hvd_keras.runtime.keras import innermost, is_legacy, keras, optimizer_classes
from hvd_keras.runtime.process_sets import ProcessSet, ThisRank, global_process_set, of_hosts
from hvd_keras.training import rounds


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
    shard_state: bool = False,
    sync_every: int | None = None,
    outer_optimizer: keras.optimizers.Optimizer | None = None,
    inner_process_set: ProcessSet | str | None = None,
    fragments: int = 1,
) -> keras.optimizers.Optimizer:
    """Make a Keras optimizer apply the gradients of all ranks.

    Each update first averages the gradients over the ranks, after local gradient accumulation and
    before clipping, weight decay and moving averages: N ranks with batch B behave as one process
    with batch N·B. Scale the learning rate as you would for that batch, usually by ``hvd.size()``.

    The optimizer itself is changed and returned: its class, its configuration and its state stay
    what they were, so a saved model loads without hvd_keras. It gains a method
    ``register_local_var(variable)``: a variable whose gradient stays on this rank, for layers that
    are not copies of each other.

    Args:
        optimizer: any ``keras.optimizers.Optimizer``, built or not, with all its options, or a
            name, such as "adam", for its defaults; one of tf_keras, also of its ``legacy`` family,
            if ``TF_USE_LEGACY_KERAS=1`` is set; or a ``tf.compat.v1.train.Optimizer``, whose
            ``compute_gradients`` averages then.
        name: identifies the optimizer on all ranks. Default: its number among those that this
            process has used.
        device_dense: the TensorFlow device on which dense gradients are exchanged; default: theirs.
        device_sparse: the same for sparse gradients.
        compression: ``hvd.Compression.fp16`` or ``.bf16`` halve the bytes of float32 gradients.
        sparse_as_dense: gradients of embeddings are dense, also on one rank; pays if most rows are
            used in every step.
        gradient_predivide_factor: splits the division of the average: by this factor before the
            sum, by the rest after it. Sums are taken in float32, so this changes rounding alone.
        op: ``hvd.Average``, or ``hvd.Sum`` to leave the division to the learning rate, or
            ``hvd.Adasum`` (with ``sparse_as_dense``) to decide between both by the gradients'
            directions.
        backward_passes_per_step: local steps whose gradients are added up before an update; sets
            the optimizer's own ``gradient_accumulation_steps``, or is equal to that of a loaded
            one; left out, Keras takes their mean. They are exchanged once per update, or in each
            step if the optimizer's class has an ``apply`` of its own, which may clip them. Not for
            optimizers of TensorFlow 1, nor inside a LossScaleOptimizer of tf_keras.
        average_aggregated_gradients: with ``backward_passes_per_step``, apply the mean of the local
            steps instead of their sum.
        num_groups: exchange the gradients in this many requests. Default: by size, see
            ``HVD_BUCKET_BYTES``.
        groups: the same, or lists of variables whose gradients shall travel together.
        process_set: the ranks that train this model together; only they call this.
        scale_local_gradients: divide the gradients of local variables by ``size()``, as those of
            all others are in an average.
        shard_state: each rank holds 1/N of the optimizer's slots: each variable has one rank that
            updates it and gives its values to all. The weights are those of a training without,
            bit for bit on CPUs (with ``global_clipnorm`` in graphs, up to rounding). See
            docs/embeddings.md.
        sync_every: for slow networks: each rank makes so many updates of its own, from common
            weights, before anything is exchanged. Then the mean of the ranks' weights is common
            (LocalSGD), and of moving statistics and averages; an epoch's end, too, is such a sync,
            before validation and callbacks. In ``fit`` only. Choose the learning rate for the batch
            of one rank. See docs/using/slow-networks.md.
        outer_optimizer: with ``sync_every``, makes the common weights from the mean difference to
            those before, as ``SGD(0.7, momentum=0.9, nesterov=True)`` (DiLoCo). Only
            ``hvd.callbacks.Checkpoint`` saves its state.
        inner_process_set: with ``sync_every``, ranks that average their gradients in each step:
            "host", or the set that this rank is in. Each rank of ``process_set`` is in one.
        fragments: with ``sync_every``, sync as many parts of the weights in turn, each during the
            ``sync_every / fragments`` updates that follow (streaming DiLoCo). Their differences may
            travel with ``hvd.Compression.int8``: what rounding loses is sent later.

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
    if isinstance(optimizer, str):
        optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, optimizer_classes):
        raise TypeError(
            f"hvd.DistributedOptimizer: got {optimizer!r}, expected a keras.optimizers.Optimizer, "
            "such as keras.optimizers.Adam(), or a tf.compat.v1.train.Optimizer. "
            f"{_other_keras(optimizer)}"
        )
    is_v1 = isinstance(optimizer, tf.compat.v1.train.Optimizer)
    inner = process_set
    in_rounds = sync_every, outer_optimizer, inner_process_set
    if any(given is not None for given in in_rounds) or fragments != 1:
        _check_rounds(optimizer, sync_every, outer_optimizer, op, shard_state)
        _check_sent(sync_every, fragments, outer_optimizer, compression, process_set.size())
        inner = _inner_set(inner_process_set, process_set)
    # In rounds, int8 is for their differences alone.
    is_int8 = fragments != 1 and compression is Compression.int8
    options = agreement.ExchangeOptions(
        op=op,
        compression=Compression.none if is_int8 else compression,
        sparse_as_dense=sparse_as_dense,
        device_dense=device_dense,
        device_sparse=device_sparse,
        gradient_predivide_factor=gradient_predivide_factor,
        scale_local_gradients=scale_local_gradients,
        process_set=inner,
    )
    # Compiled models with mixed_float16 have a LossScaleOptimizer; what updates is the one in it.
    # tf_keras has two such classes; this name stands for both.
    home = keras.mixed_precision if is_legacy else keras.optimizers
    target = optimizer
    if not is_v1 and isinstance(optimizer, home.LossScaleOptimizer):
        target = optimizer.inner_optimizer
    model_ranks.refuse_distributed(target)
    chosen = agreement.groups(num_groups, groups)
    if shard_state:
        _check_shares(target, options, chosen, is_v1)
    passes = backward_passes_per_step
    if is_v1 and passes != 1:
        raise ValueError(
            f"backward_passes_per_step is {passes}, but a {type(target).__name__} of TensorFlow 1 "
            "cannot accumulate gradients. Use an optimizer of Keras, or leave it out and use a "
            "larger batch."
        )
    model_ranks.accumulate(target, passes)
    if is_v1:
        tensorflow_v1.Reducer(target, name, options, chosen)
    elif is_legacy:
        reducer_of_legacy = legacy_keras.Reducer(
            target, name, options, chosen, passes, average_aggregated_gradients
        )
        optimizer.register_local_var = reducer_of_legacy.register_local
    else:
        # Keras averages over local steps.
        local_sum = 1 if average_aggregated_gradients else passes
        shares = shard_state and process_set.size() > 1
        kind = zero.ShardedReducer if shares else reducer.KerasReducer
        own = kind(target, optimizer, name, options, chosen, local_sum)
        if sync_every is not None and inner.size() < process_set.size():
            wire = "int8" if is_int8 else wire_dtype(compression).name  # type: ignore[union-attr]
            how = outer_optimizer, process_set, inner_process_set, wire, fragments
            own.rounds = rounds.Rounds(target, name, sync_every, *how)
        elif outer_optimizer is not None and process_set.rank() == 0:
            log.warn_once(
                "hvd.DistributedOptimizer: outer_optimizer does nothing, because all ranks average "
                "their gradients in each step: they are one inner_process_set."
            )
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
        ValueError: a local layer is not built, or none; and as ``DistributedOptimizer``.
    """
    variables = local_variables(local_layers)
    distributed = DistributedOptimizer(optimizer, *args, **kwargs)
    for variable in variables:
        distributed.register_local_var(variable)
    return distributed


def local_variables(layers: keras.layers.Layer | Iterable[keras.layers.Layer] | None) -> list[Any]:
    """All variables of built layers that belong to this rank alone; ValueError for others."""
    if layers is None:
        return []
    is_one = isinstance(layers, (keras.layers.Layer, str)) or not isinstance(layers, Iterable)
    layers = [layers] if is_one else list(layers)
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(f"local_layers has {layer!r}, expected layers of Keras.")
        if not layer.built:
            raise ValueError(
                f"local layer {layer.name!r} has no variables yet. Build the model first: give it "
                "an Input, or call it once."
            )
    return [variable for layer in layers for variable in layer.variables]


def is_distributed(optimizer: Any) -> bool:
    """Whether ``DistributedOptimizer`` was applied to this very object."""
    return hasattr(optimizer, "_hvd_reducer")


def _other_keras(optimizer: Any) -> str:
    """Return what to do about an optimizer of the Keras that is not in force."""
    home = type(optimizer).__module__.partition(".")[0]
    if is_legacy and home == "keras":
        return "This one is of Keras 3, but TF_USE_LEGACY_KERAS is set: unset it."
    if not is_legacy and home == "tf_keras":
        return "This one is of tf_keras: set TF_USE_LEGACY_KERAS=1 for that."
    return ""


def _check_shares(
    optimizer: Any, options: agreement.ExchangeOptions, groups: agreement.Groups, is_v1: bool
) -> None:
    reason = None
    if is_legacy or is_v1:
        reason = f"it needs an optimizer of Keras 3, and this {type(optimizer).__name__} is not"
    elif options.op is ops.Adasum:
        reason = "op=hvd.Adasum needs all gradients on all ranks. Use hvd.Average or hvd.Sum"
    elif groups:
        reason = "it packs gradients by their owners. Leave num_groups and groups out"
    if reason:
        raise ValueError(f"hvd.DistributedOptimizer: shard_state=True: {reason}.")
    zero.check_suitable(optimizer)


def _check_rounds(optimizer: Any, every: Any, outer: Any, op: Any, shard_state: bool) -> None:
    """Raise ValueError or TypeError if an optimizer cannot train in rounds."""
    own = type(innermost(optimizer)).__name__
    reason = None
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        reason = f"got {every!r}, expected a positive number of updates"
    elif is_legacy or isinstance(optimizer, tf.compat.v1.train.Optimizer):
        reason = f"it needs an optimizer of Keras 3, and this {own} is not"
    elif op is not ops.Average:
        reason = f"got op={op}, but the ranks' weights are averaged. Use hvd.Average"
    elif shard_state:
        reason = "shard_state=True exchanges weights in each step. Leave one of both out"
    elif outer is not None and not isinstance(outer, keras.optimizers.Optimizer):
        reason = f"outer_optimizer is {outer!r}, expected a keras.optimizers.Optimizer"
    elif outer is not None and (
        outer.built or is_distributed(outer) or outer is optimizer or hasattr(outer, "_hvd_alone")
    ):
        reason = "outer_optimizer is in use already. Make one for this optimizer alone"
    elif outer is not None and type(outer).__name__ == "ScheduleFreeAdamW":
        reason = "outer_optimizer has slots that begin as each rank's weights. Use another"
    if reason:
        raise ValueError(f"hvd.DistributedOptimizer: sync_every: {reason}.")
    rounds.check_suitable(innermost(optimizer))


def _check_sent(every: Any, fragments: Any, outer: Any, compression: Any, ranks: int) -> None:
    """Raise ValueError if an optimizer cannot send the differences of rounds so."""
    reason = None
    if not isinstance(fragments, int) or fragments < 1 or every % fragments:
        reason = f"fragments={fragments!r}, expected a number that divides {every}"
    elif fragments > 1 and getattr(outer, "gradient_accumulation_steps", None):
        reason = "with fragments, outer_optimizer must not have gradient_accumulation_steps"
    elif compression is Compression.int8 and (fragments == 1 or ranks > 42):
        reason = (
            f"int8 needs fragments, and at most 42 ranks, not {ranks}. Use hvd.Compression.bf16"
        )
    elif wire_dtype(compression) is None and compression is not Compression.int8:
        reason = "compression must be hvd.Compression.none, .fp16, .bf16 or .int8"
    if reason:
        raise ValueError(f"hvd.DistributedOptimizer: sync_every: {reason}.")


def _inner_set(inner: Any, process_set: ProcessSet) -> ProcessSet:
    """Return the ranks that average their gradients in each step. All ranks call it."""
    process_set.check_included("DistributedOptimizer")
    if inner is None:
        return ThisRank() if process_set.size() > 1 else process_set
    if inner == "host" and process_set.id() == global_process_set.id():
        return of_hosts()
    if not isinstance(inner, ProcessSet):
        raise ValueError(
            f'hvd.DistributedOptimizer: inner_process_set is {inner!r}, expected "host" (if all '
            "ranks train the model) or an hvd.ProcessSet."
        )
    inner.check_included("DistributedOptimizer with inner_process_set")
    sets = agree.gather_json("inner_process_set", inner.ranks, process_set)
    of_rank = dict(zip(process_set.ranks, sets, strict=True))
    if any(of_rank.get(member) != ranks for ranks in sets for member in ranks):
        raise ValueError(
            "hvd.DistributedOptimizer: each rank that trains the model must pass the "
            "inner_process_set that it is in, of such ranks alone, but they pass "
            f"{agree.by_rank(sets, process_set)}."
        )
    return inner


class DistributedGradientTape:
    """A ``tf.GradientTape`` whose ``gradient`` is taken over all ranks.

    Args:
        gradtape: the tape to wrap. Its other methods (``watch``, ``stop_recording``, use as a
            context manager) stay the same.
        device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor,
            num_groups, groups, process_set, scale_local_gradients: as in ``DistributedOptimizer``.

    Raises:
        TypeError: ``gradtape`` is not a ``tf.GradientTape``.
        ValueError: an argument is impossible, or ``init()`` was not called.

    Example:
        hvd.broadcast_variables(model.variables, root_rank=0)
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    """

    def __init__(
        self,
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: type[Compressor] = Compression.none,
        sparse_as_dense: bool = False,
        op: ops.ReduceOp = ops.Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[Any]] | None = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        rank_info.rank()  # raises if init() was not called
        if not isinstance(gradtape, tf.GradientTape):
            raise TypeError(
                f"hvd.DistributedGradientTape: got {gradtape!r}, expected a tf.GradientTape."
            )
        self._tape = gradtape
        options = agreement.ExchangeOptions(
            op=op,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            device_dense=device_dense,
            device_sparse=device_sparse,
            gradient_predivide_factor=gradient_predivide_factor,
            scale_local_gradients=scale_local_gradients,
            process_set=process_set,
        )
        self._reducer = _reducer(options, agreement.groups(num_groups, groups))
        self._local: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name == "_tape":  # of a copy that is being made
            raise AttributeError(name)
        if name in ("jacobian", "batch_jacobian"):
            raise NotImplementedError(
                f"hvd.DistributedGradientTape has no {name} over all ranks. Call that of the "
                "tf.GradientTape, and hvd.allreduce its result."
            )
        return getattr(self._tape, name)

    def __enter__(self) -> "DistributedGradientTape":
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def register_local_source(self, source: Any) -> None:
        """Keep the gradient of this variable or tensor on this rank: it is not exchanged."""
        self._local.append(source)
        if hasattr(source, "assign") and self._reducer.process_set.size() > 1:
            model_ranks.local_variables.add(source)

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """``tf.GradientTape.gradient``, averaged (or summed) over the ranks.

        Args:
            target, sources, …: as in ``tf.GradientTape.gradient``.

        Returns:
            Gradients in the structure of ``sources``; None if no rank has one.

        Raises:
            ValueError: (on every rank) the ranks' sources differ in number, name, dtype or shape.
        """
        several = self._reducer.process_set.size() > 1
        if several and model_ranks.averages_rows and not missing_calls.fit_is_known.get():
            missing_calls.tell(
                "fit does not know that several ranks train this model, whose train_step has an "
                "hvd.DistributedGradientTape: it neither compares their rows nor weighs losses. "
                f"{missing_calls.ADD_THE_CALLBACK}",
                self._reducer.process_set,
            )
        # This rank's, of any structure; they travel as a flat list.
        with agree.within(origin.in_tape, True):
            gradients = self._tape.gradient(target, sources, *args, **kwargs)
        flat = tf.nest.flatten(sources)
        origin.forget(flat)  # the script may change what is exchanged
        with missing_calls.exchange_by("tape"):
            reduced = self._reducer.reduce(tf.nest.flatten(gradients), flat, self._local)
        origin.note_exchange(reduced, flat, self._reducer.process_set)
        return tf.nest.pack_sequence_as(sources, reduced)


def PartialDistributedGradientTape(  # noqa: N802 (Horovod's name)
    gradtape: tf.GradientTape,
    *args: Any,
    local_layers: keras.layers.Layer | Iterable[keras.layers.Layer] | None = None,
    **kwargs: Any,
) -> DistributedGradientTape:
    """``DistributedGradientTape`` for models with layers that belong to one rank.

    Args:
        gradtape, args, kwargs: as in ``DistributedGradientTape``.
        local_layers: built layers whose gradients stay on this rank.

    Returns:
        The tape.

    Raises:
        ValueError: a local layer is not built, or none; and as ``DistributedGradientTape``.
    """
    tape = DistributedGradientTape(gradtape, *args, **kwargs)
    for variable in local_variables(local_layers):
        tape.register_local_source(variable)
    return tape


_reducers: dict[Any, reducer.GradientReducer] = {}


def _reducer(
    options: agreement.ExchangeOptions, groups: agreement.Groups
) -> reducer.GradientReducer:
    """The reducer for all tapes with these options, since a loop makes a new tape in each step."""
    kept, ids = _reducers, groups
    if not isinstance(groups, int):
        # One of the variables keeps the reducer, which keeps them: it ends with their model.
        if (first := next(itertools.chain(*groups), None)) is not None:
            kept = vars(shards.inner_variable(first)).setdefault("_hvd_reducers", {})
        ids = tuple(tuple(map(shards.variable_id, group)) for group in groups)
    if (options, ids) not in kept:
        kept[options, ids] = reducer.GradientReducer("tape", options, groups)
    return kept[options, ids]
