"""Finds out whether what a loss or a model computes for a row of a batch depends on other rows.

If it does not, the ranks' parts of a batch give what one process computes. Names and operations do
not tell. So losses and models are tried on random rows, outside of the training.
"""

import contextlib
import functools
import math
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from hvd_keras.gradients.agreement import handle_of
from hvd_keras.runtime import log
from hvd_keras.runtime.keras import is_legacy, is_of_keras, keras
from hvd_keras.training.halves import TOLERANCE

#: How the loss of a batch follows from its parts: each row has its own; it is the mean of the
#: parts' losses, or their sum; "whole": none of these; "failed": it cannot be tried; "unknown": it
#: gets no tensors with rows, or exchanges them by itself.
Kind = Literal["rows", "mean", "sum", "whole", "failed", "unknown"]


ROWS = 4  # of each of two parts
_NEAR, _FAR = 0.01, 30.0  # errors of predictions, relative to the usual ones
_FEW, _MANY = 8, 1 << 16  # values: of an axis, and of a row of all tensors
_COMPARISONS = {"Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual"}
_UNARY = {"Cast", "Identity", "ExpandDims", "Reshape"}  # of which the first input has the values
# By the id of a loss, as long as it lives: it may have no hash.
_kinds: dict[int, dict[Any, Kind]] = {}


def kind_of(loss: Any, y_true: Any, y_pred: Any) -> Kind:
    """How a loss treats the rows of a batch, by its values for random rows."""
    parts = [tf.nest.flatten(part) for part in (y_true, y_pred)]
    tensors = [
        tf.convert_to_tensor(one) if isinstance(one, np.ndarray) else one
        for part in parts
        for one in part
    ]
    if any(isinstance(tensor, tf.RaggedTensor | tf.SparseTensor) for tensor in tensors):
        return "failed"
    if not all(isinstance(tensor, tf.Tensor) and tensor.shape.rank for tensor in tensors):
        return "unknown"
    dtypes = [tf.as_dtype(getattr(loss, "dtype", tensor.dtype)) for tensor in tensors]
    sizes = [[size or 4 for size in tensor.shape[1:]] for tensor in tensors]
    function = getattr(loss, "fn", loss)
    # Others that a script's loss reads may change, too; eager code tries it once all the same.
    options = {k: v for k, v in vars(loss).items() if isinstance(v, (bool, int, float, str))}
    key = repr((getattr(loss, "_fn_kwargs", None), options, sizes, dtypes, str(function)))
    is_kept = is_of_keras(function) or tf.executing_eagerly()
    known = _known(getattr(function, "__self__", function)) if is_kept else {}
    if key in known:
        return known[key]

    def call(*flat: Any) -> Any:
        return loss.call(*tf.nest.pack_sequence_as([y_true, y_pred], flat))

    kind: Kind = "failed"
    with tf.init_scope(), tf.device("CPU:0"):
        if not tf.executing_eagerly():  # TensorFlow 1
            return "unknown"
        # Of large rows few columns are enough, and any number of rows, unless a loss is made for
        # certain ones.
        is_large = sum(map(math.prod, sizes)) > _MANY
        few = [[min(size, _FEW) if is_large else size for size in shape] for shape in sizes]
        for shapes, counts in ((few, [None]), (sizes, [None]), (sizes, [ROWS, 2 * ROWS])):
            specs = list(zip(shapes, dtypes, strict=True))
            try:
                kind = _try(call, specs, counts, len(parts[0]))
                break
            except Exception as error:
                log.logger.debug("loss %s cannot be tried: %r", function, error)
    known[key] = kind
    return kind


def _known(loss: Any) -> dict[Any, Kind]:
    """What is known of a loss, to be added to."""
    known = _kinds.get(id(loss), {})
    if id(loss) not in _kinds:
        with contextlib.suppress(TypeError):  # it can have no weak references
            weakref.finalize(loss, _kinds.pop, id(loss), None)
            _kinds[id(loss)] = known
    return known


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


