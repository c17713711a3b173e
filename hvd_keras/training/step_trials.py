"""Traces what a model trains by, before the training, to see whether ranks train as one process.

They do not if it does not follow from what is computed for each row of a batch; names and
operations do not tell, so it is tried on random rows. Nor if the ranks compute with different
constants, such as weights of classes in a closure.
"""

import contextlib
import functools
import time
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras.gradients import model_ranks, origin, shards
from hvd_keras.gradients.agreement import handle_of
from hvd_keras.runtime import agree, log
from hvd_keras.runtime.keras import is_legacy, is_of_keras
from hvd_keras.training import fit_state, preprocessing
from hvd_keras.training.halves import (
    TOLERANCE,
    Trial,
    begin,
    kind_of_losses,
    known,
    of_losses,
    trying,
)
from hvd_keras.training.row_trials import ROWS, marks_of, nodes_of, some

_TRIALS, _SECONDS = 4, 1.0
_GATHERS = {"GatherV2", "Gather", "GatherNd", "Slice", "StridedSlice"}
_HALVES = {tf.float16.as_datatype_enum, tf.bfloat16.as_datatype_enum}


def tried(model: Any, element_spec: Any, ranks: int) -> Trial:
    """Try what so many ranks train by, if not all of it is Keras's, once after each ``compile``.

    This is a step or ``compute_loss`` of its own, a loss, or a layer that is not known to work on
    each row: what it computes in inference, or by ``add_loss``. Losses of ``keras.losses``, batch
    normalisation and regularizers of activities are weighed, or documented, by themselves. The
    kind is empty if that exchanges something or cannot be tried, and all is if a step runs eagerly,
    so that Python would see it.
    """
    if before := known(model):
        return before
    found, name, has_others = begin(model)
    is_eager = model.run_eagerly or tf.config.functions_run_eagerly()
    losses = filter(callable, tf.nest.flatten(getattr(model, "loss", None)))
    has_own_loss = not all(is_of_keras(getattr(one, "fn", one)) for one in losses)
    if (name and is_eager) or not (name or has_others or has_own_loss):
        return found
    try:
        with warnings.catch_warnings():  # of Keras, about calls that the script does not make
            warnings.simplefilter("ignore")
            traced, rows = _traced(found, model, name, element_spec)
            if not any(v in model_ranks.local_variables for v in model.variables):
                found.constants = _constants_of(traced, model._flatten_layers())
            if name or has_others:
                found.kind = _kind_of_rows(traced, model, rows, found.adds_up, ranks)
    except Exception as error:
        log.logger.debug("%s cannot be tried on random rows: %r", found.subject, error)
    return found


def _traced(found: Trial, model: Any, name: str, element_spec: Any) -> tuple[Any, Any]:
    """The function of a batch that a model trains by, and the specs of batches of any size."""
    total = _of_step if name == "train_step" else of_losses

    def summed(data: Any) -> Any:
        every = tf.nest.flatten(total(model, data))
        return tf.add_n([tf.reduce_sum(tf.cast(one, tf.float32)) for one in every])

    with contextlib.ExitStack() as stack:
        stack.enter_context(trying(found, model))
        # No function within may keep what is traced here.
        stack.callback(tf.config.run_functions_eagerly, tf.config.functions_run_eagerly())
        tf.config.run_functions_eagerly(True)
        rows = tf.nest.map_structure(
            lambda spec: tf.TensorSpec([None, *spec.shape[1:]], spec.dtype), element_spec
        )
        # tf_keras converts what layers and losses call, in fit as well.
        return tf.function(summed, autograph=is_legacy).get_concrete_function(rows), rows


def _constants_of(traced: Any, layers: Iterable[Any]) -> list[tuple[str, str]]:
    """The floating-point constants of a function: hashes, and names with values.

    Without what layers have learnt by ``adapt``, of which all ranks get the root's, and rows of
    data, which are gathered.
    """
    learnt = [value for one in layers for value in preprocessing.derived(one) if value is not None]
    digests = {f"{agree.digest(value):x}" for value in learnt}
    values = []
    for nodes in nodes_of(traced):
        gathers = [one for one in nodes if one.op in _GATHERS]
        rows = {name.partition(":")[0] for one in gathers for name in one.input}
        values += [
            (node.name, tf.make_ndarray(node.attr["value"].tensor))
            for node in nodes
            if node.op == "Const" and tf.as_dtype(node.attr["dtype"].type).is_floating
            if node.name not in rows
        ]
    values += [
        ("a tensor", outer.numpy())
        for outer, inner in traced.graph.captures
        if outer.dtype.is_floating and hasattr(outer, "numpy")
        if not any(one.type in _GATHERS for one in inner.consumers())
    ]
    described = (
        (
            f"{agree.digest(value):x}",
            f"{name} = {np.array2string(value, threshold=4, edgeitems=2)}",
        )
        for name, value in values
    )
    return [one for one in described if one[0] not in digests]


