"""Sources that are a ``tf.data.Dataset``: of rows or batches, of known or unknown length.

Every rank runs the whole source and keeps its part of each step. The rows of a dataset of unknown
length are counted before training: if Keras found the end itself, it would already have begun a
step, and some of the ranks might have counted it in ``optimizer.iterations``.
"""

import collections
import dataclasses
import functools
import itertools
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras.data import reading
from hvd_keras.data.reading import Source
from hvd_keras.data.split import Split
from hvd_keras.data.tensorflow import arrays
from hvd_keras.runtime import log

# Datasets that yield one element per element of their input, in the same order.
_ELEMENTWISE = {"AssertCardinality", "Cache", "Map", "Options", "ParallelMap", "Prefetch"}
#: Those of them that make their elements anew in each pass.
PASSING_ON = _ELEMENTWISE - {"Cache"}
# Datasets of the same elements, perhaps in another order or number.
_SAME_ELEMENTS = _ELEMENTWISE - {"Map", "ParallelMap"} | {
    *("Filter", "Repeat", "Shard", "Shuffle", "Skip", "Take")
}
_OF_ELEMENTS = {"Batch", "ParallelBatch", "PaddedBatch"}
_BATCHING = _OF_ELEMENTS | {"Rebatch"}
_WARNING_SECONDS = 30
_COMPARED = 16  # rows by which ranks see whether they have the same


def has_static_batches(source: Any) -> bool:
    """Whether it is a dataset of batches that all have the same, static number of rows."""
    if not isinstance(source, tf.data.Dataset) or not _makes_batches(source):
        return False
    shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(source.element_spec)]
    return all(shape is not None and shape.rank and shape[0] is not None for shape in shapes)


