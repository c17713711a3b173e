"""Weights each rank's loss, so that the mean over the ranks is the loss of one process.

Most losses are means over the rows of a batch, and the mean of the ranks' means is that of all
rows. Keras divides a masked loss by the number of valid entries, though, and one with
``reduction="mean_with_sample_weight"`` by the sum of the weights: numbers that differ by rank. The
loss of all ranks is sum(n_r * loss_r) / sum(n_r), so each rank's is multiplied by
N * n_r / sum(n_r); if the ranks' batches may differ in size, so is what ``compute_loss`` returns.
Losses that are summed are multiplied by N, unless a train_step of one's own calls them, to divide
the sum itself. Those that are neither a mean nor a sum over the rows get the rows of all ranks, as
do functions that are metrics of Keras 3. Validation does alike if all ranks validate together and
average their metrics. A custom loop gets a warning, and its losses are not weighed.
"""

import collections
import contextlib
import contextvars
import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from hvd_keras import ops
from hvd_keras.gradients import agreement, missing_calls, model_ranks, origin, shards, specs
from hvd_keras.patches import divided_losses
from hvd_keras.patches.divided_losses import name_of
from hvd_keras.runtime import agree, rank_info
from hvd_keras.runtime.keras import (
    call_loss,
    divisors,
    is_legacy,
    is_of_keras,
    keras,
    overrides,
    replaced,
)
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set
from hvd_keras.training import broadcasting, fit_state, halves, row_trials


@dataclasses.dataclass
class Weighing:
    """The losses of a model that several ranks train."""

    model: Any
    process_set: ProcessSet
    averages: bool  # gradients are averaged, not summed
    is_together: Any = None  # in validation a variable: all ranks take this step
    counts_rows: bool = False  # the ranks' batches may have different numbers of rows
    # How many losses this step has computed, and other things that ranks have exchanged.
    numbers: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    has_rows_of_all: bool = False  # a loss has given one for each of them
    data: Any = None  # of this step
    is_own: bool = False  # the model has a step of its own, in which Keras calls no loss now
    logs_outputs: bool = False  # Keras logs the loss of each output, too
    # What that is multiplied by if each step counts alike in it; 0 if each row does.
    by_steps: Any = None
    # While compute_loss runs, whose result counts by rows: how many times them all ranks have, a
    # variable.
    parts: Any = None
    has_total: bool | None = None  # it has run, and has returned numbers

    def parts_of(self, rows: Any) -> Any:
        """How many times the rows of a tensor all ranks have; float64, or their number."""
        if not (self.counts_rows and _has_rows(rows)):
            return self.process_set.size()
        number = rows.nrows() if isinstance(rows, tf.RaggedTensor) else tf.shape(rows)[0]
        (total,) = ops.reduce_tensors(
            [tf.cast(number, tf.float64)],
            op=ops.Sum,
            name=self.next("rows"),
            process_set=self.process_set,
        )
        return total / tf.maximum(tf.cast(number, tf.float64), 1e-9)  # a rank may have none

    def next(self, what: str) -> str:
        """A name for the next collective of a kind in this step."""
        self.numbers[what] += 1
        return f"{what} {self.numbers[what]} of a step"

    @property
    def trains_mean(self) -> bool:
        """Whether this is a step of training whose gradients are averaged."""
        return self.averages and self.is_together is None

    def together(self, of_all: Callable[[], Any], alone: Callable[[], Any]) -> Any:
        """Compute with all ranks; in a validation of one rank alone."""
        if self.is_together is None:
            return of_all()
        return tf.cond(self.is_together, of_all, alone)


#: Those of the step that is taken.
weighing: contextvars.ContextVar[Weighing | None] = contextvars.ContextVar("losses", default=None)


_SUMS = (None, "none", "sum")  # reductions that add up rows, in the gradient of a vector


