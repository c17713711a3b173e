"""Every rule of automatic mode's tables: what the ranks compute divided is what one computes."""

import gc
import itertools
import signal
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

import hvd_keras as hvd
from hvd_keras.auto import check as auto_check
from hvd_keras.auto import messages, rules, worker
from hvd_keras.auto.emit import Side
from hvd_keras.auto.plan import Plan
from hvd_keras.auto.run import planned

pytestmark = pytest.mark.ranks(2, 3)

raw, shape = tf.raw_ops, tf.shape
_number = itertools.count()
divided = set()  # the types of ops that some plan has divided


def check(function, *arrays, parts=None, whole=()):
    """Compare a function's results divided, on the first rank, and whole.

    ``parts``: how many of the first arguments have rows that are divided; default: all. ``whole``:
    the types of the ops that get the rows of all ranks.
    """
    parts = len(arrays) if parts is None else parts
    specs = [
        tf.TensorSpec([None, *a.shape[1:]] if i < parts else a.shape, a.dtype)
        for i, a in enumerate(arrays)
    ]
    traced = tf.function(function, autograph=False).get_concrete_function(*specs)
    plan = Plan(traced.graph, [i < parts for i in range(len(traced.graph.inputs))])
    assert {text.partition(" ")[0] for text in plan.whole} == set(whole)
    loops = [part.nodes for n in plan.nodes for part in n.parts or ()]
    some = [n for n in plan.nodes if not n.is_whole or n.emit]
    divided.update(n.type for nodes in (some, *loops) for n in nodes)
    name, leaves = f"rules.{next(_number)}", [tf.constant(a) for a in arrays]
    if hvd.rank() > 0:
        work(plan, name)
        return

    def build(*leaves):
        return Side(plan, name, 0, hvd.size(), [*leaves, *traced.captured_inputs]).build()

    mine = tf.function(build, autograph=False)(*leaves)
    theirs = tf.nest.flatten(traced(*leaves))
    for value, a, b in zip(plan.outputs, mine, theirs, strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 1e-5, err_msg=value.node.type)


def work(plan, name):
    """Do what a worker does."""
    with tf.Graph().as_default() as graph:
        Side(plan, name, tf.constant(hvd.rank(), tf.int64), hvd.size(), None).build()
    worker.loaded(worker.finished(graph)[0])()


random = np.random.default_rng(1)


def rows(*inner, count=7, dtype="float32"):
    """Rows between 0 and 1, or small positive integers, or booleans."""
    if dtype == "bool":
        return random.random((count, *inner)) < 0.5
    if dtype.startswith("int"):
        return random.integers(1, 4, (count, *inner)).astype(dtype)
    return random.uniform(0.1, 0.9, (count, *inner)).astype(dtype)


# Elementwise ops of which both inputs cannot be rows or numbers of one dtype.
SPECIAL = {"Cast", "Select", "Bucketize", "Complex", "Real", "Imag", "Bitcast", "CheckNumerics"}
SPECIAL |= {"ClipByValue", "SelectV2", "AddN"}


def dtype_of(name):
    definition = op_def_registry.get(name)
    allowed = [set(a.allowed_values.list.type) for a in definition.attr if a.name == "T"]
    kinds = {tf.as_dtype(t).name for t in (allowed[0] if allowed else ())}
    first = [tf.as_dtype(a.type).name for a in definition.input_arg if a.type]
    order = ["float32", "int32", "bool"]
    return next((k for k in order if k in kinds), (first or ["float32"])[0])


@pytest.mark.parametrize("count", [3, 7])
def test_elementwise(count):
    names = [n for n in rules.ELEMENTWISE if n not in SPECIAL]
    for dtype in ("float32", "int32", "bool"):
        some = [n for n in names if dtype_of(n) == dtype and hasattr(raw, n)]

        def compute(x, y, z, some=some, dtype=dtype):
            for name in some:
                arguments = [a.name for a in op_def_registry.get(name).input_arg]
                op = getattr(raw, name)
                if len(arguments) == 1:
                    yield op(**{arguments[0]: x})
                    continue
                pairs = [(x, y), (x, x + x if dtype == "float32" else y)]
                if "Grad" not in name and name != "Snapshot":  # these broadcast
                    pairs += [(x, z), (z, y)]
                for a, b in pairs:
                    yield op(**dict(zip(arguments, (a, b), strict=True)))

        arrays = rows(3, 4, count=count, dtype=dtype), rows(3, 4, count=count, dtype=dtype)
        check(lambda *a, f=compute: list(f(*a)), *arrays, rows(4, count=3, dtype=dtype), parts=2)


