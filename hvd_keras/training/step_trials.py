"""Traces what a model trains by, before the training, to see whether ranks train as one process.

They do not if it does not follow from what is computed for each row of a batch; names and
operations do not tell, so it is tried on random rows. Nor if the ranks compute with different
constants, such as weights of classes in a closure.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import time
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras.gradients import model_ranks, origin, shards, specs
from hvd_keras.gradients.agreement import handle_of
from hvd_keras.runtime import agree, log
from hvd_keras.runtime.keras import is_legacy, keras, overrides, replaced
from hvd_keras.runtime.reductions import Average
from hvd_keras.training import preprocessing
from hvd_keras.training.row_trials import ROWS, TOLERANCE, is_of_keras, nodes_of, some

_TRIALS, _SECONDS = 4, 1.0
_TOLD = {
    "mixes": "combines rows of the batch other than by a mean, and each rank has its rows alone, "
    "so the ranks do not train as one process. Compute each row from itself, or, in code of your "
    "own, from those of all ranks: hvd.allgather(x).",
    "sum": "adds up the rows of the batch, and the ranks' gradients are averaged, so they are "
    "smaller than those of one process. Divide the sum by the number of this rank's rows, or use "
    "op=hvd.Sum.",
}
_HALVES = {tf.float16.as_datatype_enum, tf.bfloat16.as_datatype_enum}


@dataclasses.dataclass
class Trial:
    """What a model trains by is traced; losses of ``keras.losses`` are means of predictions."""

    subject: str = ""  # code in it that is not Keras's
    kind: str = ""  # "mixes" rows, or is their "sum"
    adds_up: bool = False  # a loss is a sum, or has a value for each row
    constants: list[list[str]] | None = None  # what floating-point ones are, and their hashes

    def what_mixes(self, model: Any) -> str:
        """Say what trains by more than a mean over the rows of a batch; "" if nothing does."""
        averages = {reducer.op for reducer in model_ranks.reducers_of(model)} == {Average}
        is_told = self.kind == "mixes" or (self.kind and averages)
        return f"{self.subject} {_TOLD[self.kind]}" if is_told else ""


_tried: weakref.WeakKeyDictionary[Any, Trial] = weakref.WeakKeyDictionary()
trial: contextvars.ContextVar[Any] = contextvars.ContextVar("trial", default=None)


def tried(model: Any, element_spec: Any) -> Trial:
    """Try once what a model trains by, if not all of it is Keras's.

    This is a step or ``compute_loss`` of its own, a loss, or a layer that is not known to work on
    each row: what it computes in inference, or by ``add_loss``. Losses of ``keras.losses``, batch
    normalisation and regularizers of activities are weighed, or documented, by themselves. The
    trial is empty if that exchanges something or cannot be tried, or if a step runs eagerly, so
    that Python would see it.
    """
    if model in _tried or is_legacy:
        return _tried.get(model, Trial())
    _tried[model] = found = Trial()
    layers = [*model._flatten_layers()]
    parts = [*layers, *(part for one in layers for part in getattr(one, "operations", ()))]
    others = {id(part): part for part in parts if not _works_by_rows(part)}.values()
    name = next((name for name in ("train_step", "compute_loss") if overrides(model, name)), "")
    is_eager = model.run_eagerly or tf.config.functions_run_eagerly()
    losses = filter(callable, tf.nest.flatten(getattr(model, "loss", None)))
    has_own_loss = not all(is_of_keras(getattr(one, "fn", one)) for one in losses)
    if (name and is_eager) or not (name or others or has_own_loss):
        return found
    names = [f"{type(one).__name__} {one.name!r}" for one in others if one is not model]
    found.subject = f"{name or 'call'} of {type(model).__name__}"
    found.subject = " or ".join(names[:3]) if names and not name else found.subject
    try:
        with warnings.catch_warnings():  # of Keras, about calls that the script does not make
            warnings.simplefilter("ignore")
            traced, rows = _traced(found, model, name, layers, element_spec)
            if not any(v in model_ranks.local_variables for v in model.variables):
                found.constants = _constants_of(traced, layers)
            if name or others:
                found.kind = _kind_of_rows(traced, model, rows, found.adds_up)
    except Exception as error:
        log.logger.debug("%s cannot be tried on random rows: %r", found.subject, error)
    return found


_MIXING = tuple(getattr(keras.layers, name, ()) for name in ("MixUp", "CutMix"))  # by chance


def _traced(
    found: Trial, model: Any, name: str, layers: Sequence[Any], element_spec: Any
) -> tuple[Any, Any]:
    """The function of a batch that a model trains by, and the specs of batches of any size."""
    total = _of_step if name == "train_step" else _of_losses

    def summed(data: Any) -> Any:
        every = tf.nest.flatten(total(model, data))
        return tf.add_n([tf.reduce_sum(tf.cast(one, tf.float32)) for one in every])

    with contextlib.ExitStack() as stack:
        stack.enter_context(agree.within(agree.is_building, True))
        stack.enter_context(agree.within(trial, found))
        # No function within may keep what is traced here.
        stack.callback(tf.config.run_functions_eagerly, tf.config.functions_run_eagerly())
        tf.config.run_functions_eagerly(True)
        for optimizer in model_ranks.optimizers_of(model, within=True):
            for method in ("apply", "apply_gradients"):
                stack.enter_context(replaced(optimizer, method, lambda *_, **__: None))
        for layer in layers:
            stack.enter_context(replaced(layer, "activity_regularizer", None))
            if isinstance(layer, (keras.layers.BatchNormalization, *_MIXING)):
                inferring = functools.partial(_infer, layer.call)  # type: ignore[attr-defined]
                stack.enter_context(replaced(layer, "call", inferring))
        rows = tf.nest.map_structure(
            lambda spec: tf.TensorSpec([None, *spec.shape[1:]], spec.dtype), element_spec
        )
        return tf.function(summed, autograph=False).get_concrete_function(rows), rows


def _constants_of(traced: Any, layers: Sequence[Any]) -> list[list[str]]:
    """The floating-point constants of a function: names with values, and hashes.

    Without what layers have learnt by ``adapt``, of which all ranks get the root's.
    """
    learnt = [value for one in layers for value in preprocessing.derived(one) if value is not None]
    digests = {f"{agree.digest(value):x}" for value in learnt}
    values = [
        (node.name, tf.make_ndarray(node.attr["value"].tensor))
        for node in itertools.chain(*nodes_of(traced))
        if node.op == "Const" and tf.as_dtype(node.attr["dtype"].type).is_floating
    ]
    values += [
        ("a tensor", outer.numpy())
        for outer in traced.captured_inputs
        if outer.dtype.is_floating and hasattr(outer, "numpy")
    ]
    described = (
        [
            f"{specs.common_path(name)} = {np.array2string(value, threshold=4, edgeitems=2)}",
            f"{agree.digest(value):x}",
        ]
        for name, value in values
    )
    return sorted(one for one in described if one[1] not in digests)


def _infer(call: Any, *args: Any, training: Any = None, **kwargs: Any) -> Any:
    return call(*args, training=False, **kwargs)


def _of_losses(model: Any, data: Any) -> Any:
    """What Keras's own step trains by."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    options = {"training": False} if getattr(model, "_call_has_training_arg", True) else {}
    return model.compute_loss(x=x, y=y, y_pred=model(x, **options), sample_weight=weight)