def dataset_source(source: Any, split: Split) -> Source:
    """Open a dataset."""
    batch_size, shuffle = split.batch_size, split.shuffle
    if source.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "the dataset is infinite. Shard it before repeat(): hvd.data.shard(dataset, "
            "…).repeat(), and give fit steps_per_epoch."
        )
    batched = _is_batched(source)
    if not batched and batch_size is None:
        raise ValueError("batch_size=None, expected rows per rank and step, as in batch_size=32.")
    seeds = seeds_of(source, alone=split.size == 1)
    description = f"{batched=}, shuffles with the seeds {seeds}"
    looked = (source, 1) if batched else (source.batch(1), _COMPARED)
    some: list[Any] = []
    # Of a dataset that shuffles itself this also shows whether one rank has begun more passes of it
    # than others, for example to look at some rows. All numbers of ranks begin equally many.
    if split.uneven == "pad" or split.size > 1 or seeds:
        some = _first(*looked)
    description += f", first elements {reading.digest(reading.y_of(some, arrays.flatten))}"
    known = int(source.cardinality()) >= 0
    length, own_size, counts = _measure(source) if batched else (_length(source), None, None)
    if length == 0:
        raise ValueError("the dataset is empty.")
    if not known:  # later passes must have as many
        elements = len(counts) if counts else -(-length // (own_size or 1))
        source = source.apply(tf.data.experimental.assert_cardinality(elements))
    if shuffle is None:
        shuffle = known and not (batched or seeds)
    split = dataclasses.replace(split, length=length, batch_size=batch_size or own_size)
    size, pads = split.batch_size, split.uneven == "pad"
    whole_batches = batched and batch_size is None and not shuffle and not pads
    whole = not split.has_short_step
    if whole_batches and split.size > 1 and counts and _shuffles_batches(source):
        first, last = (split.of_batches(sorted(counts, key=key)) for key in (int, int.__neg__))
        if first[0] != last[0] or (split.uneven != "share" and min(counts) < size):
            raise ValueError(
                f"the dataset shuffles batches of {min(counts)} to {size} rows, so the number of "
                "steps would differ by epoch. Call shuffle() before batch(), or make all batches "
                "equal: batch(…, drop_remainder=True)."
            )
    is_dealt = whole_batches and (split.size == 1 or (counts is None and whole))
    padding = _padding_of(source) if batched and not is_dealt else None

    def batches(epoch: Any, row: Any) -> tf.data.Dataset:
        left = length - row
        wanted, rest = left // split.global_batch * size, left % split.global_batch
        if pads or not whole:
            wanted += tf.minimum(rest, 1) * size if pads else rest // split.size
        if whole_batches:
            others = source.skip(row // size)
            if split.size == 1 and split.uneven == "share":
                return others
            if counts is None and whole:
                return _mine(others, -(-left // size), wanted // size, split)
            groups = others.window(split.size)
            part = functools.partial(_part, split=split, padding=padding)
            return _apply(groups.flat_map, groups, part)
        rows = source.unbatch() if batched else source
        if shuffle:
            # Sets the seed of the function being traced; the program's seed, which would be mixed
            # in, may differ by rank. It must not be 0 if the other seed is a tensor.
            tf.random.set_seed(split.seed % (2**31 - 2) + 1)
            buffer = length if shuffle is True else shuffle
            rows = rows.shuffle(buffer, epoch, reshuffle_each_iteration=False)
        mine = _mine(rows.skip(row), left, wanted, split, some[0] if pads else None)
        mine = (
            _batch(mine, size, whole, padding)
            if batched
            else mine.batch(size, drop_remainder=whole)
        )
        return _with_weights(mine, left, split) if pads else mine

    of, is_shuffled = source.element_spec, bool(shuffle or seeds)
    made = Source(split, description, is_shuffled, spec=of, batches=batches, reads=True)
    made.look = lambda: reading.x_of(_first(*looked), arrays.flatten)
    made.x = reading.digest(reading.x_of(some, arrays.flatten))
    unit = size if counts is None else 0
    return dataclasses.replace(made, counts=counts, unit=unit) if whole_batches else made


def _mine(
    source: Any, number: Any, wanted: Any, split: Split, first: Any = None
) -> tf.data.Dataset:
    """Return ``wanted`` elements for this rank, every size-th of the source's ``number``.

    If these are fewer, copies of the first element of ``first``, a batch, are added.
    """
    # Read to the end: only then is a cache complete, and the number of elements checked.
    to_the_end = any(kind_of(node) in ("AssertCardinality", "Cache") for node in nodes(source))
    # A map would make a row of a ragged tensor a dense one, but not a batch of one.
    specs = tf.nest.flatten(source.element_spec)
    is_ragged = any(isinstance(spec, tf.RaggedTensorSpec) for spec in specs)

    def take(elements: tf.data.Dataset) -> tf.data.Dataset:
        if not to_the_end:
            return elements.take(wanted)
        numbered = (elements.batch(1) if is_ragged else elements).enumerate()
        taken = numbered.filter(lambda place, element: place < wanted)
        taken = taken.map(lambda place, element: element)
        return taken.unbatch() if is_ragged else taken

    mine = take(source.shard(split.size, split.rank))
    if first is None:
        return mine
    own = (number - split.rank + split.size - 1) // split.size  # rounded up: earlier ranks first
    fill = take(tf.data.Dataset.from_tensors(first).unbatch().take(1))
    return mine.concatenate(fill.repeat(tf.maximum(wanted - own, 0)))


def _first(source: Any, count: int) -> list[Any]:
    elements = iter(source)
    some = list(itertools.islice(elements, count))
    if any(kind_of(node) == "Cache" for node in nodes(source)):  # not usable if it is read partly
        collections.deque(elements, maxlen=0)
    return some


def source_of(source: Any) -> tuple[list[Any], str] | None:
    """Return the arrays of whose rows a dataset is made, each once in each pass, and how.

    Of ragged and sparse tensors, return an array of the first rows' hashes. None: that is unknown.
    """
    functions = ""
    while (kind := kind_of(source)) != "TensorSlice":
        if kind in ("Map", "ParallelMap"):
            function = source._functions()[0].function
            captured, ops = function.captured_inputs, list(_ops(function.graph))
            fixed = [*captured, *(op.outputs[0] for op in ops if op.type == "Const")]
            reads = any(op.op_def.is_stateful or op.type == "ReadFile" for op in ops)
            if reads or not all(map(_is_small, fixed)):
                return None
            functions += f"{function.graph.as_graph_def()}{[c.numpy() for c in captured]}"
        elif kind == "Shuffle":  # a script may give each rank a seed of its own
            functions += f"{int(source._seed)} {int(source._seed2)}"
        elif kind not in _ELEMENTWISE | _BATCHING | {"Repeat", "Unbatch"}:
            return None
        (source,) = source._inputs()
    tensors = list(source._tensors)
    if any(one.dtype == tf.variant for one in tensors):  # ragged or sparse: hashes of rows
        rows = [tf.nest.flatten(row, expand_composites=True) for row in source.take(_COMPARED)]
        tensors = [np.array([reading.digest(row) for row in rows])]
        functions += f"{int(source.cardinality())}"
    return tensors, functions


def _is_small(tensor: Any) -> bool:
    """Whether a tensor has few values, which can be shown."""
    size = tensor.shape.num_elements()
    return tensor.dtype not in (tf.resource, tf.variant) and size is not None and size < 1000


def cache_files(source: Any) -> list[tuple[str, str]]:
    """Return host and name of the files in which a dataset caches elements."""
    names = [node._filename.numpy().decode() for node in nodes(source) if kind_of(node) == "Cache"]
    return [(socket.gethostname(), name) for name in names if name]


def _with_weights(mine: Any, left: Any, split: Split) -> tf.data.Dataset:
    """Yield pairs of a batch and the weights of its rows for "pad"; ``left`` rows are to come."""
    size, global_batch = split.batch_size, split.global_batch

    def weights(step: Any) -> Any:
        places = (step * size + tf.range(size, dtype=tf.int64)) * split.size
        rows = tf.minimum(left - step * global_batch, global_batch)
        weight = tf.cast(split.weight(rows), tf.float32)
        return tf.where(places + split.rank < left, weight, 0.0)

    return tf.data.Dataset.zip(mine, tf.data.Dataset.range(split.steps).map(weights))


def _part(group: Any, split: Split, padding: Any) -> tf.data.Dataset:
    """Return this rank's batch of one step, if any. ``Split.of_batches`` mirrors this.

    ``group`` has the batches of the step, one per rank; fewer at the end.
    """
    group = tf.data.Dataset.zip(group)
    counts = _apply(group.map, group, _rows).batch(split.size).get_single_element()
    rows = tf.reduce_sum(counts)
    even = (tf.size(counts) == split.size) & tf.reduce_all(counts == counts[0])
    if split.uneven != "share":
        even &= rows == split.global_batch
    own = group.skip(split.rank).take(tf.cast(even, tf.int64))
    if split.uneven != "share":
        return own
    count = tf.where(even, tf.zeros_like(rows), rows // split.size)
    # An uneven last step: its rows, as one process would see them, in equal shares.
    rest = group.unbatch().skip(split.rank * count).take(count)
    return own.concatenate(_batch(rest, tf.maximum(count, 1), False, padding))


def _is_batched(source: Any) -> bool:
    """Whether the elements are batches. Raises ValueError if nothing shows it."""
    shapes = [spec.shape for spec in tf.nest.flatten(source.element_spec)]
    first = {None if shape.rank is None else [*shape.as_list(), "scalar"][0] for shape in shapes}
    if len(first) > 1 or "scalar" in first:
        return False  # the parts of a batch have equally many rows
    found = _makes_batches(source)
    if found is None and None in first:
        raise ValueError(
            f"cannot tell whether the elements of the dataset, {source.element_spec}, are batches "
            "or rows. For batches, use hvd.data.shard(dataset.unbatch(), batch_size=…). For rows, "
            "set their shape: dataset.map(lambda x: tf.ensure_shape(x, […]))."
        )
    return bool(found)


def _makes_batches(node: Any) -> bool | None:
    """Whether a dataset yields batches, judged by how it was made; None if unknown."""
    # Shapes cannot tell: rows of shape [32, 3] and batches of 32 rows of shape [3] look alike.
    kind, inputs = kind_of(node), node._inputs()
    if kind in _BATCHING:
        return True
    if kind in ("Unbatch", "TensorSlice"):
        return False
    if kind in ("FlatMap", "Interleave", "ParallelInterleave", "GroupByWindow"):
        graphs = [function.function.graph for function in node._functions()]
        ops = {op.type for graph in graphs for op in graph.get_operations()}
        if any(op.startswith(kind) for op in ops for kind in _BATCHING):
            # window(n).flat_map(lambda part: part.batch(n)) makes rows that are sequences.
            return not any(kind_of(node) == "Window" for node in nodes(node))
        if kind != "GroupByWindow":
            return None
    found = [_makes_batches(node) for node in inputs]
    if True in found:
        return True
    # A function may turn a row, such as a file name, into a batch.
    return None if None in found or not found or kind in ("Map", "ParallelMap") else False


def seeds_of(source: Any, alone: bool) -> list[tuple[int, int]]:
    """Return the seeds with which the dataset shuffles; without any, the order differs by rank."""
    _check_names()
    made_of = list(nodes(source))
    shuffles = [node for node in made_of if kind_of(node) in ("Shuffle", "Random")]
    seeds = [(int(node._seed), int(node._seed2)) for node in shuffles]
    if alone:
        return seeds
    ops = list(_ops_of(made_of))
    if (0, 0) in seeds or any(map(_is_unseeded, ops)):
        raise ValueError(
            "the dataset shuffles without a seed, so its order differs by rank. Give it a seed, "
            "dataset.shuffle(…, seed=1), Dataset.list_files(…, seed=1), or let "
            "hvd.data.shard(…, shuffle=True) shuffle."
        )
    hasty = [getattr(node, "_deterministic", None) for node in made_of]
    hasty += [op.node_def.attr["deterministic"].s.decode() for op in ops]
    if "false" in hasty:
        raise ValueError(
            "the dataset has deterministic=False, so its order differs by rank. Remove that from "
            "map() and interleave()."
        )
    return seeds


def _ops_of(made_of: list[Any]) -> Iterator[Any]:
    """Yield the ops of the functions of datasets."""
    for node in made_of:
        for one in node._functions():
            yield from _ops(one.function.graph)


def _ops(graph: Any) -> Iterator[Any]:
    """Yield the ops of a function and, recursively, of those that it calls."""
    for op in graph.get_operations():
        yield op
        for attr in op.node_def.attr.values():
            for called in (attr.func, *attr.list.func):  # a list: of tf.switch_case
                if called.name:
                    yield from _ops(graph._get_function(called.name).graph)


def _is_unseeded(op: Any) -> bool:
    """Whether an op shuffles, or draws, elements of a dataset in another order on each rank."""
    pairs = zip(op.op_def.input_arg, op.inputs, strict=False)
    seeds = [tf.get_static_value(x) for arg, x in pairs if arg.name in ("seed", "seed2")]
    return op.type.startswith(("ShuffleDataset", "RandomDataset")) and seeds == [0, 0]


def _measure(source: Any) -> tuple[int, int, list[int] | None]:
    """Return the total rows, the rows of the largest batch, and those of each or None.

    The last is None if at most the last batch is short.
    """
    node = below(source, _ELEMENTWISE)
    is_plain = kind_of(node) in _OF_ELEMENTS
    if is_plain and changes_rows(source, _ELEMENTWISE):  # or that is unknown: the first batch tells
        is_plain = [int(_rows(x)) for x in _first(source, 1)] == [
            min(_length(node._inputs()[0]), int(node._batch_size))
        ]
    if not is_plain:
        counts = _read_counts(source, _rows)
        return sum(counts), max(counts, default=1), counts
    # The length of what batch() was called on tells all, without reading batches.
    length, size = _length(node._inputs()[0]), int(node._batch_size)
    return length - (length % size if node._drop_remainder else 0), size, None


def batches_of(source: Any) -> list[int] | None:
    """Return what tells how many rows each batch has; None if they would have to be read."""
    node = below(source, _ELEMENTWISE)
    if kind_of(node) not in _OF_ELEMENTS:
        return None
    length = int(node._inputs()[0].cardinality())
    if length == tf.data.UNKNOWN_CARDINALITY or changes_rows(source, _ELEMENTWISE):
        return None
    return [length, int(node._batch_size), int(node._drop_remainder)]


def _length(source: Any) -> int:
    """Return the number of elements; count them if it is unknown."""
    if source.cardinality() >= 0:
        return int(source.cardinality())
    source = below(source, _ELEMENTWISE | {"Shuffle"})  # these need not run
    return sum(_read_counts(source, lambda element: tf.constant(1, tf.int64)))


def _read_counts(source: Any, count: Callable[[Any], Any]) -> list[int]:
    counts: list[int] = []
    asked = time.monotonic()
    for part in _apply(source.map, source, count).batch(256):
        counts += part.numpy().tolist()
        if time.monotonic() - asked > _WARNING_SECONDS:
            log.logger.warning(
                "hvd.data.shard counts the elements of a dataset of unknown length: %s so far. To "
                "avoid this, or if the dataset is infinite, declare the number before batch(): "
                "dataset.take(n).apply(tf.data.experimental.assert_cardinality(n)).",
                len(counts),
            )
            asked = time.monotonic()
    return counts


def below(source: Any, kinds: set[str]) -> Any:
    """Return the first input of a dataset that is not of one of these kinds."""
    while kind_of(source) in kinds:
        (source,) = source._inputs()
    return source


def changes_rows(source: Any, kinds: set[str]) -> bool:
    """Whether a map above what ``below`` returns may change the number of a batch's rows."""
    while kind_of(source) in kinds:
        if kind_of(source) in ("Map", "ParallelMap") and not _keeps_rows(source):
            return True
        (source,) = source._inputs()
    return False


def _keeps_rows(node: Any) -> bool:
    """Whether a map is known to return as many rows as it gets."""
    (function,) = (one.function for one in node._functions())
    graph, rows = function.graph, 7919  # which no function makes of another number
    given, names = {}, [t.name for t in graph.outputs if t.dtype != tf.variant]
    with tf.Graph().as_default():  # which never runs
        for part in graph.inputs[: len(graph.inputs) - len(function.captured_inputs)]:
            if part.shape.rank and part.dtype != tf.variant:
                rows = part.shape[0] or rows
                given[part.name] = tf.compat.v1.placeholder(part.dtype, [rows, *part.shape[1:]])
        try:
            found = tf.graph_util.import_graph_def(graph.as_graph_def(), given, names)
        except ValueError:  # it takes another number of rows alone
            return False
    # The parts of a batch have equally many rows: to know it of one is enough.
    return any(t.shape.rank and t.shape[0] == rows for t in found)


def _rows(batch: Any) -> Any:
    """Return the number of rows of a batch, int64."""
    part = tf.nest.flatten(batch)[0]
    if isinstance(part, tf.RaggedTensor):
        return tf.cast(part.nrows(), tf.int64)
    if isinstance(part, tf.SparseTensor):
        return part.dense_shape[0]
    return tf.shape(part, tf.int64)[0]


def _batch(rows: Any, batch_size: Any, whole: bool, padding: Any) -> tf.data.Dataset:
    """Batch rows of former batches; pad them again if those may have been padded."""
    if _may_be_padded(rows.element_spec, 0):
        return rows.padded_batch(batch_size, padding_values=padding, drop_remainder=whole)
    return rows.batch(batch_size, drop_remainder=whole)


def _may_be_padded(spec: Any, first: int) -> bool:
    """Whether dense elements may have different shapes, from this dimension on."""
    specs = tf.nest.flatten(spec)
    dense = all(isinstance(one, tf.TensorSpec) and one.shape.rank is not None for one in specs)
    return dense and not all(one.shape[first:].is_fully_defined() for one in specs)


def _padding_of(source: Any) -> Any:
    """Return the values with which the batches of a dataset were padded; None: with 0."""
    if not _may_be_padded(source.element_spec, 1):
        return None
    node = below(source, _SAME_ELEMENTS)
    if kind_of(node) == "PaddedBatch":
        return node._padding_values
    made_of = list(nodes(source))
    found = [one._padding_values for one in made_of if kind_of(one) == "PaddedBatch"]
    for op in _ops_of(made_of):  # also in functions, as of bucket_by_sequence_length
        if op.type == "PaddedBatchDatasetV2":  # before the last input are as many as shapes
            found.append([*op.inputs][len(op.inputs) // 2 + 1 : -1])
    values = map(tf.get_static_value, tf.nest.flatten(found))
    if any(value is None or np.asarray(value).item() not in (0, b"") for value in values):
        raise ValueError(
            "the dataset was padded, perhaps not with 0, and then mapped, zipped or padded within "
            "a function; hvd.data.shard would pad it with 0 where it puts rows into other batches "
            "(with batch_size, shuffle, uneven='pad', and in a last step of fewer rows). Call "
            "map() after shard(…), or shard the rows and then pad: "
            "hvd.data.shard(rows, batch_size=1).unbatch().padded_batch(…)."
        )
    return None


def _shuffles_batches(node: Any) -> bool:
    """Whether a dataset has its batches in another order in each pass."""
    if kind_of(node) in _BATCHING | {"GroupByWindow"}:  # there, the last ones are short
        return False
    shuffles = kind_of(node) == "Shuffle" and node._reshuffle_each_iteration is not False
    return shuffles or any(map(_shuffles_batches, node._inputs()))


def _apply(method: Any, dataset: Any, function: Callable[[Any], Any]) -> Any:
    """Call a method such as ``dataset.map``; ``function`` gets a tuple as one argument."""
    is_tuple = isinstance(dataset.element_spec, tuple)
    return method(lambda *parts: function(parts if is_tuple else parts[0]))


def nodes(source: Any) -> Iterator[Any]:
    """Yield a dataset and, recursively, its inputs; nothing of other data."""
    if not isinstance(source, tf.data.Dataset):
        return
    yield source
    for node in source._inputs():
        yield from nodes(node)


@functools.cache
def _check_names() -> None:
    """Check that TensorFlow shows how a dataset was made: an order that differs would go unseen."""
    made = tf.data.Dataset.range(1).shuffle(1, seed=1).map(lambda x: x, 1, deterministic=False)
    (shuffled,) = made._inputs()
    if (kind_of(shuffled), int(shuffled._seed2), made._deterministic) != ("Shuffle", 1, "false"):
        raise RuntimeError(
            f"hvd_keras cannot see how TensorFlow {tf.__version__} shuffles a dataset. Run: "
            'pip install "tensorflow<2.23"'
        )


def kind_of(node: Any) -> str:
    """Return ``Batch`` for TensorFlow's ``_BatchDataset``, and so on."""
    return type(node).__name__.strip("_").removesuffix("Dataset")