def test_only_what_is_exact_is_divided():
    def worst(x, rounds):
        loop = tf.while_loop(
            lambda i, _: i < rounds, lambda i, _: (i + 1, tf.reduce_max(x)), (0, tf.constant(-5.0))
        )
        return loop[1]

    numbers, many = rows(2, 2, dtype="int32"), rows(count=300)
    factors, small = tf.constant([[1], [10]]), tf.uint8
    check(lambda x: tf.reduce_sum(x, 0) * factors, numbers)
    check(lambda x: tf.reduce_mean(tf.reduce_sum(x, 0)), numbers)
    overflows = lambda x: tf.cast(tf.reduce_sum(tf.cast(x > 0, small)), tf.float32)  # noqa: E731
    check(overflows, many)
    for rounds in (0, 1):
        check(lambda x, n=rounds: worst(x, n), -many, whole={"StatelessWhile"})


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 2.5])
def test_wrong_numbers_do_not_pass_the_check(wrong):
    variable = tf.Variable([1.0, 2.0])

    def step(change):
        variable.assign_add([change, 0.0])
        return tf.constant(0.0)

    text, _ = auto_check.compared(lambda: step(1.0), lambda: step(wrong), [variable.handle])
    assert "a variable is" in text
    expected = tf.constant([1.0, np.inf])
    text, _ = auto_check.compared(lambda: expected, lambda: tf.constant([wrong, np.inf]), [])
    assert "output 0 is" in text


def one_of_each(x, i):
    """Ops whose rows are independent, on images of 6 x 6 x 2 and on labels."""
    strides = [1, 2, 2, 1]
    kernel, deep = tf.ones([3, 3, 2, 3]) / 3, tf.ones([3, 3, 2, 2])
    cube, bias = tf.ones([2, 2, 2, 2, 3]), tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch([x, kernel, deep, cube, bias])
        flat, five = tf.reshape(x, [-1, 72]), tf.reshape(x, [-1, 3, 3, 4, 2])
        found = [
            tf.nn.conv2d(x, kernel, strides, "SAME"),
            tf.nn.depthwise_conv2d(x, deep, strides, "VALID"),
            tf.nn.conv3d(five, cube, [1] * 5, "VALID"),
            tf.nn.avg_pool2d(x, 2, 2, "SAME"),
            tf.nn.max_pool2d(x, 2, 2, "SAME"),
            tf.nn.avg_pool3d(five, 2, 1, "VALID"),
            tf.nn.max_pool3d(five, 2, 1, "VALID"),
            tf.nn.bias_add(x, bias),
            tf.nn.lrn(x),
            tf.nn.space_to_depth(x, 2),
            tf.nn.depth_to_space(tf.concat([x, x], -1), 2),
            tf.image.resize(x, [4, 5]),
            tf.image.resize(x, [3, 3], "nearest"),
            tf.math.top_k(flat, 3).values,
            tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(flat[:, ::-1]), flat),
            tf.nn.sparse_softmax_cross_entropy_with_logits(i, flat),
            tf.nn.softmax(flat),
            tf.nn.log_softmax(flat),
            raw.L2Loss(t=x),
        ]
        total = tf.add_n([tf.reduce_sum(tf.sin(one)) for one in found])
    found += tape.gradient(total, [x, kernel, deep, cube, bias])
    three = tf.concat([x, x[..., :1]], -1)
    turned = tf.tile([[1.0, 0.1, 0, 0.1, 1, 0, 0, 0]], [shape(x)[0], 1])
    found += [
        tf.cast(tf.math.in_top_k(i, flat, 9), tf.float32),
        tf.image.resize(x, [4, 5], "bicubic"),
        tf.nn.dilation2d(x, tf.ones([2, 2, 2]), [1] * 4, "SAME", "NHWC", [1] * 4),
        raw.ImageProjectiveTransformV3(
            images=x, transforms=turned, output_shape=[6, 6], fill_value=0.0,
            interpolation="BILINEAR", fill_mode="CONSTANT",
        ),
        tf.image.adjust_contrast(three, 2.0),
        tf.image.adjust_hue(three, 0.1),
        tf.image.adjust_saturation(three, 0.5),
        tf.image.rgb_to_hsv(three),
        tf.image.hsv_to_rgb(three),
    ]  # fmt: skip
    return found