@functools.cache
def _number(what: str, dtype: tf.DType) -> Any:
    """A variable that any function in a step can read, also one that another step has traced."""
    with tf.init_scope():
        return tf.Variable(tf.cast(0, dtype), trainable=False, name=f"hvd_{what}")


def validate_together(everywhere: bool) -> None:
    """Set whether all ranks take the next steps of validation."""
    _number("validates_together", tf.bool).assign(everywhere)


def weighed(
    model: Any, process_set: ProcessSet, averages: bool, method: str
) -> AbstractContextManager[None]:
    """Weigh the losses of a model's steps: of ``method``, train_step or test_step."""
    one_step = getattr(model, method)
    one_step = getattr(one_step, "_hvd_alone", one_step)  # a fit may run within another one
    is_together = _number("validates_together", tf.bool) if method == "test_step" else None

    outside = itertools.count(1)  # numbers of steps outside of fit

    @functools.wraps(one_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        trains = method == "train_step" and not agree.is_building.get()
        counts = trains and model in fit_state.counting_rows
        trackers = getattr(getattr(model, "_compile_loss", None), "metrics", ())
        own = Weighing(model, process_set, averages, is_together, counts)
        own.is_own = overrides(model, method, "compute_loss")
        own.logs_outputs, own.data = bool(trackers), args[0] if args else None
        with contextlib.ExitStack() as stack:
            for metric in trackers:
                log = functools.partial(_log, own, metric.update_state)
                stack.enter_context(replaced(metric, "update_state", log))
            stack.enter_context(agree.within(weighing, own))
            kind = method, process_set.id(), averages, counts
            stack.enter_context(broadcasting.with_clones(model, kind))
            stack.enter_context(agree.within(origin.batch, own.data))
            stack.enter_context(agree.within(origin.has_compiled_loss, False))
            stack.enter_context(agreement.in_step_of_fit(fit_state.next_number(outside, method)))
            stack.callback(missing_calls.unaveraged.clear)
            for layer in () if is_legacy else model._flatten_layers():
                local = getattr(layer, "activity_regularizer", None)
                is_mean = row_trials.is_sum(local) and not row_trials.sums_activities()
                if local is not None and not is_mean:
                    of_all = functools.partial(_of_all_rows, own, local)
                    stack.enter_context(replaced(layer, "activity_regularizer", of_all))
            if (of_compile := getattr(model, "_compile_loss", None)) is not None:
                counted = functools.partial(_of_compile, own, of_compile, of_compile.call)
                stack.enter_context(replaced(of_compile, "call", counted))
            if (of_compile := getattr(model, "_compile_metrics", None)) is not None:
                alone = functools.partial(_update_compiled, of_compile, of_compile.update_state)
                stack.enter_context(replaced(of_compile, "update_state", alone))
            if counts:
                of_all = functools.partial(_compute_loss, own, model.compute_loss)
                stack.enter_context(replaced(model, "compute_loss", of_all))
            _leave_unweighed(stack, model.metrics)
            result = one_step(*args, **kwargs)
        if counts:
            _tell_what_counts_by_rank(own)
        return result

    step.__module__ = __name__  # where AutoGraph leaves it alone
    step._hvd_alone = one_step  # type: ignore[attr-defined]
    return replaced(model, method, step)


def _compute_loss(own: Weighing, compute_loss: Any, *args: Any, **kwargs: Any) -> Any:
    """Let all that a model adds up as its loss count by rows, as on one process."""
    given = dict(zip(("x", "y", "y_pred"), args, strict=False)) | kwargs
    rows = next((one for one in tf.nest.flatten(given.get("y_pred")) if _has_rows(one)), None)
    if rows is None:  # losses are weighed by themselves
        return compute_loss(*args, **kwargs)
    parts = _number("parts", tf.float64)
    parts.assign(own.parts_of(rows))
    with replaced(own, "parts", parts), agree.within(shards.parts, parts):
        value = compute_loss(*args, **kwargs)
    own.has_total = own.has_total or False

    def by_rows(part: Any) -> Any:
        if not getattr(getattr(part, "dtype", None), "is_floating", False):
            return part
        own.has_total = True
        return _with_gradient_of(tf.cast(own.process_set.size() / parts, part.dtype) * part, part)

    return tf.nest.map_structure(by_rows, value)  # one's own may return several


def _has_rows(one: Any) -> bool:
    return isinstance(one, (tf.Tensor, tf.RaggedTensor)) and one.shape.rank != 0


def _update_compiled(
    metrics: Any, update: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    if not metrics.built:
        metrics.build(y_true, y_pred)  # as it would itself
    with contextlib.ExitStack() as stack:
        _leave_unweighed(stack, metrics.metrics)
        return update(y_true, y_pred, sample_weight)


def _leave_unweighed(stack: contextlib.ExitStack, metrics: Sequence[Any]) -> None:
    """Let losses that a metric computes itself be this rank's, as its state is."""
    for metric in metrics:
        if not isinstance(metric, keras.metrics.Mean) and not hasattr(metric, "metrics"):
            alone = functools.partial(_update_unweighed, metric.update_state)
            stack.enter_context(replaced(metric, "update_state", alone))


def _update_unweighed(update: Any, *args: Any, **kwargs: Any) -> Any:
    with agree.within(weighing, None), agree.within(missing_calls.in_fit, True):
        return update(*args, **kwargs)


def _is_compiled(model: Any, loss: Any) -> bool:
    """Whether tf_keras calls a loss that compile has got, of which it takes the sum or the mean."""
    compiled = getattr(getattr(model, "compiled_loss", None), "_losses", None)
    return is_legacy and any(loss is one for one in tf.nest.flatten(compiled))


def _of_compile(own: Weighing, of_compile: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the losses of ``compile``, all of which are weighed."""
    before = own.numbers["loss"]
    with replaced(own, "is_own", False):
        value = call(*args, **kwargs)
    origin.has_compiled_loss.set(True)
    # Keras 3.6 has the losses themselves, under another name.
    flat = getattr(of_compile, "_flat_losses", None) or getattr(of_compile, "flat_losses", None)
    every = [getattr(one, "loss", one) for one in flat or ()]
    every = [loss for loss in every if loss is not None]
    given = args[2] if len(args) > 2 else kwargs.get("sample_weight")
    computed = own.is_own and all(given is not part for part in (None, *tf.nest.flatten(own.data)))
    add_up = [getattr(loss, "reduction", None) in _SUMS for loss in every]
    if own.trains_mean and own.is_own and every and all(add_up) and not own.has_rows_of_all:
        y_pred = args[1] if len(args) > 1 else None
        value = divided_losses.of_compile(every[0], value, y_pred, own)
    if computed and any(add_up):
        missing_calls.warn_if_averaged(
            "a train_step or compute_loss weighs the rows of a loss that adds them up over the "
            "ranks. If it divides the weights by a number of this rank's rows, divide by that of "
            "all: hvd.allreduce(number, op=hvd.Sum). Otherwise gradients are too large."
        )
    if own.numbers["loss"] - before < len(every) and not agree.is_building.get():
        usual = keras.losses.Loss.__call__
        names = {type(loss).__name__ for loss in every if type(loss).__call__ is not usual}
        missing_calls.tell(
            f"the __call__ of {', '.join(sorted(names))} is not that of keras.losses.Loss, so the "
            "ranks' losses are averaged as means over equally many rows. Override call instead."
        )
    return value


def _tell_what_counts_by_rank(own: Weighing) -> None:
    added = any(getattr(layer, "_losses", ()) for layer in own.model._flatten_layers())
    if own.has_total is False or (own.has_total is None and (not own.numbers["loss"] or added)):
        what = "add_loss or an activity regularizer" if own.numbers["loss"] else "no keras Loss"
        what = what if own.has_total is None else "a compute_loss that returns no tensor"
        missing_calls.tell(
            f"the ranks may have batches of different sizes, and this model trains with {what}: "
            "each rank counts alike in it, not each row. Use self.compute_loss, a Loss, or "
            "one size of batches on all ranks.",
            own.process_set,
        )


def _of_all_rows(own: Weighing, regularizer: Any, output: Any) -> Any:
    """A regularizer of all ranks' activities, which Keras divides by this rank's rows."""
    size = own.process_set.size()
    kind = row_trials.kind_of_regularizer(regularizer, output)
    if kind == "failed":
        missing_calls.warn_if_averaged(
            f"the activity regularizer {regularizer} cannot be tried on random rows, so it is "
            "taken for a sum over the rows of a batch."
        )
    adds_up = row_trials.sums_activities()
    if kind != "whole":
        value = regularizer(output)
        # A mean that Keras divides by this rank's rows; and a sum that it does not divide.
        parts = own.parts_of(output) if (kind == "mean") != adds_up else 1
        factor = 1 / parts if kind == "mean" else parts
        return own.together(lambda: value * tf.cast(factor, value.dtype), lambda: value)
    name = own.next("regularizer")

    def of_all() -> Any:
        value = regularizer(ops.allgather_rows(output, name, own.process_set))
        return value if adds_up else value / tf.cast(size, value.dtype)

    return own.together(of_all, lambda: regularizer(output))


def call(loss_call: Any, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    """Replace ``keras.losses.Loss.__call__``, which every loss and every output calls."""
    if (trial := halves.trial.get()) is not None:
        value = loss_call(loss, y_true, y_pred, sample_weight)
        trial.adds_up |= getattr(loss, "reduction", None) in _SUMS
        if value.shape.rank:
            return value
        parts = [y_pred, *filter(divided_losses.is_computed, tf.nest.flatten(y_true))]
        parts = [tf.cast(one, value.dtype) for one in parts]
        return tf.add_n([tf.reduce_mean(one + tf.square(one)) for one in parts])
    own = weighing.get()
    is_loop = rank_info.is_initialized() and rank_info.size() > 1 and not model_ranks.alone.get()
    if (own is None and (not is_loop or missing_calls.in_fit.get())) or agree.is_building.get():
        return loss_call(loss, y_true, y_pred, sample_weight)
    arguments = y_true, y_pred, sample_weight
    kind = row_trials.kind_of(loss, y_true, y_pred)
    is_weighted = sample_weight is not None or bool(divisors(loss, None, y_pred, None))
    if kind == "failed" and not is_of_keras(getattr(loss, "fn", loss)):
        missing_calls.warn_if_averaged(
            f"the loss {name_of(loss)} cannot be tried on random rows, so it is taken for a mean "
            "over the rows of a batch. If it is not, let it compare hvd.allgather of y and y_pred."
        )
    is_of_all = kind == "whole" or (kind in ("mean", "sum") and is_weighted)
    if own is not None and is_of_all and getattr(loss, "reduction", None) in (None, "none"):
        own.has_rows_of_all = True
    if own is not None:
        name = f"{own.next('loss')}, {specs.common_path(name_of(loss))}"
        own.by_steps = None

    def alone(*given: Any) -> Any:
        with agree.within(weighing, None):  # a loss may compute others
            return loss_call(*given)

    if own is None or not is_of_all:
        # tf_keras's autograph would not convert what is called to keep them.
        value, values = call_loss(loss, alone, *arguments, keeps=not is_legacy)
        weights = divisors(loss, values, y_pred, sample_weight)
        if own is None:
            _warn_in_loop(loss, kind, weights)
            if kind == "sum" or getattr(loss, "reduction", None) in _SUMS:
                value = divided_losses.of_step(loss, value, y_pred, global_process_set.size())
            return value
        is_compiled = _is_compiled(own.model, loss)
        with replaced(own, "is_own", own.is_own and not is_compiled):
            value = _weigh(own, loss, value, kind, weights, y_pred, name)
        if is_compiled:
            origin.has_compiled_loss.set(True)
            has_weights = any(map(bool, tf.nest.flatten(own.model.compiled_loss._loss_weights)))
            adds_up = getattr(loss, "reduction", None) in _SUMS and not has_weights
            if own.trains_mean and own.is_own and adds_up:
                value = divided_losses.of_compile(loss, value, y_pred, own)
        return value
    # Any function of the rows of the batch: each rank computes it of all.
    process_set = own.process_set
    # A step of one's own divides the sum by its own rows.
    divides = own.is_own and own.averages and getattr(loss, "reduction", None) == "sum"
    divides = divides and not _is_compiled(own.model, loss)

    def of_all() -> Any:
        value = alone(loss, *ops.allgather_rows(arguments, name, process_set))
        return value / tf.cast(process_set.size(), value.dtype) if divides else value

    return own.together(of_all, lambda: alone(loss, *arguments))


def _warn_in_loop(loss: Any, kind: row_trials.Kind, weights: list[Any]) -> None:
    if weights:
        missing_calls.warn_if_averaged(
            f"the loss {name_of(loss)} is divided by a number that differs by rank, such as "
            "that of the entries that a mask leaves, so the mean of the ranks' gradients "
            "is not that of one process. fit weighs it; in a custom loop use "
            'reduction="sum", and divide by the ranks\' mean of these numbers: '
            "hvd.allreduce(number)."
        )
    elif kind == "whole":
        missing_calls.warn_if_averaged(
            f"the loss {name_of(loss)} is no mean over the rows of a batch, so the mean of the "
            "ranks' gradients is not that of one process. fit computes it for the rows of all "
            "ranks; so do in a custom loop: loss(hvd.allgather(y), hvd.allgather(y_pred))."
        )


def _weigh(
    own: Weighing,
    loss: Any,
    value: Any,
    kind: row_trials.Kind,
    weights: list[Any],
    y_pred: Any,
    name: str,
) -> Any:
    reduction = "sum" if kind == "sum" else getattr(loss, "reduction", None)
    size = tf.cast(own.process_set.size(), value.dtype)
    adds_up = reduction in _SUMS
    if adds_up and own.is_own:
        value = divided_losses.of_step(loss, value, y_pred, own.process_set.size())
        if own.averages:
            reduction, weights = "mean", []
    elif adds_up and not own.averages:
        # Optimizers with op=hvd.Sum are right to leave it; a tape may average.
        missing_calls.warn_if_averaged(
            f"the loss {name_of(loss)} is a sum, and hvd.DistributedGradientTape averages its "
            "gradients over the ranks, so they are smaller than those of one process. Use "
            "op=hvd.Sum, or another reduction."
        )
    if reduction in (None, "none") and own.trains_mean:
        # The gradient of a vector is that of its sum; the vector itself is logged.
        scale = size if own.parts is None else tf.cast(own.parts, value.dtype)
        return _with_gradient_of(scale * value, value)
    is_sum = reduction == "sum"
    if is_sum and not own.averages and own.is_together is None:
        # The sum of all ranks is logged; the total of the step is weighed as a mean.
        parts = size if own.parts is None else tf.cast(own.parts, value.dtype)
        return _with_gradient_of(parts / size * value, value if own.is_own else parts * value)
    if is_sum and own.is_together is None and not own.counts_rows:
        return size * value  # the mean over N ranks of N times each rank's sum is the sum of all
    counts = own.is_together is not None or own.counts_rows
    if not (weights or is_sum or own.counts_rows or (counts and own.logs_outputs)):
        return value
    if own.is_together is not None:
        fit_state.weighed.add(own.model)
    first = tf.nest.flatten(y_pred)[0]
    is_unknown = float(first.shape[0] is None)  # how many rows it has

    def shares() -> Any:
        # Gradients of all ranks count alike; logs, and a validation's losses, count by rows.
        count = tf.cast(tf.shape(first)[0] if counts else 1, tf.float64)
        # What Keras divides by: the sum of the mask times the weights, a number per rank.
        product = [tf.cast(w, value.dtype) for w in weights]
        entries = tf.reduce_sum(functools.reduce(_product, product)) if product else count
        mine = tf.stack([tf.cast(entries, tf.float64), count, is_unknown])  # float64, [3]
        (total,) = ops.reduce_tensors(
            [mine], op=ops.Sum, name=f"weight of {name}", process_set=own.process_set
        )
        share = tf.stop_gradient(tf.math.divide_no_nan(mine, total))
        by_steps = own.process_set.size() * share[1] * tf.sign(total[2])
        return tf.stack([share[0], share[1], by_steps])

    # This rank's share of the entries, and of the rows, which is 1 / N if they are not counted.
    alone = tf.constant([1, 1, is_unknown], tf.float64)
    entries, of_rows, by_steps = tf.unstack(own.together(shares, lambda: alone))
    own.by_steps = by_steps if counts else None
    entries = tf.ones_like(entries) if is_sum else entries  # it is divided by none
    # A loss may see other rows than compute_loss, such as tokens.
    of_rows = of_rows if own.parts is None else 1 / own.parts
    logged = tf.cast(tf.math.divide_no_nan(entries, of_rows), value.dtype) * value
    if not own.counts_rows or own.parts is not None:
        return logged
    return _with_gradient_of(size * tf.cast(entries, value.dtype) * value, logged)


def update(
    update_alone: Any, metric: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """Replace ``keras.metrics.MeanMetricWrapper.update_state``.

    A function that gives no number for each row gets the rows of all ranks.
    """
    own, function = weighing.get(), metric._fn
    if own is None or is_of_keras(function) or agree.is_building.get():
        return update_alone(metric, y_true, y_pred, sample_weight)
    options = metric._fn_kwargs
    call = functools.partial(function, **options)
    tried = types.SimpleNamespace(fn=function, call=call, _fn_kwargs=options)
    kind = row_trials.kind_of(tried, y_true, y_pred)
    given = y_true, y_pred, sample_weight
    is_plain = sample_weight is None and getattr(y_pred, "_keras_mask", None) is None
    is_mean = kind == "mean" and is_plain and not own.counts_rows and own.is_together is None
    if kind in ("rows", "failed", "unknown") or is_mean:
        return update_alone(metric, *given)
    name = f"{own.next('metric')}, {specs.common_path(metric.name)}"

    def updated(rows: Any) -> Any:
        update_alone(metric, *rows)
        return tf.zeros([])  # of tf.cond

    own.together(
        lambda: updated(ops.allgather_rows(given, name, own.process_set)), lambda: updated(given)
    )


def _log(own: Weighing, update: Any, value: Any, sample_weight: Any = None) -> None:
    """Log the loss of an output as Keras: by rows, or by steps if a graph cannot tell how many."""
    if own.by_steps is not None:
        rows = 1 if sample_weight is None else sample_weight
        sample_weight = tf.where(own.by_steps > 0, 1, rows)
        value *= tf.cast(tf.where(own.by_steps > 0, own.by_steps, 1), value.dtype)
    update(value, sample_weight=sample_weight)


def _with_gradient_of(one: Any, value: Any) -> Any:
    """Return a value that has the gradient of another one."""
    return one - tf.stop_gradient(one - value)


def _product(one: Any, other: Any) -> Any:
    """As Keras multiplies a mask and weights: one of them may have a last dimension of 1 more."""
    if len(one.shape) == len(other.shape) + 1 and one.shape[-1] == 1:
        one = tf.squeeze(one, -1)
    elif len(other.shape) == len(one.shape) + 1 and other.shape[-1] == 1:
        other = tf.squeeze(other, -1)
    return one * other
