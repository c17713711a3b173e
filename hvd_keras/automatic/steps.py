"""Divides the batches of a model's steps among the ranks.

Every rank reads all rows, as one process does. Its step gets the rows [r*n/N, (r+1)*n/N) of each
batch of n. Gradients are means by rows, metrics have the sums of all ranks' states, and predictions
are gathered. So what a step leaves behind is, to rounding, what one process has after it.
"""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from hvd_keras import ops
from hvd_keras.automatic import noise, probe
from hvd_keras.gradients import division, model_ranks
from hvd_keras.gradients.division import Part
from hvd_keras.hooks import broadcasting, losses, metric_states, tensorflow_fits
from hvd_keras.optimizer import DistributedOptimizer, is_distributed
from hvd_keras.runtime import agree, log, rank_info
from hvd_keras.runtime.keras import innermost, keras
from hvd_keras.runtime.process_sets import global_process_set

METHODS = {"train": "train_step", "test": "test_step", "predict": "predict_step"}

_OF_ALL = "_hvd_of_all_ranks"  # of the result of a metric
_MARK = "_hvd_is_whole"  # of a step: False if it divides its batch


# Models whose values are those of the first rank.
_equal: weakref.WeakSet[Any] = weakref.WeakSet()


def wrap_set(load: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method that changes a model's weights, perhaps to others on each rank."""

    @functools.wraps(load)
    def load_other(self: Any, *args: Any, **kwargs: Any) -> None:
        if not agree.is_leading.get():
            _equal.discard(self)
        load(self, *args, **kwargs)

    return load_other


def begin(model: Any) -> None:
    """Let all ranks train a compiled model together."""
    if model.built and model not in _equal:
        _equal.add(model)
        mine = [agree.crc(tf.convert_to_tensor(variable)) for variable in model.variables]
        if agree.gather_if_different("values of a model", mine):
            broadcasting.broadcast_variables(model.variables, 0)
    model_ranks.register_training_ranks(model, global_process_set)
    for optimizer in model_ranks.optimizers_of(model):
        is_keras = isinstance(optimizer, keras.optimizers.Optimizer)
        if is_keras and not is_distributed(innermost(optimizer)):
            # The ranks' gradients are parts of one sum, as large as those of one process: in half
            # precision they overflow when those do.
            DistributedOptimizer(optimizer, op=ops.Sum)
    if getattr(model, "jit_compile", False):
        # XLA fixes the numbers of rows, and drops the check that the ranks have the same data.
        model.jit_compile = False
        log.warn_once("hvdrun --auto trains without XLA (jit_compile=False), with equal results.")


def wrap_make(kind: str) -> Callable[[Any], Any]:
    """Return a wrapper of ``Model.make_train_function``, or of that of "test" or "predict"."""

    def wrap(make: Any) -> Any:
        @functools.wraps(make)
        def make_divided(self: Any, *args: Any, **kwargs: Any) -> Any:
            begin(self)
            method, name = METHODS[kind], f"{kind}_function"
            if not hasattr(vars(self).get(method), _MARK):
                setattr(self, method, _divided(self, getattr(self, method), kind))
            before = getattr(self, name)
            made = make(self, *args, **kwargs)
            if getattr(self, name) is not before:
                _choose(self, name, getattr(self, method), method)
            return made

        return make_divided

    return wrap


def _choose(model: Any, name: str, divided: Any, method: str) -> None:
    """Find out whether a new function of a model can be divided, by its first call or before."""
    function = getattr(model, name)
    setattr(divided, _MARK, False)
    if layers := [one.name for one in model._flatten_layers() if getattr(one, "stateful", False)]:
        # It goes on with the states of the rows that the batch before had at the same places.
        return _compute_whole(model, divided, f"layer {layers[0]!r} is stateful")
    if probe.is_known(model, method):
        return None
    if model.run_eagerly or tf.config.functions_run_eagerly():
        # What a first step creates could not be put back.
        return _compute_whole(model, divided, "it has parts of its own, and run_eagerly=True")

    def with_a_look(iterator: Any) -> Any:
        setattr(model, name, function)  # for all later steps
        batches = list(itertools.islice(iterator, model.steps_per_execution))
        if batches and (why := probe.compare(model, divided, batches[0])):
            _compute_whole(model, divided, why)
        if not batches or isinstance(iterator, list):
            return function(iterator)
        if isinstance(iterator, tf.data.Iterator):
            return function(tensorflow_fits.again(batches, iterator.element_spec))
        return function(iter(batches))

    return setattr(model, name, with_a_look)


def _compute_whole(model: Any, divided: Any, why: str) -> None:
    setattr(divided, _MARK, True)
    if rank_info.rank() > 0:
        return
    log.warn_once(
        f"hvdrun --auto does not divide the {divided.__name__} of model {model.name!r}, as {why}. "
        "Every rank computes all rows, with equal results, but no faster than one process."
    )


def _divided(model: Any, step: Any, kind: str) -> Any:
    """A step of a model that gets the whole batch, and computes this rank's rows of it."""

    @functools.wraps(step)
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def one_step(data: Any) -> Any:
        if agree.is_building.get() or division.current.get() is not None:
            return step(data)
        part, mine = _divide(data, getattr(one_step, _MARK))
        draws = noise.Draws(None if part.is_whole else part)
        if kind == "predict":
            with agree.within(noise.current, draws):
                return _gathered(step, data, mine, part)
        found = list(_metrics_of(model))
        # What runs eagerly as a whole may be impossible to trace.
        if not all(map(_has_variables, found)) and not (part.is_whole and tf.executing_eagerly()):
            _create(step, mine)
            found = list(_metrics_of(model))
        with (
            agree.within(division.current, part),
            agree.within(noise.current, draws),
            losses.weighing(model, global_process_set),
            _of_all_ranks(found, part) as merge,
        ):
            logs = step(mine)
            merge()
            return _logs_of_all(logs, part)

    setattr(one_step, _MARK, False)
    return one_step


def _logs_of_all(logs: Any, part: Part) -> Any:
    """Numbers that a step of the script's returns, which are no results of metrics."""
    leaves = tf.nest.flatten(logs)
    own = [i for i, v in enumerate(leaves) if tf.is_tensor(v) and not hasattr(v, _OF_ALL)]
    places = [i for i in own if leaves[i].dtype.is_floating and leaves[i].shape.rank == 0]
    if places:
        shares = [tf.cast(part.share, leaves[i].dtype) * leaves[i] for i in places]
        means = ops.reduce_tensors(shares, op=ops.Sum, name="logs of a step")
        for i, mean in zip(places, means, strict=True):
            leaves[i] = mean
    return tf.nest.pack_sequence_as(logs, leaves)


def _divide(data: Any, is_whole: bool) -> tuple[Part, Any]:
    """This rank's rows of a batch."""
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    leaves = [
        leaf if isinstance(leaf, _COMPOSITE) else tf.convert_to_tensor(leaf) for leaf in leaves
    ]
    shapes = [leaf.shape for leaf in leaves]
    known = {shape[0] for shape in shapes if shape.rank} - {None}
    if not is_whole and (len(known) > 1 or any(shape.rank == 0 for shape in shapes)):
        raise ValueError(
            f"hvdrun --auto: batches have parts of the shapes {list(map(tuple, shapes))}, which "
            "are not all of the same number of rows, so they cannot be divided among the ranks. "
            "Give all parts as many rows as the batch, or run the script without --auto."
        )
    with tf.device("/cpu:0"):
        checks = _checks(leaves, is_whole)
    if is_whole:
        with tf.control_dependencies(checks):
            whole = tf.nest.map_structure(lambda x: x if x is None else tf.identity(x), data)
        return Part(1, 0, 1, is_whole=True), whole
    rank, size = rank_info.rank(), rank_info.size()
    rows = known.pop() if len(known) == 1 and all(s.rank for s in shapes) else _rows(leaves[0])
    with tf.control_dependencies(checks):
        start, stop = rank * rows // size, (rank + 1) * rows // size
        # A rank without rows repeats one, which counts for nothing.
        stop = max(stop, start + 1) if isinstance(rows, int) else tf.maximum(stop, start + 1)
        part = Part(rows, start, stop)
        mine = iter([_slice(leaf, part) for leaf in leaves])
    flat = [leaf if leaf is None else next(mine) for leaf in tf.nest.flatten(data)]
    return part, tf.nest.pack_sequence_as(data, flat)


_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor)


