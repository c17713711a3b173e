"""Whether an optimizer gets a tape's gradients, times numbers that are equal on all ranks.

Their mean over the ranks is the gradient of one process. That of clipped or normalised gradients is
not: each rank has changed them by its own rows.
"""

import contextvars
import traceback
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from hvd_keras import ops
from hvd_keras.gradients import missing_calls, shards
from hvd_keras.runtime import agree, flight
from hvd_keras.runtime.process_sets import ProcessSet

# "equal" on all ranks; so, and made of what a distributed tape has returned: "exchanged"; a
# "gradient", or linear in it; "changed", another function of one; or of "data" alone, such as an
# estimate of a gradient.
_Kind = Literal["equal", "exchanged", "gradient", "changed", "data"]

# Linear in all inputs; products are linear in one, if the others are equal on all ranks.
_LINEAR = {
    *("Identity", "IdentityN", "Cast", "Neg", "Reshape", "Transpose", "AddN", "AddV2", "Add"),
    *("Sub", "Squeeze", "ExpandDims", "ConcatV2", "Split", "SplitV", "Pack", "Unpack", "Sum"),
    *("Mean", "Slice", "StridedSlice", "CheckNumerics", "StopGradient", "PreventGradient"),
    *("UnsortedSegmentSum", "GatherV2", "Pad", "PadV2", "BroadcastTo", "Tile"),
    *("TensorListSetItem", "TensorListPushBack", "TensorListFromTensor", "TensorListGetItem"),
    *("TensorListStack", "TensorListGather", "TensorListConcatV2", "TensorListPopBack"),
}
_PRODUCTS = {"Mul", "RealDiv", "Div", "DivNoNan", "MatMul", "BatchMatMulV2", "Einsum"}
_OF_SHAPES = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"}
_ON_ALL_RANKS = {"HvdAllreduce", "HvdAllgather", "HvdBroadcast"}
_ASSIGNMENTS = {"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"}
_CHANGED = "gradients are changed before they are averaged over the ranks"
_MOVED = "weights are moved by gradients of one rank, before the step of the optimizer"
_TAPE = (
    "Take gradients over all ranks: tape = hvd.DistributedGradientTape(tape), before "
    "tape.gradient(...)."
)
_CLIP = "If they are clipped, let the optimizer clip instead: it does so after the average."
_STRONGEST: tuple[_Kind, ...] = ("changed", "gradient", "data", "exchanged", "equal")
_FUNCTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), ("f",)),
    **dict.fromkeys(("While", "StatelessWhile"), ("body",)),
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("Case", "StatelessCase"), ("branches",)),
}
_DEPTH = 60  # beyond which no gradient is looked for

# What variables keep in eager code, if a script has changed their gradients: the sum since the last
# update; and, by optimizer, the factor in the first step.
_SUM, _FACTORS = "_hvd_sum", "_hvd_factors"
#: What ranks send of an eager step: the least and the largest factor, relative to those of the
#: first step. These say that a script has changed no gradients, or that all are zero.
UNCHANGED = (0.0, 0.0)
#: Whether a distributed tape asks the tape in it.
in_tape = contextvars.ContextVar("a distributed tape asks", default=False)
#: What tapes have been asked for the gradients of, while a step is tried.
targets: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("targets", default=None)
#: The batch of the step of ``fit`` that is taken, if one is.
batch: contextvars.ContextVar[Any] = contextvars.ContextVar("batch", default=None)
#: Whether this step has called losses of ``compile``: fit weighs those that add up rows.
has_compiled_loss = contextvars.ContextVar("the step has called compile's losses", default=False)
# What distributed tapes have returned in graphs: the process sets, by the names of tensors. What
# TensorFlow has clipped of a function's arguments.
_exchanged: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()
_clipped: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
# Variables whose gradients plain tapes have returned in eager code since the last update.
_of_others = shards.VariableSet()


