"""What each op needs, and where its results are, if some of its inputs are divided.

A rule returns the needs of the inputs and the places of the outputs. It returns None, or raises
UnknownError, if the op is to be computed on rank 0 from the whole inputs, which is always right.
"""

from collections.abc import Callable
from typing import Any

from hvd_keras.auto.places import ALL, FULL, SUM, Dim, Dims, Node, Partial, Rows, Value, words
from hvd_keras.auto.sizes import fixed, known, numbers, only

Plan = tuple[list[Any], list[Any]] | None
RULES: dict[str, Callable[[Node], Plan]] = {}
AFTER_LINEAR: dict[str, Callable[[Node], Plan]] = {}  # of linear ops, if no input is a summand

ELEMENTWISE = words(
    """
Abs Acos Acosh AddV2 AddN Add Asin Asinh Atan Atan2 Atanh Cast Ceil ClipByValue Cos Cosh Digamma Div
DivNoNan Elu EluGrad Equal Erf Erfc Erfinv Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual
Identity Inv IsFinite IsInf IsNan LeakyRelu LeakyReluGrad Less LessEqual Lgamma Log Log1p LogicalAnd
LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan Neg NotEqual OnesLike Pow RealDiv Reciprocal
ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Rint Round Rsqrt RsqrtGrad Selu SeluGrad SelectV2
Sigmoid SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad Softsign SoftsignGrad Sqrt SqrtGrad Square
SquaredDifference StopGradient PreventGradient Sub Tan Tanh TanhGrad TruncateDiv Xdivy Xlogy
ZerosLike BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift TruncateMod NextAfter Snapshot
CheckNumerics InvGrad Xlog1py Bucketize BesselI0e Complex Real Imag
"""
)

# Ops whose rows are independent. Inputs: r: rows on axis 0; a: whole on all ranks; c: a constant;
# s: a shape that begins with the rows. Outputs: r, or p: a summand on each rank.
_ROWWISE = {
    "AvgPool": "r>r", "AvgPool3D": "r>r", "AvgPool3DGrad": "sr>r", "AvgPoolGrad": "sr>r",
    "BiasAdd": "ra>r", "BiasAddGrad": "r>p", "Conv2D": "ra>r", "Conv2DBackpropFilter": "rar>p",
    "Conv2DBackpropInput": "sar>r", "Conv3D": "ra>r", "Conv3DBackpropFilterV2": "rar>p",
    "Conv3DBackpropInputV2": "sar>r", "DepthToSpace": "r>r",
    "DepthwiseConv2dNative": "ra>r", "DepthwiseConv2dNativeBackpropFilter": "rar>p",
    "DepthwiseConv2dNativeBackpropInput": "sar>r", "InTopKV2": "rra>r", "L2Loss": "r>p",
    "LRN": "r>r", "LRNGrad": "rrr>r", "MaxPool": "r>r", "MaxPool3D": "r>r",
    "MaxPool3DGrad": "rrr>r", "MaxPoolGrad": "rrr>r", "ResizeBicubic": "ra>r",
    "ResizeBilinear": "ra>r",
    "ResizeBilinearGrad": "rr>r", "ResizeNearestNeighbor": "ra>r",
    "ResizeNearestNeighborGrad": "ra>r", "SoftmaxCrossEntropyWithLogits": "rr>rr",
    "SpaceToDepth": "r>r", "SparseSoftmaxCrossEntropyWithLogits": "rr>rr", "TopKV2": "ra>rr",
    "Dilation2D": "ra>r", "ImageProjectiveTransformV3": "rraa>r", "AdjustContrastv2": "ra>r",
    "AdjustHue": "ra>r", "AdjustSaturation": "ra>r", "HSVToRGB": "r>r", "RGBToHSV": "r>r",
    "DenseBincount": "raa>r", "MatrixSolve": "rr>r",
}  # fmt: skip


# Of a lower rank, they would combine rows.
_LEAST_RANK = {"TopKV2": 2, "AdjustContrastv2": 4, "DenseBincount": 2, "MatrixSolve": 3}