def _rows(leaf: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    return tf.cast(
        leaf.dense_shape[0] if isinstance(leaf, tf.SparseTensor) else tf.shape(leaf)[0], tf.int32
    )


def _slice(leaf: Any, part: Part) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        shape = tf.cast(leaf.dense_shape, tf.int64)
        begin = tf.concat([[tf.cast(part.start, tf.int64)], tf.zeros_like(shape[1:])], 0)
        size = tf.concat([[tf.cast(part.stop - part.start, tf.int64)], shape[1:]], 0)
        return tf.sparse.slice(leaf, begin, size)
    if isinstance(leaf, tf.RaggedTensor):
        return leaf[part.start : part.stop]
    # A copy: ops may write into a slice, which is in the memory of a generator's array, and so
    # change what the next epoch reads, in other rows on each rank.
    return tf.gather(leaf, tf.range(part.start, part.stop))


def _checks(leaves: list[Any], is_whole: bool) -> list[Any]:
    """Ops that fail on all ranks if their batches differ, or have parts of different lengths."""
    rows = [] if is_whole else [_rows(leaf) for leaf in leaves]
    crc = tf.zeros([], tf.int32)
    for number, part in enumerate(tf.nest.flatten(leaves, expand_composites=True)):
        crc += (2 * number + 1) * _hash(part)
    for count in rows:
        crc = 31 * crc + count
    # Exact in float64; all numbers are equal if the mean of the squares is the square of the mean.
    mine = tf.cast(crc & 0xFFFFF, tf.float64)
    (both,) = ops.reduce_tensors([tf.stack([mine, mine * mine])], op=ops.Sum, name="batch is equal")
    size = tf.cast(rank_info.size(), tf.float64)
    same = tf.equal(size * both[1], both[0] * both[0])
    differ = (
        "hvdrun --auto: the ranks have different data, so they cannot divide a batch. The script "
        "draws random numbers that no seed determines, or reads other files on each rank: add "
        "keras.utils.set_random_seed(1) as its first line, seeds to generators, and sort lists of "
        "files. This rank's digest of the batch: "
    )
    lengths = "hvdrun --auto: the parts of a batch have different numbers of rows: "
    return [
        tf.debugging.Assert(same, [differ, mine]),
        *(tf.debugging.Assert(tf.equal(rows[0], count), [lengths, *rows]) for count in rows[1:]),
    ]


def _hash(part: Any) -> Any:
    """A number that depends on the values of a tensor and their order."""
    if part.dtype == tf.string:
        part = tf.strings.to_hash_bucket_fast(part, 2**31 - 1)
    if part.dtype in (tf.bool, tf.float16, tf.bfloat16):
        part = tf.cast(part, tf.float32)
    if part.dtype.size >= 4:
        part = tf.bitcast(part, tf.int32)
    # [rows, columns]: all bits of all values, times odd numbers that depend on their places.
    count = tf.shape(part)[0] if part.shape.rank else 1
    table = tf.reshape(tf.cast(part, tf.int32), [count, -1])
    # Not table * …, which may write into it.
    rows = _mixed(tf.linalg.matvec(table, 2 * tf.range(tf.shape(table)[1]) + 1))
    return _mixed(tf.reduce_sum(rows * (2 * tf.range(count) + 1)))


def _mixed(number: Any) -> Any:
    number *= -1640531535  # odd, and far from powers of 2: round numbers have low bits of 0
    return tf.bitwise.bitwise_xor(number, tf.bitwise.right_shift(number, 15))


def _gathered(step: Any, data: Any, mine: Any, part: Part) -> Any:
    """The predictions for a whole batch."""
    outputs = step(mine)
    leaves = tf.nest.flatten(outputs)
    if not all(tf.is_tensor(leaf) and not isinstance(leaf, _COMPOSITE) for leaf in leaves):
        return outputs if part.is_whole else step(data)  # ragged: each rank predicts all rows
    if part.is_whole:
        return part.gather(outputs, "predictions")
    rows = _rows(tf.nest.flatten(mine)[0])
    text = "hvdrun --auto: predict returns {} rows for a part of a batch; expected one for each row"
    checks = [
        tf.debugging.Assert(tf.equal(tf.shape(x)[0], rows), [text, tf.shape(x), rows])
        for x in leaves
    ]
    with tf.control_dependencies(checks):
        return part.gather(tf.nest.map_structure(tf.identity, outputs), "predictions")


def _create(step: Any, data: Any) -> None:
    """Create the variables of metrics by a trace that never runs."""
    specs = tf.nest.map_structure(
        lambda leaf: leaf if leaf is None else tf.type_spec_from_value(leaf), data
    )
    with agree.within(agree.is_building, True):
        tf.function(step, autograph=False).get_concrete_function(specs)


def _metrics_of(model: Any) -> Iterator[Any]:
    """Yield the metrics of a model, and those inside Keras's container."""
    found = {id(metric): metric for metric in [*model.metrics, *getattr(model, "_metrics", ())]}
    for metric in found.values():
        yield metric
        yield from getattr(metric, "metrics", ())


def _has_variables(metric: Any) -> bool:
    return getattr(metric, "built", True) and bool(metric.variables or hasattr(metric, "metrics"))


@contextlib.contextmanager
def _of_all_ranks(found: list[Any], part: Part) -> Iterator[Callable[[], None]]:
    """Give metrics the states of one process: with those of all ranks' rows."""
    # Before a result is read, the changes of all metrics travel in one request.
    waiting: dict[int, tuple[Any, list[Any]]] = {}
    leaves = [metric for metric in found if not hasattr(metric, "metrics")]

    def merge() -> None:
        pairs = [
            (v, before)
            for metric, values in waiting.values()
            for v, before in zip(
                metric.variables, values or [0.0] * len(metric.variables), strict=True
            )
        ]
        waiting.clear()
        if not pairs:
            return
        changes = [tf.convert_to_tensor(v) - tf.cast(before, v.dtype) for v, before in pairs]
        if not part.is_even:
            counts = tf.greater(part.count, 0)
            changes = [tf.where(counts, change, tf.zeros_like(change)) for change in changes]
        sums = ops.reduce_tensors(changes, op=ops.Sum, name="metrics of a step")
        for (variable, before), change in zip(pairs, sums, strict=True):
            variable.assign(tf.cast(before, change.dtype) + change)

    def update(metric: Any, update_state: Any, *args: Any, **kwargs: Any) -> Any:
        adds_up = metric_states.is_summable(metric) and not _is_ratio(metric, *args, **kwargs)
        if metric.variables and not adds_up:
            # All ranks compute it from all rows.
            args, kwargs = part.gather((args, kwargs), f"metric {metric.name}")
            with agree.within(division.current, None):
                return update_state(*args, **kwargs)
        if id(metric) not in waiting:
            waiting[id(metric)] = metric, [tf.identity(v) for v in metric.variables]
        return update_state(*args, **kwargs)

    def result(metric: Any, of_it: Any) -> Any:
        merge()
        value = of_it()
        for leaf in tf.nest.flatten(value):
            if tf.is_tensor(leaf):
                setattr(leaf, _OF_ALL, True)
        return value

    for metric in leaves:
        metric.update_state = functools.partial(update, metric, metric.update_state)
        metric.result = functools.partial(result, metric, metric.result)
    try:
        yield merge
    finally:
        for metric in leaves:
            del metric.update_state, metric.result


def _is_ratio(metric: Any, y_true: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> bool:
    """Whether a metric is a function of the script's that returns one number for all rows."""
    function = getattr(metric, "_fn", None)
    if function is None or getattr(function, "__module__", "").startswith("keras.src."):
        return False
    value = tf.convert_to_tensor(function(y_true, y_pred, **metric._fn_kwargs))
    return bool(value.shape.rank == 0)


def wrap_mean(update_state: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``keras.metrics.Mean.update_state``: one number of each rank counts by its rows."""

    def update(self: Any, values: Any, sample_weight: Any = None) -> Any:
        part = division.current.get()
        if part is not None and sample_weight is None:
            values = tf.convert_to_tensor(values)
            if values.shape.rank == 0:
                sample_weight = tf.cast(part.share, self.dtype)
        return update_state(self, values, sample_weight=sample_weight)

    return update


def wrap_gradient(gradient: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``tf.GradientTape.gradient``: a rank's loss counts by its rows."""

    def by_rows(
        self: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        part = division.current.get()
        # Other gradients, such as those of a penalty, are parts of a loss.
        is_update = any(getattr(s, "trainable", False) for s in tf.nest.flatten(sources))
        if is_update and part is None and not agree.is_building.get():
            division.own_loops.append(type(target).__name__)
        if is_update and part is not None:
            # Not of the result: what other ranks' losses add to it counts by their rows.
            flat = list(map(tf.convert_to_tensor, tf.nest.flatten(target)))
            if output_gradients is None:
                output_gradients = [tf.ones_like(one) for one in flat]
            given = zip(flat, tf.nest.flatten(output_gradients), strict=True)
            scaled = [tf.cast(part.share, one.dtype) * factor for one, factor in given]
            output_gradients = tf.nest.pack_sequence_as(target, scaled)
        found = gradient(self, target, sources, output_gradients, *args, **kwargs)
        if is_update and (seen := probe.gradients.get()) is not None:
            seen += [one for one in tf.nest.flatten(found) if one is not None]
        return found

    return by_rows
