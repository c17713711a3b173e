"""Divides the batches of a model's steps among the ranks.

Every rank reads all rows. Its step gets the rows [r*n/N, (r+1)*n/N) of each batch of n. Gradients
are means by rows, metrics have the sums of all ranks' states, and predictions are gathered.
"""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras import ops
from hvd_keras.auto import noise, probe
from hvd_keras.gradients import division, model_ranks
from hvd_keras.gradients.division import Part
from hvd_keras.optimizer import DistributedOptimizer, is_distributed
from hvd_keras.patches import fit_on_tensorflow, losses
from hvd_keras.runtime import agree, log, rank_info
from hvd_keras.runtime.keras import innermost, keras
from hvd_keras.runtime.process_sets import global_process_set
from hvd_keras.training import broadcasting, metric_states

_MARK = "_hvd_is_whole"  # of a step: False if it divides its batch

# Models whose values are those of the first rank.
_equal: weakref.WeakSet[Any] = weakref.WeakSet()


def set_values(load: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
    """Replace a method that changes a model's weights, perhaps to others on each rank."""
    if not agree.is_leading.get():
        _equal.discard(model)
    load(model, *args, **kwargs)


def begin(model: Any) -> None:
    """Let all ranks train a compiled model together."""
    if model.built and model.variables and model not in _equal:
        _equal.add(model)
        broadcasting.broadcast_variables(model.variables, 0)
    model_ranks.together[model] = global_process_set
    for optimizer in model_ranks.optimizers_of(model):
        if hasattr(optimizer, "apply") and not is_distributed(innermost(optimizer)):
            # The ranks' gradients are parts of one sum, as large as those of one process: in half
            # precision they overflow when those do.
            DistributedOptimizer(optimizer, op=ops.Sum)
    if getattr(model, "jit_compile", False):
        # XLA fixes the numbers of rows, and drops the check that the ranks have the same data.
        model.jit_compile = False
        log.warn_once("hvdrun --auto trains without XLA (jit_compile=False), with equal results.")


def make(of_keras: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``Model.make_train_function``, or that of "test" or "predict"."""
    begin(model)
    _, kind, _ = of_keras.__name__.split("_")
    method, name = f"{kind}_step", f"{kind}_function"
    if not hasattr(vars(model).get(method), _MARK):
        setattr(model, method, _divided(model, getattr(model, method), method))
    before = getattr(model, name)
    of_keras(model, *args, **kwargs)
    if getattr(model, name) is not before:
        _choose(model, name, getattr(model, method), method)


def _choose(model: Any, name: str, divided: Any, method: str) -> None:
    """Find out whether a new function of a model can be divided, by its first call or before."""
    setattr(divided, _MARK, False)
    if layers := [one.name for one in model._flatten_layers() if getattr(one, "stateful", False)]:
        # It goes on with the states of the rows that the batch before had at the same places.
        return _compute_whole(model, divided, f"layer {layers[0]!r} is stateful")
    if probe.is_known(model, method):
        return None
    if model.run_eagerly or tf.config.functions_run_eagerly():
        # What a first step creates could not be put back.
        return _compute_whole(model, divided, "it has parts of its own, and run_eagerly=True")

    def look(batch: Any) -> None:
        if batch is not None and (why := probe.compare(model, divided, batch)):
            _compute_whole(model, divided, why)

    return fit_on_tensorflow.pass_first_batch(model, look, name)


def _compute_whole(model: Any, divided: Any, why: str) -> None:
    setattr(divided, _MARK, True)
    if rank_info.rank() == 0:
        log.warn_once(
            f"hvdrun --auto does not divide the {divided.__name__} of model {model.name!r}, as "
            f"{why}. Every rank computes all rows, with equal results, but no faster than one "
            "process."
        )


def _divided(model: Any, step: Any, method: str) -> Any:
    """A step of a model that gets the whole batch, and computes this rank's rows of it."""

    @functools.wraps(step)
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def one_step(data: Any) -> Any:
        if agree.is_building.get() or division.current.get() is not None:
            return step(data)
        part, mine = _divide(data, getattr(one_step, _MARK))
        draws = noise.draws(None if part.is_whole else part)
        if method == "predict_step":
            with agree.within(noise.current, draws):
                return _gathered(step, data, mine, part)
        found = _metrics_of(model)
        # What runs eagerly as a whole may be impossible to trace.
        has_all = all(metric.variables or getattr(metric, "built", False) for metric in found)
        if not has_all and not (part.is_whole and tf.executing_eagerly()):
            with agree.within(agree.is_building, True):  # a trace that never runs creates them
                tf.function(step, autograph=False).get_concrete_function(mine)
            found = _metrics_of(model)
        with (
            agree.within(division.current, part),
            agree.within(noise.current, draws),
            agree.within(losses.weighing, losses.Weighing(model, global_process_set, True)),
            _of_all_ranks(found, part) as merge,
        ):
            logs = step(mine)
            merge()
            return logs if probe.is_known(model, method) else _logs_of_all(logs, part)

    setattr(one_step, _MARK, False)
    return one_step


def _logs_of_all(logs: Any, part: Part) -> Any:
    """Numbers that a step of the script's returns: the means by rows, also of what is equal."""
    leaves = tf.nest.flatten(logs)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating and leaf.shape.rank == 0:
            # In float64, or equal numbers could change.
            mean = part.gather(tf.cast(leaf, tf.float64), f"log {i} of a step")
            leaves[i] = tf.cast(mean, leaf.dtype)
    return tf.nest.pack_sequence_as(logs, leaves)


def _divide(data: Any, is_whole: bool) -> tuple[Part, Any]:
    """This rank's rows of a batch."""
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    leaves = [leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf) for leaf in leaves]
    shapes = [leaf.shape for leaf in leaves]
    known = {shape[0] for shape in shapes if shape.rank} - {None}
    if not is_whole and (len(known) > 1 or any(shape.rank == 0 for shape in shapes)):
        raise ValueError(
            f"hvdrun --auto: batches have parts of the shapes {list(map(tuple, shapes))}; expected "
            "equally many rows in all, to divide them. Or run the script without --auto."
        )
    with tf.device("/cpu:0"):
        checks = _checks(leaves, is_whole)
    rank, size = rank_info.rank(), rank_info.size()
    rows = 1 if is_whole else known.pop() if known else _rows(leaves[0])
    with tf.control_dependencies(checks):
        start, stop = rank * rows // size, (rank + 1) * rows // size
        # A rank without rows repeats one, which counts for nothing.
        stop = max(stop, start + 1) if isinstance(rows, int) else tf.maximum(stop, start + 1)
        part = Part(rows, start, stop, is_whole)
        return part, tf.nest.map_structure(functools.partial(_slice, part), data)


def _rows(leaf: Any) -> Any:
    return tf.cast(tf.shape(leaf)[0], tf.int32)


def _slice(part: Part, leaf: Any) -> Any:
    if leaf is None or part.is_whole:
        return leaf if leaf is None else tf.identity(leaf)
    if isinstance(leaf, tf.SparseTensor):
        shape = leaf.dense_shape
        first, count = (tf.cast(n, tf.int64) for n in (part.start, part.stop - part.start))
        begin = tf.concat([[first], tf.zeros_like(shape[1:])], 0)
        return tf.sparse.slice(leaf, begin, tf.concat([[count], shape[1:]], 0))
    # A copy: ops may write into a slice, which is in the memory of a generator's array, and so
    # change what the next epoch reads, in other rows on each rank.
    return tf.gather(leaf, tf.range(part.start, part.stop))


def _checks(leaves: list[Any], is_whole: bool) -> list[Any]:
    """Ops that fail on all ranks if their batches differ, or have parts of different lengths."""
    rows = [] if is_whole else [_rows(leaf) for leaf in leaves]

    # All are equal if the mean of the squares is the squared mean, which is exact in float64.
    def digest(*parts: Any) -> Any:
        of_all = functools.reduce(lambda before, part: agree.digest(part, before), parts, 0)
        return np.array([of_all >> shift & 0x1FFFFF for shift in (0, 21, 42)], np.float64)

    parts = tf.nest.flatten(leaves, expand_composites=True)
    mine = tf.ensure_shape(tf.numpy_function(digest, parts, tf.float64), [3])
    (both,) = ops.reduce_tensors([tf.stack([mine, mine * mine])], op=ops.Sum, name="batch is equal")
    same = tf.reduce_all(tf.equal(rank_info.size() * both[1], both[0] * both[0]))
    differ = (
        "hvdrun --auto: the ranks have different data, as the script draws random numbers without "
        "a seed, or reads other files on each rank. Add keras.utils.set_random_seed(1) as its "
        "first line, seeds to generators, and sort lists of files. This rank's digest: "
    )
    lengths = "hvdrun --auto: the parts of a batch have different numbers of rows: "
    return [
        tf.debugging.Assert(same, [differ, mine]),
        *(tf.debugging.Assert(tf.equal(rows[0], count), [lengths, *rows]) for count in rows[1:]),
    ]


def _gathered(step: Any, data: Any, mine: Any, part: Part) -> Any:
    """The predictions for a whole batch."""
    outputs = step(mine)
    leaves = tf.nest.flatten(outputs)
    if not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
        return outputs if part.is_whole else step(data)  # ragged: each rank predicts all rows
    text = "hvdrun --auto: predict returns another number of rows than its part of a batch has: "
    rows = _rows((leaves if part.is_whole else tf.nest.flatten(mine))[0])
    checks = [tf.debugging.Assert(tf.equal(_rows(x), rows), [text, _rows(x), rows]) for x in leaves]
    with tf.control_dependencies(checks):
        return part.gather(tf.nest.map_structure(tf.identity, outputs), "predictions")


def _metrics_of(model: Any) -> list[Any]:
    """Return the metrics of a model, and those inside Keras's container."""
    found = [*model.metrics, *getattr(model, "_metrics", ())]
    found += [part for metric in found for part in getattr(metric, "metrics", ())]
    return list({id(metric): metric for metric in found}.values())


@contextlib.contextmanager
def _of_all_ranks(found: list[Any], part: Part) -> Iterator[Callable[[], None]]:
    """Give metrics the states of one process: with those of all ranks' rows."""
    # Before a result is read, the changes of all metrics travel in one request.
    waiting: dict[int, tuple[Any, list[Any]]] = {}
    leaves = [metric for metric in found if not hasattr(metric, "metrics")]

    def merge() -> None:
        pairs = [
            (variable, tf.zeros_like(variable) if before is None else before)
            for metric, values in waiting.values()
            for variable, before in itertools.zip_longest(metric.variables, values)
        ]
        waiting.clear()
        counts = tf.greater(part.count, 0)
        changes = [tf.where(counts, v - before, tf.zeros_like(before)) for v, before in pairs]
        if pairs:
            sums = ops.reduce_tensors(changes, op=ops.Sum, name="metrics of a step")
            for (variable, before), change in zip(pairs, sums, strict=True):
                variable.assign(before + change)

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

    def result(of_it: Any) -> Any:
        merge()
        return of_it()

    for metric in leaves:
        metric.update_state = functools.partial(update, metric, metric.update_state)
        metric.result = functools.partial(result, metric.result)
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


def update_mean(update: Any, metric: Any, values: Any, sample_weight: Any = None) -> Any:
    """Replace ``keras.metrics.Mean.update_state``: one number of each rank counts by its rows."""
    part = division.current.get()
    if part is not None and sample_weight is None and not keras.ops.shape(values):
        sample_weight = tf.cast(part.share, metric.dtype)
    return update(metric, values, sample_weight=sample_weight)


def gradient(
    of_tape: Callable[..., Any],
    tape: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replace ``tf.GradientTape.gradient``: a rank's loss counts by its rows."""
    part = division.current.get()
    # Other gradients, such as those of a penalty, are parts of a loss.
    is_update = any(getattr(s, "trainable", False) for s in tf.nest.flatten(sources))
    if is_update and part is None and not agree.is_building.get():
        division.own_loops.append(type(target).__name__)
    if is_update and part is not None:
        # Not of the result: what other ranks' losses add to it counts by their rows.
        if output_gradients is None:
            output_gradients = tf.nest.map_structure(tf.ones_like, target)
        output_gradients = tf.nest.map_structure(
            lambda one: one * tf.cast(part.share, one.dtype), output_gradients
        )
    found = of_tape(tape, target, sources, output_gradients, *args, **kwargs)
    if is_update and (seen := probe.gradients.get()) is not None:
        seen += [one for one in tf.nest.flatten(found) if one is not None]
    return found