@pytest.mark.parametrize("count", [3, 8])
def test_rowwise(count):
    images, labels = rows(6, 6, 2, count=count), rows(count=count, dtype="int32")
    check(one_of_each, images, labels, whole=["ScatterNd"])  # of the gradient of top_k


def layouts(x, i, table):
    """Ops that move numbers, reduce and contract, of rows of 4 x 6 and of a table of 5 x 6."""
    n, late = shape(x)[0], tf.transpose(x, [1, 0, 2])
    mask = x > 0.5
    whole = tf.reduce_sum(x, 0)  # a summand on each rank
    found = [
        tf.reshape(x, [-1, 3, 8]), tf.reshape(x, [n * 4, 6]), tf.reshape(x, [2, -1, 6])[0] * 1.0,
        tf.expand_dims(x, 1), tf.squeeze(x[:, :1], 1), late, tf.transpose(late, [2, 1, 0]),
        tf.concat([x, x], 2), tf.stack([x, x], 1), *tf.unstack(x, axis=1), *tf.split(x, 2, 2),
        *tf.split(x, [1, 3], 1), x[:, 1:3, ::2], x[..., -1], x[:, tf.newaxis], late[1],
        late[:, :n], x[:, :n],
        tf.slice(x, [0, 1, 2], [-1, 2, 3]), tf.slice(x, [0, 0, 1], [n, 4, 2]),
        tf.pad(x, [[0, 0], [1, 2], [0, 1]]), tf.pad(x, [[0, 0], [1, 1], [0, 0]], "REFLECT"),
        tf.tile(x, [1, 2, 1]), tf.broadcast_to(x[:, :1], [n, 4, 6]),
        tf.broadcast_to(x, [2, n, 4, 6]), tf.gather(table, i), tf.gather(x, [3, 0], axis=1),
        tf.gather(x, i[:, None], axis=1, batch_dims=1),
        tf.one_hot(i, 5), tf.math.unsorted_segment_sum(x, i, 5), tf.where(mask, x, 0.0),
        raw.Select(condition=x[:, 0, 0] > 0.5, x=x, y=-x), tf.ensure_shape(x, [None, 4, 6]),
        tf.linalg.band_part(x, 1, 1), tf.linalg.diag_part(x), tf.linalg.diag(x),
        tf.linalg.inv(x[:, :, :4] + 4 * tf.eye(4)),
        tf.linalg.cholesky(x[:, :2, :2] * 0 + tf.eye(2)),
        *(f(x, axis) for f in (tf.reduce_sum, tf.reduce_mean, tf.reduce_max, tf.reduce_min,
                               tf.reduce_prod, tf.math.reduce_euclidean_norm)
          for axis in (2, [1, 2])),
        *(f(x, axis) for f in (tf.reduce_sum, tf.reduce_mean, tf.reduce_max, tf.reduce_min)
          for axis in (0, [0, 2], None)),
        *(tf.cast(f(mask, axis), tf.int32)
          for f in (tf.reduce_all, tf.reduce_any) for axis in (0, 1)),
        tf.argmax(x, 2), tf.argmin(x, 1), tf.cumsum(x, 1), tf.math.cumprod(x, 2, reverse=True),
        tf.reverse(x, [1]), tf.einsum("bij,kj->bik", x, table), tf.einsum("bij,bkj->ik", x, x),
        tf.matmul(x[:, 0], table, transpose_b=True), tf.matmul(x, x, transpose_b=True),
        tf.matmul(x[:, 0], x[:, 1], transpose_a=True), tf.fill([n, 2], 3.0), tf.zeros_like(x),
        whole + whole, -whole, whole - tf.reduce_sum(x * x, 0), tf.reshape(whole, [24]) * 1.0,
        tf.transpose(whole), tf.cast(whole, tf.float64), tf.square(whole), whole * whole, whole / 2,
        tf.reduce_sum(whole, 1), tf.reduce_mean(whole), tf.concat([whole, whole], 0),
        tf.expand_dims(whole, 0) + 1.0, x - whole, x / tf.cast(n, tf.float32), tf.add_n([x, x, x]),
        raw.ClipByValue(t=x, clip_value_min=0.3, clip_value_max=0.6),
        raw.BatchMatMul(x=x, y=x, adj_y=True),
        raw.BatchMatMulV3(x=x, y=x, adj_x=True, Tout=x.dtype),
        tf.pad(x, [[0, 0], [1, 2], [0, 1]], constant_values=2.0),
        raw.Bucketize(input=x, boundaries=[0.3, 0.6]),
        tf.math.real(tf.complex(x, x)), tf.math.imag(tf.complex(x, -x)),
        tf.bitcast(x, tf.int32), raw.CheckNumerics(tensor=x, message=""), tf.cast(x * 9, tf.int32),
        tf.squeeze(tf.expand_dims(whole, 0) * 2, 0),
        tf.linalg.solve(x[:, :, :4] + 4 * tf.eye(4), x),
        tf.scatter_nd(i[:, None] % 3, x, [3, 4, 6]), raw.DenseBincount(
            input=tf.stack([i, i + 1], 1), size=7, weights=tf.zeros([0]), binary_output=False
        ),
    ]  # fmt: skip
    with tf.GradientTape() as tape:
        tape.watch(x)
        mirrored = tf.pad(x, [[0, 0], [1, 1], [0, 0]], "REFLECT")
        total = tf.reduce_sum(x[:, 1:3, ::2] ** 2) + tf.reduce_sum(mirrored**2)
        total += tf.reduce_sum(tf.pad(x, [[0, 0], [1, 1], [0, 0]], constant_values=2.0) ** 2)
        total += tf.reduce_sum(tf.gather(x, [3, 0, 3], axis=1) ** 2)
        total += tf.reduce_sum(tf.repeat(x, 2, axis=1) ** 2)
    return [*found, tape.gradient(total, x)]