def _try(
    call: Callable[..., Any],
    specs: Sequence[tuple[list[int], Any]],
    counts: Sequence[int | None],
    labels: int,
) -> Kind:
    """Compare a loss of all rows with those of two parts; the first tensors are labels."""
    random = np.random.default_rng(1)

    def rows(share: float, marks: Sequence[float], error: float) -> list[Any]:
        found: list[Any] = []
        for i, (shape, dtype) in enumerate(specs):
            drawn = random.uniform(0.1, 0.9, (ROWS, *shape))
            if i < labels:  # 0 and 1 are valid for all losses
                marked = random.permutation(drawn.size) < share * drawn.size
                drawn = random.permutation(marked).astype(float).reshape(drawn.shape)
                marked = marked.reshape(drawn.shape)
                drawn[marked] = random.choice(marks, np.count_nonzero(marked))
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
    if any(node.op.startswith("Hvd") for nodes in nodes_of(functions[0]) for node in nodes):
        return "unknown"  # it has the rows of all ranks by itself
    # Its variables must not change, and small ones, such as weights, may have other values later.
    handles = {id(v.handle): handle_of(some(v, random)) for v in functions[0].variables}
    for traced in functions:
        traced.set_external_captures([handles.get(id(c), c) for c in traced.captured_inputs])
    kinds: set[Kind] = set()
    failures: list[Exception] = []
    # The numbers that a loss compares labels with, and those beside, may mark rows, as padding is;
    # of each part another number, so that the mean of two masked means is not that of all.
    # Labels may be classes, as many as there are columns of predictions, of different weights.
    classes = range(max([2, *(shape[-1] for shape, _ in specs[labels:] if shape)]))
    trials: list[tuple[Sequence[float], tuple[float, float]]]
    trials = [([mark], (1.0, 1.0)) for mark in marks_of(functions[0])]
    trials += [(classes, (1.0, 1.0))] * 3
    # Errors on both sides of where a loss may bend, as at a flood level, or of 0.
    both_sides = (_NEAR, 1.0), (_NEAR, _FAR), (1.0, _FAR), (-1.0, 1.0), (-1.0, -0.5)
    trials += [([0.0], errors) for errors in both_sides]
    for marks, errors in trials:
        pairs = zip((0.25, 0.75), errors, strict=True)
        parts = [rows(share, marks, error) for share, error in pairs]
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


def nodes_of(traced: Any) -> list[Any]:
    """The nodes of a function, and of each that it calls."""
    graph = traced.graph.as_graph_def()
    return [graph.node, *(inner.node_def for inner in graph.library.function)]


def marks_of(traced: Any) -> list[float]:
    """The numbers that a function may compare labels with: constants, those beside, -1, 0 and 1."""
    values = [c.numpy() for c in traced.captured_inputs if c.dtype.is_numpy_compatible]
    for nodes in nodes_of(traced):
        named = {node.name: node for node in nodes}
        for node in nodes:
            if node.op in ("IsNan", "IsFinite"):
                values.append(np.array(np.nan))
            for source in node.input if node.op in _COMPARISONS else ():
                found = named.get(source.partition(":")[0])
                while found is not None and found.op in _UNARY:
                    found = named.get(found.input[0].partition(":")[0])
                if found is not None and found.op == "Const":
                    values.append(tf.make_ndarray(found.attr["value"].tensor))
    few = [value for value in values if value.size <= _FEW and value.dtype.kind in "iuf"]
    found = dict.fromkeys(float(one) for value in few for one in value.flat)
    marks = [value + beside for value in found for beside in (0, -1, 1)]
    return [*dict.fromkeys([0.0, 1.0, -1.0, *marks])]


def _close(one: Any, other: Any) -> bool:
    if one.shape != other.shape:
        return False
    return bool(np.abs(one - other).max(initial=0) <= TOLERANCE * np.abs(other).max(initial=0))