def _of_step(model: Any, data: Any) -> Any:
    """What the tapes of a step of one's own get the gradients of."""
    with agree.within(origin.targets, []):
        model.train_step(data)
        every = origin.targets.get() or []
    here = tf.compat.v1.get_default_graph()
    return [one for one in every if getattr(one, "graph", None) is here]


def _kind_of_rows(traced: Any, model: Any, batch: Any, is_known: bool) -> str:
    """Whether a total "mixes" rows or is their "sum"; otherwise "".

    Sums count only if no other check knows them, and they draw and divide nothing.
    """
    random = np.random.default_rng(1)
    weights = {id(shards.inner_variable(weight).handle) for weight in model.weights}
    # Small ones, such as a factor of a loss, may have other values later.
    handles = {
        id(v.handle): handle_of(some(v, random))
        for v in traced.variables
        if id(v.handle) not in weights
    }
    value_of, nodes = _without_effects(traced, handles)
    # A constant may be this rank's number of rows.
    divisors = {node.input[1] for node in nodes if node.op in ("RealDiv", "Div", "DivNoNan")}
    divisors |= {node.input[0] for node in nodes if node.op == "Cast" and node.name in divisors}
    may_be_mean = is_known or any(
        "Random" in node.op
        or "Multinomial" in node.op
        or (node.op == "Const" and node.name in divisors)
        for node in nodes
    )
    types = {value.type for node in nodes for value in node.attr.values()}
    tolerance = 0.02 if types & _HALVES else TOLERANCE

    def loss_of(*parts: Any) -> float:
        joined = tf.nest.map_structure(lambda *rows: tf.concat(rows, 0), *parts)
        return float(value_of(*tf.nest.flatten(joined)))

    found, end = set(), time.monotonic() + _SECONDS
    # Few ids occur, which both parts may have in common.
    for number in range(_TRIALS if value_of else 0):
        draw = functools.partial(_drawn, rows=ROWS, random=random, number=number)
        one, other = (tf.nest.map_structure(draw, batch) for _ in "12")
        # Each row at each place, as rows draw random numbers by their places.
        pairs = (one, other), (other, one), (one, one), (other, other), (one, other)
        try:
            *losses, again = (loss_of(*pair) for pair in pairs)
            alone = loss_of(one)
        except tf.errors.OpError:  # these are no valid labels
            continue
        if np.isfinite(losses).all() and losses[0] == again:  # it draws no other numbers
            largest = np.abs(losses).max()
            if abs(losses[0] + losses[1] - losses[2] - losses[3]) > tolerance * largest:
                found.add("mixes")
            elif not may_be_mean and abs(losses[2] - alone) > tolerance * largest:
                found.add("sum")
        if time.monotonic() > end:
            break
    for handle in handles.values():
        tf.raw_ops.DestroyResourceOp(resource=handle)
    return min(found, default="")