def _of_step(model: Any, data: Any) -> Any:
    """What the tapes of a step of one's own get the gradients of."""
    with agree.within(origin.targets, []):
        model.train_step(data)
        every = origin.targets.get() or []
    here = tf.compat.v1.get_default_graph()
    return [one for one in every if getattr(one, "graph", None) is here]


def _kind_of_rows(traced: Any, model: Any, batch: Any, is_known: bool, ranks: int) -> str:
    """Whether a total "mixes" rows or is their "sum"; otherwise "".

    Sums count only if no other check knows them, they draw nothing, and divide by no constant that
    may be this rank's number of rows.
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
    divisors = {node.input[1] for node in nodes if node.op in ("RealDiv", "Div", "DivNoNan")}
    divisors |= {node.input[0] for node in nodes if node.op == "Cast" and node.name in divisors}
    constants = [node for node in nodes if node.op == "Const" and node.name in divisors]
    numbers = [tf.make_ndarray(node.attr["value"].tensor) for node in constants]
    may_be_mean = is_known or any("Random" in n.op or "Multinomial" in n.op for n in nodes)
    may_be_mean |= any(
        fit_state.may_be_number_of_rows(ranks, float(number.item()))
        for number in numbers
        if number.size == 1
    )
    types = {value.type for node in nodes for value in node.attr.values()}
    tolerance = 0.02 if types & _HALVES else TOLERANCE

    def loss_of(*parts: Any) -> float:
        joined = tf.nest.map_structure(lambda *rows: tf.concat(rows, 0), *parts)
        return float(value_of(*tf.nest.flatten(joined)))

    # Few ids occur, which both parts may have in common. Some labels may have no loss: more of one
    # part than of the other, or the mean of two masked means would be that of all.
    draws: list[tuple[int, float | None]] = [(number, None) for number in range(_TRIALS)]
    draws += [(number, mark) for number in (1, 0) for mark in marks_of(traced)]
    found, end = set(), time.monotonic() + _SECONDS
    for number, mark in draws if value_of else ():
        if time.monotonic() > end:
            break
        draw = functools.partial(_drawn, rows=ROWS, random=random, number=number)
        one, other = (tf.nest.map_structure(draw, batch) for _ in "12")
        if mark is not None:
            one, other = _marked(one, mark, 0.25, random), _marked(other, mark, 0.75, random)
        # Each row at each place, as rows draw random numbers by their places.
        pairs = (one, other), (other, one), (one, one), (other, other), (one, other)
        try:
            *losses, again = (loss_of(*pair) for pair in pairs)
            alone = loss_of(one)
        except tf.errors.OpError:  # these are no valid labels
            continue
        if losses[0] == again:  # it draws no other numbers
            found.add(kind_of_losses(losses, alone, tolerance, may_be_mean))
    for handle in handles.values():
        tf.raw_ops.DestroyResourceOp(resource=handle)
    return min(found - {""}, default="")


def _without_effects(traced: Any, handles: dict[int, Any]) -> tuple[Any, list[Any]]:
    """What computes the output of a function alone: it prints, counts and assigns nothing.

    Args:
        handles: take the place of those of variables, by their ids.

    Returns:
        The function of flat rows, None if it is not known to have no effects; and its nodes.
    """
    graph = traced.graph.as_graph_def()
    for node in graph.node:
        data = [name for name in node.input if not name.startswith("^")]
        del node.input[:]  # without what merely precedes it
        node.input.extend(data)
    wrapped = tf.compat.v1.wrap_function(lambda: tf.graph_util.import_graph_def(graph, name=""), [])
    inputs, output = (
        [wrapped.graph.get_tensor_by_name(one.name) for one in tensors]
        for tensors in (traced.inputs, traced.outputs)
    )
    pruned = wrapped.prune(inputs, output[0])
    needed = pruned.graph.as_graph_def()
    functions = {one.signature.name: one.node_def for one in needed.library.function}
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
    captured = [handles.get(id(outer), outer) for outer in traced.captured_inputs]
    return lambda *rows: pruned(*rows, *captured), nodes


def _drawn(spec: Any, rows: int, random: Any, number: int = 0) -> Any:
    """Random rows of a spec; by their number, they are small or large."""
    size = [rows, *(32 if n is None else n for n in spec.shape[1:])]
    if spec.dtype.is_floating:
        return tf.cast(random.normal(size=size) * (1, 10)[number % 2], spec.dtype)
    labels = tf.constant(random.integers(*[(0, 2), (1, 3), (0, 10), (1, 100)][number], size))
    return tf.as_string(labels) if spec.dtype == tf.string else tf.cast(labels, spec.dtype)


def _marked(rows: Any, mark: float, share: float, random: Any) -> Any:
    """Rows with a mark in a share of the values of all parts but the first, unless it is alone."""

    def marked(values: Any) -> Any:
        if values.dtype == tf.string:
            return values
        count = values.shape.num_elements()
        places = random.permutation(np.arange(count) < share * count).reshape(values.shape)
        return tf.where(places, tf.cast(mark, values.dtype), values)

    if isinstance(rows, tuple) and len(rows) > 1:
        return rows[0], *tf.nest.map_structure(marked, rows[1:])
    return tf.nest.map_structure(marked, rows)
