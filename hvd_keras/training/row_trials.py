"""Finds out whether what a loss or a model computes for a row of a batch depends on other rows.

If it does not, the ranks' parts of a batch give what one process computes. Names and operations do
not tell. So losses and models are tried on random rows, outside of the training.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from hvd_keras.gradients.agreement import handle_of
from hvd_keras.runtime import agree, log
from hvd_keras.runtime.keras import is_legacy, keras, replaced

#: How the loss of a batch follows from its parts: each row has its own; it is the mean of the
#: parts' losses, or their sum; "whole": none of these; "failed": it cannot be tried; "unknown": it
#: gets no tensors with rows, or exchanges them by itself.
Kind = Literal["rows", "mean", "sum", "whole", "failed", "unknown"]


ROWS = 4  # of each of two parts
TOLERANCE = 1e-4  # relative to the largest value
_NEAR, _FAR = 0.01, 30.0  # errors of predictions, relative to the usual ones
_COMPARISONS = {"Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual"}
_kinds: dict[Any, Kind] = {}


def kind_of(loss: Any, y_true: Any, y_pred: Any) -> Kind:
    """How a loss treats the rows of a batch, by its values for random rows."""
    parts = [tf.nest.flatten(part) for part in (y_true, y_pred)]
    tensors = [tensor for part in parts for tensor in part]
    if any(isinstance(tensor, tf.RaggedTensor | tf.SparseTensor) for tensor in tensors):
        return "failed"
    if not all(isinstance(tensor, tf.Tensor) and tensor.shape.rank for tensor in tensors):
        return "unknown"
    dtypes = [tf.as_dtype(getattr(loss, "dtype", tensor.dtype)) for tensor in tensors]
    sizes = [[size or 4 for size in tensor.shape[1:]] for tensor in tensors]
    function = getattr(loss, "fn", loss)
    # Others that a script's loss reads may change, too; eager code tries it once all the same.
    options = {k: v for k, v in vars(loss).items() if isinstance(v, (bool, int, float, str))}
    key = function, repr((getattr(loss, "_fn_kwargs", None), options, sizes, dtypes))
    is_kept = is_of_keras(function) or tf.executing_eagerly()
    if is_kept and key in _kinds:
        return _kinds[key]

    def call(*flat: Any) -> Any:
        return loss.call(*tf.nest.pack_sequence_as([y_true, y_pred], flat))

    kind: Kind = "failed"
    with tf.init_scope(), tf.device("CPU:0"):
        if not tf.executing_eagerly():  # TensorFlow 1
            return "unknown"
        # Few columns and any number of rows are enough, unless a loss is made for certain ones.
        few = [[min(size, 8) for size in shape] for shape in sizes]
        for shapes, counts in ((few, [None]), (sizes, [None]), (sizes, [ROWS, 2 * ROWS])):
            specs = list(zip(shapes, dtypes, strict=True))
            try:
                kind = _try(call, specs, counts, len(parts[0]))
                break
            except Exception as error:
                log.logger.debug("loss %s cannot be tried: %r", function, error)
    if is_kept:
        _kinds[key] = kind
    return kind


def kind_of_regularizer(regularizer: Any, output: Any) -> Kind:
    """How a regularizer of activities treats the rows of a batch."""
    tried = types.SimpleNamespace(fn=regularizer, call=lambda _, rows: regularizer(rows))
    return "sum" if is_sum(regularizer) else kind_of(tried, output, output)


def is_sum(regularizer: Any) -> bool:
    """Whether a regularizer is one of Keras's that add up rows."""
    known = keras.regularizers
    return type(regularizer) in (known.L1, known.L2, known.L1L2)


@functools.cache
def sums_activities() -> bool:
    """Whether Keras 3 adds up activity regularizers over the rows, as older versions do."""
    with tf.init_scope():
        layer = keras.layers.ActivityRegularization(l1=1.0, name="hvd_keras", dtype="float32")
        layer(tf.ones([2, 1]))
        return float(sum(layer.losses)) > 1.5


def is_of_keras(function: Any) -> bool:
    """Whether a loss or a metric, or its function, is Keras's."""
    return str(getattr(function, "__module__", "")).startswith(("keras.", "tf_keras."))