def _without_effects(traced: Any, handles: dict[int, Any]) -> tuple[Any, list[Any]]:
    """What computes the output of a function alone: it prints, counts and assigns nothing.

    Args:
        handles: take the place of those of variables, by their ids.

    Returns:
        The function of flat rows, None if it is not known to have no effects; and its nodes.
    """
    graph, output = traced.graph.as_graph_def(), traced.outputs[0]
    named = {node.name: node for node in graph.node}
    names, following = {output.op.name}, [output.op.name]
    while following:
        node = named[following.pop()]
        data = [name for name in node.input if not name.startswith("^")]
        del node.input[:]  # without what merely precedes it
        node.input.extend(data)
        new = {name.partition(":")[0] for name in data} - names
        names |= new
        following += new
    needed = tf.compat.v1.GraphDef(library=graph.library, versions=graph.versions)
    needed.node.extend(named[name] for name in names)
    functions = {one.signature.name: one.node_def for one in graph.library.function}
    nodes, waiting = list(needed.node), list(needed.node)
    called: set[str] = set()
    while waiting:
        for value in waiting.pop().attr.values():
            for name in {one.name for one in (value.func, *value.list.func)} - {"", *called}:
                called.add(name)
                waiting += functions.get(name, ())
                nodes += functions.get(name, ())
    effects = ("Assign", "ResourceScatter", "ResourceApply", "Hvd", "EagerPyFunc", "PyFunc")
    if any(node.op.startswith((*effects, "Print", "Write", "LookupTableInsert")) for node in nodes):
        return None, nodes
    wrapped = tf.compat.v1.wrap_function(
        lambda: tf.graph_util.import_graph_def(needed, name=""), []
    )
    inputs = [tensor for tensor in traced.inputs if tensor.op.name in names]
    here = wrapped.graph.get_tensor_by_name
    pruned = wrapped.prune([here(one.name) for one in inputs], here(output.name))
    captured = [handles.get(id(outer), outer) for outer in traced.captured_inputs]

    def value_of(*rows: Any) -> Any:
        given = zip(traced.inputs, [*rows, *captured], strict=True)
        return pruned(*(value for own, value in given if own.op.name in names))

    return value_of, nodes


def _drawn(spec: Any, rows: int, random: Any, number: int = 0) -> Any:
    """Random rows of a spec; by their number, they are small or large."""
    size = [rows, *(32 if n is None else n for n in spec.shape[1:])]
    if spec.dtype.is_floating:
        return tf.cast(random.normal(size=size) * (1, 10)[number % 2], spec.dtype)
    labels = tf.constant(random.integers(*[(0, 2), (1, 3), (0, 10), (1, 100)][number], size))
    return tf.as_string(labels) if spec.dtype == tf.string else tf.cast(labels, spec.dtype)


def _works_by_rows(part: Any) -> bool:
    """Whether a part of a model is known to compute each row of its output from one of its input.

    True for Keras's layers, unless they have a function or an axis that may say otherwise. Batch
    normalisation and random layers use other rows in training alone, as documented.
    """
    axes = tf.nest.flatten([getattr(part, name, None) for name in ("axis", "axes")])
    functions = [value for value in vars(part).values() if hasattr(value, "__code__")]
    return (
        all(str(home.__module__).startswith("keras.") for home in (type(part), *functions))
        and isinstance(part, keras.layers.Layer)
        and type(part).__name__ not in ("Lambda", "MelSpectrogram")  # decibels below the loudest
        and not any(isinstance(axis, int) and (axis == 0 or axis < -1) for axis in axes)
    )