# Each has one op that combines rows.
CROSSING = {
    "Reshape": lambda x, y: tf.reshape(x, [6, -1]),
    "Sub": lambda x, y: x - y[:, :1],  # [B] and [B, 1], which are [B, B]
    "MatMul": lambda x, y: tf.matmul(y, y, transpose_b=True),
    "Cumsum": lambda x, y: tf.cumsum(y),
    "ReverseV2": lambda x, y: tf.reverse(y, [0]),
    "Prod": lambda x, y: tf.reduce_prod(y, 0),
    "Softmax": lambda x, y: tf.nn.softmax(tf.transpose(y)),
    "ArgMax": lambda x, y: tf.argmax(y, 0),
    "StridedSlice": lambda x, y: y[1:] * 1.0,
    "Slice": lambda x, y: tf.slice(y, [1, 0], [2, 6]),
    "Pad": lambda x, y: tf.pad(y, [[1, 0], [0, 0]]),
    "Tile": lambda x, y: tf.tile(y, [2, 1]),
    "ConcatV2": lambda x, y: tf.concat([y, y], 0),
    "GatherV2": lambda x, y: tf.gather(y, [1, 0]),
    "Unique": lambda x, y: tf.unique(x)[0],
    "Einsum": lambda x, y: tf.einsum("bi,ci->bc", y, y),
    "TopKV2": lambda x, y: tf.math.top_k(x, 2).values,
    "AdjustContrastv2": lambda x, y: raw.AdjustContrastv2(
        images=tf.reshape(y, [-1, 2, 3]), contrast_factor=2.0
    ),
}


@pytest.mark.parametrize("count", [3, 7])
def test_layouts(count):
    arrays = rows(4, 6, count=2 * count), rows(count=2 * count, dtype="int32"), rows(6, count=5)
    check(layouts, *arrays, parts=2, whole=["Reshape", "StridedSlice"])


@pytest.mark.parametrize("name", CROSSING)
def test_crossing(name):
    check(CROSSING[name], rows(count=6), rows(6, count=6), whole=[name])


def test_loops():
    r = rows(4, 3, count=5)
    for kind in (keras.layers.LSTM, keras.layers.GRU, keras.layers.SimpleRNN):
        layer = keras.Sequential([kind(3, return_sequences=True), kind(2)])
        layer(r)

        def step(x, layer=layer):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(layer(x) ** 2)
            found, *more = tape.gradient(loss, [x, *layer.trainable_weights])
            return [loss, tf.reduce_sum(found**2), *more]

        check(step, r)