def record(gradient: Any, tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``tf.GradientTape.gradient``: remember what it returns."""
    has_variables = any(hasattr(one, "assign") for one in tf.nest.flatten(sources))
    with agree.within(missing_calls.of_variables, has_variables):
        result = gradient(tape, target, sources, *args, **kwargs)
    if (tried := targets.get()) is not None:
        tried.extend(tf.nest.flatten(target) if has_variables else ())
        return result
    sources, results = tf.nest.flatten(sources), tf.nest.flatten(result)
    missing_calls.note_tape(sources, results)
    shapes = [one.shape for one in tf.nest.flatten(target) if tf.is_tensor(one)]
    has_rows = any(shape.rank and _may_be_rows(shape[0]) for shape in shapes)
    has_rows &= not args and kwargs.get("output_gradients") is None
    if has_rows and not has_compiled_loss.get() and has_variables:
        missing_calls.warn_if_averaged(
            "a tape gets a loss for each row, of which the gradient is that of their sum, and the "
            "ranks' gradients are averaged, so they are smaller than those of one process. Take "
            "the mean of the rows, tf.reduce_mean(loss), or op=hvd.Sum.",
            of_gradient=True,
        )
    is_eager = tf.executing_eagerly()
    has_zeros = len(args) > 1 or "unconnected_gradients" in kwargs
    for one, source in zip(results, sources, strict=True):
        if not (is_eager or has_zeros) and hasattr(source, "assign"):
            _check_reads(one, source)
        if one is not None and is_eager:
            one._hvd_of_tape = True
            if hasattr(source, "assign") and not in_tape.get():
                _of_others.add(source)
            if hasattr(source, "assign") and _SUM in (kept := vars(shards.inner_variable(source))):
                before, dense = kept[_SUM], tf.convert_to_tensor(one)
                kept[_SUM] = dense if before is None else before + dense
    return result


def _is_read(gradient: Any) -> bool:
    """Whether a graph reads a whole variable for a gradient, which is sparse otherwise."""
    op = gradient.op if isinstance(gradient, tf.Tensor) and hasattr(gradient, "graph") else None
    if op is None or op.type in ("UnsortedSegmentSum", *_FUNCTIONS):
        return False  # a sparse one made dense, as by tf.recompute_grad; or unknown
    if op.type in ("Identity", "IdentityN"):
        return _is_read(op.inputs[gradient.value_index])
    return op.type not in ("AddN", "AddV2") or any(map(_is_read, op.inputs))


def _check_reads(gradient: Any, variable: Any) -> None:
    """Warn of a loss that reads a divided table; its layer may, for a regularizer."""
    shard = shards.of(variable)
    if shard is None or shard.process_set.size() == 1 or shard.is_regularized:
        return
    if _is_read(gradient):
        missing_calls.tell(
            f"a loss reads {shards.path_of(variable)} otherwise than by its layer, but each rank "
            "has a part of it only, so the ranks do not train as one process. Use "
            "hvd.layers.Embedding(shard=None), embeddings_regularizer= for a penalty, or, without "
            "gradients, get_table().",
            shard.process_set,
        )


def _may_be_rows(number: int | None) -> bool:
    """Whether a vector of a length may have a number for each row of the batch."""
    if number is None or number <= 4:  # a short one may be several losses
        return number is None
    shapes = [part.shape for part in tf.nest.flatten(batch.get()) if tf.is_tensor(part)]
    rows = shapes[0][:1].as_list() if shapes and shapes[0].rank else []
    return not rows or bool(rows[0] and number % rows[0] == 0)


def record_graph(gradients: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``tf.gradients``: remember what it returns."""
    result = gradients(*args, **kwargs)
    missing_calls.note_tape((), tf.nest.flatten(result))
    return result


def record_clip(clip: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``tf.clip_by_value`` and the like: remember what they return.

    Norms of which this rank knows a part are a ValueError, unless the script gives them, or axes.
    """
    chosen = args[2] if len(args) > 2 else kwargs.get("use_norm", kwargs.get("axes"))
    given = tf.nest.flatten(args[0] if args else kwargs.get("t", kwargs.get("t_list")))
    for one in given if "norm" in clip.__name__ and chosen is None else ():
        shards.refuse_norms(f"tf.{clip.__name__}", getattr(one, "_hvd_part", None))
    result = clip(*args, **kwargs)
    every = [one for one in tf.nest.flatten(result) if tf.is_tensor(one)]
    values: list[Any] = [getattr(one, "values", one) for one in every]
    if tf.executing_eagerly():
        are_equal = all(one is None or hasattr(one, "_hvd_reduced") for one in given)
        for one in () if are_equal else values:
            one._hvd_clipped = True
    elif any(map(_is_argument, given)):
        for one in values:
            _clipped.setdefault(one.graph, set()).add(one.name)
    return result


def forget(sources: Iterable[Any]) -> None:
    """Forget what a tape has returned in eager code, which was exchanged or applied."""
    for source in sources:
        if hasattr(source, "assign") and _SUM in (kept := vars(shards.inner_variable(source))):
            kept[_SUM] = None


def check(
    name: str,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    process_set: ProcessSet,
    shared: Sequence[Any] = (),
) -> tuple[float, float]:
    """Warn if a script has changed gradients of this rank, other than by the same on all ranks.

    Or if it has moved ``shared`` weights by them, before; seen in graphs only. With ``HVD_STRICT``
    raise a ValueError. In eager code, return what ``compare`` needs of each rank.
    """
    pairs = [pair for pair in zip(gradients, variables, strict=False) if pair[0] is not None]
    # What the script clips may be exchanged already, where that cannot be seen.
    is_exchanged = any(v in missing_calls.reduced for _, v in pairs) or ops.has_reduced()
    clipped = [] if is_exchanged else [one for one, _ in pairs if _is_clipped(one)]
    if tf.executing_eagerly():
        return (float("nan"),) * 2 if clipped else _factors_of(name, pairs)
    walk = _Walk()
    if clipped or any(walk.kind(one) == "changed" for one, _ in pairs):
        op = walk.culprit or getattr(clipped[0], "op", None)
        frames = op.traceback if op is not None else traceback.extract_stack()
        # Behind a tape, no rank knows the norm of a divided table.
        has_parts = len(shards.without(variables)) < len(variables)
        advice = _CLIP if has_parts else f"{_TAPE} {_CLIP}"
        _tell(_CHANGED, _line(frames), process_set, advice)
    if moved := next(filter(None, map(walk.moved, shared)), ""):
        _tell(_MOVED, moved, process_set, _TAPE)
    return UNCHANGED


def compare(factors: Any, process_set: ProcessSet) -> None:
    """Warn, as ``check``, if factors are not those of the first step, nor the same on all ranks.

    Args:
        factors: what ``check`` has returned on each rank in this step, float32 of [ranks, 2].
    """
    known = factors[factors.any(axis=1)]

    def are_near(other: Any) -> bool:
        return bool((abs(known - other) <= 1e-3 * abs(other)).all())  # not if one is NaN

    if len(known) and not are_near(np.float32(1)) and not are_near(known[0]):
        _tell(_CHANGED, _line(traceback.extract_stack()), process_set, f"{_TAPE} {_CLIP}")


def _is_argument(value: Any) -> bool:
    """Whether a tensor in a graph, or its values, is an argument of a function."""
    op = getattr(getattr(value, "values", value), "op", None)
    return op is not None and op.type == "Placeholder"


def _is_clipped(gradient: Any) -> bool:
    """Whether TensorFlow has clipped a gradient, as the last that the script does."""
    value = getattr(gradient, "values", gradient)
    if not hasattr(value, "graph"):  # it is eager, or a graph has captured it
        return hasattr(value, "_hvd_clipped")
    names = _clipped.get(value.graph, ())
    while value.op.type == "Identity" and value.name not in names:
        value = value.op.inputs[0]
    return value.name in names


def _tell(what: str, where: str, process_set: ProcessSet, advice: str) -> None:
    missing_calls.tell(
        f"{what}, at {where}: by each rank's own rows, so {process_set.size()} ranks do not train "
        f"as one process. {advice}",
        process_set,
    )


def note_exchange(
    gradients: Sequence[Any], sources: Sequence[Any], process_set: ProcessSet
) -> None:
    """Note what a distributed tape returns: a distributed optimizer does not reduce it again."""
    for gradient, source in zip(gradients, sources, strict=True):
        if gradient is None:
            continue
        gradient._hvd_reduced = process_set.id()
        values = getattr(gradient, "values", gradient)
        if not tf.executing_eagerly():
            _exchanged.setdefault(values.graph, {})[values.name] = process_set.id()
        elif hasattr(source, "assign"):
            missing_calls.forget_tapes([source])  # of other sets: the last one counts
            missing_calls.of_distributed[process_set.id()].add(source)


def were_exchanged(
    gradients: Sequence[Any], variables: Sequence[Any], name: str, process_set: ProcessSet
) -> bool:
    """Whether an optimizer gets what distributed tapes have returned, or made of it alone.

    In doubt it does not: another average changes dense gradients by nothing.
    """
    pairs = [pair for pair in zip(gradients, variables, strict=False) if pair[0] is not None]
    if not pairs:
        return False
    if not tf.executing_eagerly():
        walk = _Walk(variables, process_set)
        found = all(walk.kind(one) == "exchanged" for one, _ in pairs) and not walk.is_doubtful
    elif found := all(v in missing_calls.of_distributed[process_set.id()] for _, v in pairs):
        # All ranks come here, as all have called the tape; the script may do more on some of them.
        is_same = all(getattr(g, "_hvd_reduced", None) == process_set.id() for g, _ in pairs)
        mine = is_same or not any(variable in _of_others for _, variable in pairs)
        found = all(agree.gather_json(f"{name} of tapes", mine, process_set))
    if tf.executing_eagerly():
        missing_calls.forget_tapes([v for _, v in pairs])
        _of_others.discard(*(v for _, v in pairs))
    return found


class _Walk:
    """Goes back from gradients in graphs, to what tapes have returned."""

    def __init__(self, weights: Sequence[Any] = (), process_set: ProcessSet | None = None) -> None:
        """``weights`` are known to be equal on all ranks.

        With a process set, what a tape of another one has returned is a gradient.
        """
        self._set = process_set and process_set.id()
        self.culprit: Any = None  # the op that changes a gradient
        self.is_doubtful = False  # what is taken to be equal on all ranks may not be
        known = [shards.inner_variable(w) for w in weights if hasattr(w, "assign")]
        # Variables of TensorFlow 1 may have no handle.
        self._weights = {id(one.handle) for one in known if hasattr(one, "handle")}
        self._known: dict[Any, _Kind] = {}
        self._outer: dict[Any, Any] = {}  # what inputs of inner functions are
        self._next: dict[Any, Any] = {}  # and, of loops, what they are in the next pass

    def kind(self, gradient: Any) -> _Kind:
        return self._kind(getattr(gradient, "values", gradient), 0)

    def moved(self, weight: Any) -> str:
        """Where a function assigns to a weight what is made of this rank's gradients, or ""."""
        handle = getattr(shards.inner_variable(weight), "handle", None)
        for outer, own in getattr(tf.compat.v1.get_default_graph(), "captures", ()):
            for op in own.consumers() if outer is handle else ():
                changed = op.type in _ASSIGNMENTS and self._kind(op.inputs[1], 0)
                if changed in ("gradient", "changed"):
                    return _line(op.traceback)
        return ""

    def _kind(self, tensor: Any, depth: int) -> _Kind:
        if not hasattr(tensor, "graph"):  # a value that the graph has captured
            return "equal"
        key = id(tensor.graph), tensor.name
        if (of := _exchanged.get(tensor.graph, {}).get(tensor.name)) is not None:
            return "exchanged" if self._set in (None, of) else "gradient"
        if tensor.name in missing_calls.of_tapes.get(tensor.graph, ()):
            return "gradient"
        if depth > _DEPTH:
            return "data"
        if key not in self._known:
            self._known[key] = "equal"  # if a loop leads here again
            self._known[key] = self._of_op(tensor, depth + 1)
        return self._known[key]

    def _of_op(self, tensor: Any, depth: int) -> _Kind:
        op = tensor.op
        if op.type == "Placeholder":
            if (outer := self._captured(tensor)) is not None:
                end = self._next.get((id(tensor.graph), tensor.name), outer)
                return _strongest([self._kind(outer, depth), self._kind(end, depth)])
            self.is_doubtful = True
            return "equal" if tensor.shape.rank == 0 else "data"  # such as a scale of the loss
        if op.type.startswith("Hvd") or op.type in _OF_SHAPES:
            self.is_doubtful |= op.type not in _OF_SHAPES | _ON_ALL_RANKS
            return "equal"
        if op.type in ("ReadVariableOp", "ResourceGather"):
            # A rank may gather rows of its own.
            self.is_doubtful |= any(self._kind(i, depth) != "equal" for i in op.inputs[1:])
            return self._of_variable(op.inputs[0], depth, tensor.shape.rank == 0)
        if op.type in _FUNCTIONS and (found := self._of_functions(tensor, depth)):
            return found
        inputs = [one for one in op.inputs if one.dtype != tf.resource]
        if op.type == "UnsortedSegmentSum":
            # Rows of a sparse gradient are added up by their ids.
            is_gradient = self._kind(inputs[0], depth) in ("gradient", "exchanged")
            inputs = inputs[:1] if is_gradient else inputs
        kinds = [self._kind(one, depth) for one in inputs]
        if "changed" in kinds:
            return "changed"
        if "gradient" not in kinds:
            if op.op_def.is_stateful or "data" in kinds:
                return "data"
            return "exchanged" if "exchanged" in kinds else "equal"
        is_product = op.type in _PRODUCTS and kinds.count("gradient") == 1
        is_product &= not ("Div" in op.type and kinds[1] == "gradient")
        if "data" not in kinds and (op.type in _LINEAR or is_product):
            return "gradient"
        self.culprit = self.culprit or op
        return "changed"

    def _of_functions(self, tensor: Any, depth: int) -> _Kind | None:
        """That of a result of functions that its op calls, if they are known."""
        op, kinds, inputs = tensor.op, [], list(tensor.op.inputs)
        branches = op.type.endswith(("If", "Case"))
        if branches:
            kinds.append(self._kind(inputs.pop(0), depth))
        functions = [op.get_attr(attribute) for attribute in _FUNCTIONS[op.type]]
        for function in functions[0] if isinstance(functions[0], list) else functions:
            graph = getattr(op.graph._get_function(function.name), "graph", None)
            if graph is None or len(graph.inputs) != len(inputs):
                return None
            here = {(id(graph), own.name): i for own, i in zip(graph.inputs, inputs, strict=True)}
            if any(self._outer.get(key, outer) is not outer for key, outer in here.items()):
                # Another call of the function.
                self._known = {k: v for k, v in self._known.items() if k[0] != id(graph)}
            self._outer |= here
            if op.type.endswith("While"):
                ends = zip(graph.inputs, graph.outputs, strict=True)
                self._next |= {(id(graph), own.name): end for own, end in ends}
            kinds.append(self._kind(graph.outputs[tensor.value_index], depth))
        if op.type.endswith("While"):  # which may end with what has entered it
            self.is_doubtful = True
            kinds.append(self._kind(inputs[tensor.value_index], depth))
        if branches and kinds[0] == "data" and "gradient" in kinds:
            self.culprit = self.culprit or op  # ranks take different branches
            return "changed"
        return _strongest(kinds)

    def _captured(self, tensor: Any) -> Any:
        """What an input of a function is outside of it, if that is known."""
        graph = tensor.graph
        captures = zip(
            getattr(graph, "internal_captures", ()),
            getattr(graph, "external_captures", ()),
            strict=True,
        )
        outer = {own.name: outer for own, outer in captures}
        return outer.get(tensor.name, self._outer.get((id(graph), tensor.name)))

    def _of_variable(self, handle: Any, depth: int, is_scalar: bool) -> _Kind:
        """That of what the graphs assign to a variable, such as one that adds up gradients."""
        kinds = set()
        while hasattr(handle, "graph"):
            for op in handle.consumers():
                if op.type in _ASSIGNMENTS:
                    kinds.add(self._kind(op.inputs[1], depth))
            handle = self._captured(handle) if handle.op.type == "Placeholder" else None
        self.is_doubtful |= not is_scalar and id(handle) not in self._weights
        return next((kind for kind in ("changed", "data", "gradient") if kind in kinds), "equal")


def _factors_of(name: str, pairs: Sequence[tuple[Any, Any]]) -> tuple[float, float]:
    """How the gradients of an eager step differ from the sums of those of tapes."""
    changed = [
        (one, vars(shards.inner_variable(variable)))
        for one, variable in pairs
        if not (hasattr(one, "_hvd_of_tape") or hasattr(one, "_hvd_reduced"))
    ]
    found = []
    for one, kept in changed:
        if (known := kept.setdefault(_SUM, None)) is not None:
            one, known = (tf.cast(tf.convert_to_tensor(t), tf.float32) for t in (one, known))
            factor = tf.math.divide_no_nan(tf.reduce_sum(one * known), tf.reduce_sum(known * known))
            distance = tf.reduce_max(tf.abs(one - factor * known))
            is_known = distance <= 1e-3 * tf.reduce_max(tf.abs(one))
            if tf.reduce_any(known != 0):
                now = float(factor) if is_known else float("nan")
                first = kept.setdefault(_FACTORS, {}).setdefault(name, now)
                found.append(now / first if first else now + 1)
    forget(variable for _, variable in pairs)
    return (float(np.min(found)), float(np.max(found))) if found else UNCHANGED  # NaN if one is


def _strongest(kinds: Sequence[_Kind]) -> _Kind:
    return next(one for one in _STRONGEST if one in kinds)


def _line(frames: Iterable[Any]) -> str:
    """The innermost line of the script."""
    for frame in reversed(list(frames)):
        if flight.is_script(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return "an unknown line"