def rule(*names: str, table: dict[str, Any] = RULES) -> Callable[[Any], Any]:
    """Register the rule of these ops."""

    def add(f: Any) -> Any:
        table.update(dict.fromkeys(names, f))
        return f

    return add


def rows_of(node: Node) -> list[Rows]:
    """Return the places of the inputs that have rows."""
    return [x.place for x in node.inputs if isinstance(x.place, Rows)]


def has_partial(node: Node) -> bool:
    """Whether an input is the sum, or the like, of what the ranks have."""
    return any(isinstance(x.place, Partial) for x in node.inputs)


def all_of(value: Value) -> Any:
    """A need of sizes or other small constants."""
    found = fixed(value) if (value.shape.rank or 0) < 2 else None
    return ALL if found is None else Dims(tuple(found), scalar=value.shape.rank == 0)


_ADDITIVE = words("AddN AddV2 Sub Neg Identity StopGradient Cast PreventGradient")
_SCALING = words("Mul RealDiv DivNoNan")


@rule(*_ADDITIVE, *_SCALING, "Reshape", "Squeeze", "ExpandDims", "Transpose")
def linear(node: Node) -> Plan:
    """Sums stay summands; the rest of these ops' rules is below."""
    if not has_partial(node) or rows_of(node):
        return AFTER_LINEAR[node.type](node)
    first, *others = node.inputs
    sums = [x.place == SUM for x in node.inputs]
    if node.type == "Cast":
        after = node.outputs[0].dtype
        is_small = min(after.size, first.dtype.size) < 4
        if not after.is_floating or is_small or after.size < first.dtype.size:
            return None  # the sum itself may overflow, and must do so as it does on one process
    if node.type in _ADDITIVE:
        same = all(x.shape.as_list() == node.outputs[0].shape.as_list() for x in node.inputs)
        return ([SUM] * len(sums), [SUM]) if all(sums) and same else None
    if not sums[0] or any(fixed(x) is None for x in others):
        return None  # products: only rank 0 has the whole
    return [SUM] + [all_of(x) for x in others], [SUM]


def elementwise(node: Node) -> Plan:
    """Each rank computes its rows, whether or not the inputs broadcast along other axes."""
    rank = max(x.rank for x in node.inputs)
    # None: of a sum, only rank 0 knows the whole. Several: one input's rows meet another axis of
    # the other, as in [B] - [B, 1].
    divided = [x for x in node.inputs if isinstance(x.place, Rows)]
    right, m = only((x.rank - x.place.axis, x.place.m) for x in divided)
    needs: list[Any] = []
    for x in node.inputs:
        if isinstance(x.place, Rows):
            needs.append(x.place)
        elif x.rank < right or x.shape[x.rank - right] == 1:
            needs.append(ALL)
        elif x.shape[x.rank - right] is None:
            needs.append(Rows(x.rank - right, m))
        else:
            return None
    return needs, [Rows(rank - right, m) for _ in node.outputs]


RULES.update(dict.fromkeys(ELEMENTWISE, elementwise) | {n: RULES[n] for n in RULES})
AFTER_LINEAR.update(dict.fromkeys([*_ADDITIVE, *_SCALING], elementwise))


@rule("Select")
def select(node: Node) -> Plan:
    """Its condition is as long as the others, or has one number for each of their rows."""
    condition, x, _ = node.inputs
    if condition.rank == x.rank:
        return elementwise(node)
    if only(rows_of(node)).axis != 0 or condition.place == FULL or has_partial(node):
        return None
    return [condition.place] * 3, [condition.place]


@rule("Bitcast")
def _bitcast(node: Node) -> Plan:
    return elementwise(node) if node.inputs[0].shape.rank == node.outputs[0].shape.rank else None