def test_every_rule_has_been_divided():
    """It runs last in this file."""
    missing = set(rules.RULES) - divided
    assert sorted(missing) == []


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_table_larger_than_its_rows_stays_on_the_first_rank(optimizer):
    layers = [keras.layers.Embedding(500, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
    net = keras.Sequential([keras.Input((7,), dtype="int32"), *layers])
    net.compile(optimizer, "mse")
    net.optimizer.build(net.trainable_variables)
    words, labels = tf.TensorSpec([None, 7], tf.int32), tf.TensorSpec([None, 1])

    def sent(function, spec, rows):
        traced = tf.function(function, autograph=False).get_concrete_function(spec)
        plan, _ = planned(traced, rows)
        assert not plan.whole
        found = [(kind, v.shape.as_list()) for _, kind, v in plan.exchanges.values()]
        return {kind for kind, shape in found if shape == [500, 4]}

    def train(data):
        return net.train_step(data)

    # 32 rows have 896 of the table's 2,000 numbers, 100 rows 2,800.
    assert not sent(train, (words, labels), 32)
    assert sent(train, (words, labels), 100) >= {"broadcast"}
    assert sent(lambda data: net(data), words, 32) == {"keep"}


def test_weights_that_only_a_loop_reads_are_kept():
    net = keras.Sequential([keras.Input((5, 2)), keras.layers.LSTM(3, unroll=False)])
    function = tf.function(lambda data: net(data), autograph=False)
    traced = function.get_concrete_function(tf.TensorSpec([None, 5, 2]))
    plan, _ = planned(traced, 8)
    assert [v for v in plan.nodes if "While" in v.type]
    assert not plan.whole
    found = [(kind, v.shape.as_list()) for _, kind, v in plan.exchanges.values()]
    assert {kind for kind, shape in found if shape in ([2, 12], [3, 12], [12])} == {"keep"}


def test_batch_normalization_takes_three_rounds():
    """Mean and variance; and in the gradient both sums at once. The ranks compute the rest each."""
    layers = keras.layers
    blocks = [[layers.Conv2D(8, 1), layers.BatchNormalization(), layers.ReLU()] for _ in "ab"]
    net = keras.Sequential([keras.Input((4, 4, 8)), *blocks[0], *blocks[1], layers.Flatten()])
    net.compile("sgd", "mse")
    net.optimizer.build(net.trainable_variables)
    spec = tf.TensorSpec([None, 4, 4, 8]), tf.TensorSpec([None, 128])
    function = tf.function(lambda data: net.train_step(data), autograph=False)
    plan, _ = planned(function.get_concrete_function(spec), 8)
    rounds = [(at, kind) for at, kind, _ in plan.exchanges.values()]
    assert len({at for at, kind in rounds if kind == "allreduce"}) == 2 * 3
    assert {kind for at, kind in rounds if at > 0} == {"allreduce", "reduce"}


def test_workers_free_what_the_first_rank_has_freed(monkeypatch):
    if hvd.rank() == 0:
        for _ in range(3):
            worker.share(None, tf.Graph())
        messages.command(messages.STOP)
        return
    load, kept, counts = worker.loaded, weakref.WeakSet(), []

    def loaded(graph):
        gc.collect()
        counts.append(len(kept))
        kept.add(found := load(graph))
        return found

    monkeypatch.setattr(worker, "loaded", loaded)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    worker.work()
    assert counts == [0, 0, 0]


def test_a_step_that_changes_a_small_variable_otherwise_is_found() -> None:
    """But not what differs by rounding, such as the sign of a number that should be zero."""
    weights, bias, zero = tf.Variable(tf.ones([100])), tf.Variable([1.0, 2.0]), tf.Variable(0.5)
    counter = tf.Variable(0)

    def step(factor, of_zero):
        @tf.function
        def of():
            zero.assign_add(tf.sign(of_zero(zero + 0.1)))
            weights.assign_add(0.1 * weights)
            bias.assign_add(factor * bias)
            counter.assign_add(1)
            return tf.reduce_sum(weights)

        return of

    one = step(0.1, lambda x: 1.1 * x - (x + 0.1 * x))
    same = step(0.1, lambda x: (1.1 * x - x) - 0.1 * x)
    handles = auto_check.assigned(*(of.get_concrete_function() for of in (one, same)))
    assert len(handles) == 4
    for other, why in ((same, ""), (step(0.2, lambda x: 0.0 * x), "a variable is [1.2 2.4] inst")):
        for variable, value in ((weights, tf.ones([100])), (bias, [1.0, 2.0]), (zero, 0.5)):
            variable.assign(value)
        counter.assign(0)
        found, outputs = auto_check.compared(one, other, handles)
        assert found[: len(why) or None] == why
        np.testing.assert_allclose(bias, [1.1, 2.2], rtol=1e-6)
        np.testing.assert_allclose(outputs, 110.0, rtol=1e-6)
        assert int(counter) == 1