def _try(
    call: Callable[..., Any],
    specs: Sequence[tuple[list[int], Any]],
    counts: Sequence[int | None],
    labels: int,
) -> Kind:
    """Compare a loss of all rows with those of two parts; the first tensors are labels."""
    random = np.random.default_rng(1)

    def rows(share: float, mark: float, error: float) -> list[Any]:
        found: list[Any] = []
        for i, (shape, dtype) in enumerate(specs):
            drawn = random.uniform(0.1, 0.9, (ROWS, *shape))
            if i < labels:  # 0 and 1 are valid for all losses
                marked = random.permutation(drawn.size) < share * drawn.size
                drawn = random.permutation(marked).astype(float).reshape(drawn.shape)
                drawn[marked.reshape(drawn.shape)] = mark
            else:
                drawn *= error
                if error < 1 and found[(i - labels) % labels].shape == drawn.shape:
                    drawn += np.asarray(found[(i - labels) % labels], float)
            found.append(tf.cast(drawn, dtype))
        return found

    function = tf.function(call, autograph=is_legacy)
    functions = [
        function.get_concrete_function(*(tf.TensorSpec([n, *shape], d) for shape, d in specs))
        for n in counts
    ]
    if any(node.op.startswith("Hvd") for nodes in _nodes(functions[0]) for node in nodes):
        return "unknown"  # it has the rows of all ranks by itself
    # Its variables must not change, and small ones, such as weights, may have other values later.
    handles = {id(v.handle): handle_of(some(v, random)) for v in functions[0].variables}
    for traced in functions:
        traced.set_external_captures([handles.get(id(c), c) for c in traced.captured_inputs])
    kinds: set[Kind] = set()
    failures: list[Exception] = []
    # The numbers that a loss compares labels with, and those beside, may mark rows, as padding is;
    # of each part another number, so that the mean of two masked means is not that of all.
    trials = [(mark, (1.0, 1.0)) for mark in (0.0, 1.0, -1.0, *_marks(functions[0]))]
    # Errors on both sides of where a loss may bend, as at a flood level.
    trials += [(0.0, errors) for errors in ((_NEAR, 1.0), (_NEAR, _FAR), (1.0, _FAR))]
    for mark, errors in trials:
        pairs = zip((0.25, 0.75), errors, strict=True)
        parts = [rows(share, mark, error) for share, error in pairs]
        try:
            one, other = (np.asarray(functions[0](*some), "float64") for some in parts)
            both = [tf.concat(pair, 0) for pair in zip(*parts, strict=True)]
            whole = np.asarray(functions[-1](*both), "float64")
        except tf.errors.OpError as caught:  # the mark is no valid label
            failures.append(caught)
            continue
        if not whole.any() or not all(np.isfinite(some).all() for some in (one, other, whole)):
            continue
        expected: dict[Kind, Any] = {"mean": (one + other) / 2, "sum": one + other}
        if whole.ndim:
            expected = {"rows": np.concatenate([one, other])} if one.ndim else {}
        kinds |= {kind for kind, value in expected.items() if _close(value, whole)} or {"whole"}
    for handle in handles.values():
        tf.raw_ops.DestroyResourceOp(resource=handle)
    # A loss for one number of rows; one that asserts something is tried in vain, but of all rows.
    if len(failures) == len(trials) and "shape" in str(failures[0]).lower():
        raise failures[0]
    return kinds.pop() if len(kinds) == 1 else "whole"


def some(variable: Any, random: Any) -> Any:
    """The values of a variable, or random ones if there are few."""
    value = tf.convert_to_tensor(variable)
    if np.prod(variable.shape) < 1000:
        value = tf.cast(random.uniform(0.5, 1.5, variable.shape), value.dtype)
    return value


def _nodes(traced: Any) -> list[Any]:
    """The nodes of a function, and of each that it calls."""
    graph = traced.graph.as_graph_def()
    return [graph.node, *(inner.node_def for inner in graph.library.function)]


def _marks(traced: Any) -> set[float]:
    """The numbers that a function compares with, and those beside, except -1, 0 and 1."""
    values = [c.numpy() for c in traced.captured_inputs if c.dtype != tf.resource]
    for nodes in _nodes(traced):
        named = {node.name: node for node in nodes}
        for node in nodes:
            if node.op in ("IsNan", "IsFinite"):
                values.append(np.array(np.nan))
            for source in node.input if node.op in _COMPARISONS else ():
                found = named.get(source.partition(":")[0])
                while found is not None and found.op in ("Cast", "Identity"):
                    found = named.get(found.input[0].partition(":")[0])
                if found is not None and found.op == "Const":
                    values.append(tf.make_ndarray(found.attr["value"].tensor))
    found = {float(v.item()) for v in values if v.size == 1 and v.dtype.kind in "iuf"}
    return {value + beside for value in found for beside in (-1, 0, 1)} - {-1, 0, 1}