def _rowwise(node: Node) -> Plan:
    if has_partial(node) or node.inputs[0].rank < _LEAST_RANK.get(node.type, 1):
        return None
    kinds, results = _ROWWISE[node.type].split(">")
    m = only(r.m for r in rows_of(node))
    needs: list[Any] = []
    for kind, x in zip(kinds, node.inputs, strict=True):
        if kind == "r":
            if isinstance(x.place, Rows) and x.place.axis != 0:
                return None
            if x.place == FULL and x.shape[0] is not None:
                return None
            needs.append(Rows(0, m))
        elif kind == "s":
            sizes = numbers(x)
            if sizes[0] != Dim(m):
                return None
            needs.append(Dims(tuple(sizes)))
        elif x.place != FULL:
            return None
        else:
            needs.append(all_of(x) if x.dtype.is_integer else ALL)
    return needs, [Rows(0, m) if kind == "r" else SUM for kind in results]


RULES.update(dict.fromkeys(_ROWWISE, _rowwise))


def axes_of(value: Value, rank: int) -> list[int]:
    """Return axes that are known, from 0 on."""
    return sorted({a % rank for a in known(value)}) if rank else []


@rule("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm")
def _reduce(node: Node) -> Plan:
    x = node.inputs[0]
    axes, keep = axes_of(node.inputs[1], x.rank), node.attr("keep_dims")
    need = Dims(tuple(axes))
    if x.place == SUM and node.type in ("Sum", "Mean"):
        # A mean of integers is rounded.
        return ([SUM, need], [SUM]) if node.type == "Sum" or x.dtype.is_floating else None
    if not isinstance(x.place, Rows):
        return None
    axis = x.place.axis
    if axis not in axes:
        after = axis if keep else axis - sum(a < axis for a in axes)
        return [x.place, need], [Rows(after, x.place.m)]
    if node.type in ("Sum", "Mean"):
        if node.type == "Mean":
            if not x.dtype.is_floating:
                return None
            node.emit = "mean"
        return [x.place, need], [SUM]
    kinds = {"Max": "Max", "Min": "Min", "All": "Min", "Any": "Max"}
    if node.type in kinds and x.dtype.name != "float16":
        return [x.place, need], [Partial(kinds[node.type])]
    return None


def _contract(node: Node, terms: list[str], out: str) -> Plan:
    """Rows on the label of one or more inputs; a label that is summed makes summands."""
    pairs = list(zip(terms, node.inputs, strict=True))
    divided = [(t, x.place) for t, x in pairs if isinstance(x.place, Rows)]
    label, m = only((t[place.axis], place.m) for t, place in divided)
    if out.count(label) > 1:
        return None
    needs: list[Any] = []
    for term, x in pairs:
        if label not in term:
            needs.append(ALL)
        elif term.count(label) > 1 or (
            not isinstance(x.place, Rows) and x.shape[term.index(label)] is not None
        ):
            return None
        else:
            needs.append(Rows(term.index(label), m))
    # A factor without the label would be counted once by each rank's summand, as it must be.
    return needs, [Rows(out.index(label), m) if label in out else SUM]


@rule("Einsum")
def _einsum(node: Node) -> Plan:
    left, out = node.attr("equation").decode().split("->")
    # Each term, and how many axes its dots stand for.
    terms = [(t, 3 + x.rank - len(t)) for t, x in zip(left.split(","), node.inputs, strict=True)]
    most = max((n for t, n in terms if "..." in t), default=0)
    dots = "0123456789"[:most]
    spelled = [t.replace("...", dots[most - n :]) for t, n in terms]
    return _contract(node, spelled, out.replace("...", dots))


@rule("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _matmul(node: Node) -> Plan:
    a, b = node.inputs
    names = ("transpose_a", "transpose_b") if node.type == "MatMul" else ("adj_x", "adj_y")
    ta, tb = (node.attr(n) for n in names)
    extra = max(a.rank, b.rank) - 2
    dots = "0123456789"[:extra]
    one, two = dots[extra - (a.rank - 2) :], dots[extra - (b.rank - 2) :]
    return _contract(
        node, [one + ("ki" if ta else "ik"), two + ("jk" if tb else "kj")], dots + "ij"
    )