def layer_that_mixes(model: Any, element_spec: Any) -> str:
    """The layer of a model that computes a row of its output from other rows of its input.

    What inference computes is tried, unless all layers are Keras's and work on each row. Returns
    "" if there is no such layer, or the model draws, assigns, exchanges, or cannot be tried.
    """
    layers = [*model._flatten_layers()]
    others = [part for layer in layers for part in getattr(layer, "operations", ())]
    parts = list({id(part): part for part in (*layers, *others)}.values())
    if not all(map(works_by_rows, parts)):
        try:
            with agree.within(agree.is_building, True):
                return _first_that_mixes(model, parts, element_spec)
        except Exception as error:
            log.logger.debug("model %s cannot be tried on random rows: %r", model.name, error)
    return ""


def drawn(spec: Any, rows: int, random: Any, number: int = 0) -> Any:
    """Random rows of a spec; by their number, they are small or large."""
    size = [rows, *(32 if n is None else n for n in spec.shape[1:])]
    if spec.dtype.is_floating:
        return tf.cast(random.normal(size=size) * (1, 10)[number % 2], spec.dtype)
    labels = tf.constant(random.integers(*[(0, 2), (1, 3), (0, 10), (1, 100)][number], size))
    return tf.as_string(labels) if spec.dtype == tf.string else tf.cast(labels, spec.dtype)


def works_by_rows(part: Any) -> bool:
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


def _first_that_mixes(model: Any, parts: Sequence[Any], element_spec: Any) -> str:
    random = np.random.default_rng(1)
    x, _, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
    seen: list[tuple[Any, Any]] = []  # parts in the order of their calls, with their outputs

    def kept(part: Any, call: Any) -> Callable[..., Any]:
        def of_part(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            seen.extend((part, tensor) for tensor in tf.nest.flatten(result))
            return result

        return of_part

    def forward(x: Any) -> Any:
        options = {"training": False} if getattr(model, "_call_has_training_arg", True) else {}
        with contextlib.ExitStack() as stack:
            for part in parts:
                stack.enter_context(replaced(part, "call", kept(part, part.call)))
            model(x, **options)
        here = tf.compat.v1.get_default_graph()
        seen[:] = [(p, t) for p, t in seen if getattr(t, "graph", None) is here]
        return [tensor for _, tensor in seen]

    traced = tf.function(forward, autograph=False).get_concrete_function(x)
    if any(node.op.startswith(("Assign", "Hvd")) for nodes in _nodes(traced) for node in nodes):
        return ""
    one, other = (
        tf.nest.map_structure(lambda spec: drawn(spec, spec.shape[0] or 2, random), x) for _ in "12"
    )
    rows = tf.nest.flatten(one)[0].shape[0]
    half = rows // 2

    def joined(first: Any, second: Any) -> Any:
        return tf.nest.map_structure(lambda a, b: tf.concat([a[:half], b[half:]], 0), first, second)

    before, again = traced(one), traced(one)

    def differ(after: Any, is_first: bool) -> list[Any]:
        """The parts with other outputs in one half of the rows."""
        found = []
        for (part, _), *pair in zip(seen, before, after, strict=True):
            size = pair[0].shape[0] if pair[0].shape.rank else 1
            if size % rows or pair[0].dtype == tf.string:
                continue
            kept = slice(size // 2) if is_first else slice(size // 2, None)
            if not _close(*(np.asarray(tensor, "float64")[kept] for tensor in pair)):
                found.append(part)
        return found

    if any(differ(again, is_first) for is_first in (True, False)):
        return ""
    # What is computed from the half of the rows that stays alone stays, too.
    for is_first, rows_of_both in ((True, joined(one, other)), (False, joined(other, one))):
        found = differ(traced(rows_of_both), is_first)
        if model in found:
            return f"{type(found[0]).__name__} {found[0].name!r}"
    return ""


def _close(one: Any, other: Any) -> bool:
    if one.shape != other.shape:
        return False
    return bool(np.abs(one - other).max(initial=0) <= TOLERANCE * np.abs(other).max(initial=0))
