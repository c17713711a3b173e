"""``tf.data.Dataset``: of rows or of batches, of known or unknown length.

Every rank runs the whole source and keeps its part of each step. Rows of a dataset of unknown
length are counted before: where Keras finds the end by itself, it has already begun a step, and
may have counted it in ``optimizer.iterations`` on some of the ranks.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from hvd_keras import log
from hvd_keras.data import arrays
from hvd_keras.data.split import Source, Split

# Datasets that give one element for each one of their input, in the same order.
_ELEMENTWISE = {"AssertCardinality", "Cache", "Map", "Options", "ParallelMap", "Prefetch"}
_BATCHING = {"Batch", "ParallelBatch", "PaddedBatch", "Rebatch"}
_WARNING_SECONDS = 30


def of_dataset(
    source: Any, batch_size: int | None, shuffle: bool | int | None, seed: int, split: Split
) -> Source:
    """Opens a dataset."""
    if source.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "the dataset is infinite. Shard it before repeat(): hvd.data.shard(dataset, "
            "…).repeat(), and give fit steps_per_epoch."
        )
    batched = _is_batched(source)
    if not batched and batch_size is None:
        raise ValueError("batch_size=None, expected rows per rank and step.")
    seeds = _seeds(source, alone=split.size == 1)
    facts = f"{batched=}, shuffles with the seeds {seeds}"
    if split.size > 1 and not seeds:
        first = next(iter(source), None)
        facts += f", first element {None if first is None else arrays.digest(arrays.y_of(first))}"
    known = int(source.cardinality()) >= 0
    length, own_size, counts = _measure(source) if batched else (_length(source), None, None)
    if length == 0:
        raise ValueError("the dataset is empty.")
    if shuffle is None:
        shuffle = known and not (batched or seeds)
    size: int = batch_size or own_size  # type: ignore[assignment]
    whole_batches = batched and batch_size is None and not shuffle
    steps, left_out = split.steps(length, size), split.left_out(length, size)
    if whole_batches and counts is not None:
        steps, left_out = split.of_batches(counts, size)

    def batches(epoch: Any) -> tf.data.Dataset:
        of_steps = source
        if not whole_batches:
            rows = source.unbatch() if batched else source
            if shuffle:
                # For the function being traced, lest the program's own seed, which may differ by
                # rank, be mixed in. With a tensor as the other seed it must not be 0.
                tf.random.set_seed(seed % (2**31 - 2) + 1)
                buffer = length if shuffle is True else shuffle
                rows = rows.shuffle(buffer, epoch, reshuffle_each_iteration=False)
            of_steps = _batch(rows, size) if batched else rows.batch(size)
        groups = of_steps.window(split.size)

        def part(group: Any) -> tf.data.Dataset:
            return _part(tf.data.Dataset.zip(group), size, length, split)

        mine = _apply(groups.flat_map, groups, part)
        short = whole_batches or split.has_short_step(length, size)
        return mine if short else _map(mine, _with_rows(size))

    return Source(source.element_spec, length, size, steps, left_out, facts, batches)


def _part(group: Any, batch_size: int, length: int, split: Split) -> tf.data.Dataset:
    """This rank's batch of one step, if any. Mirrored by ``Split.of_batches``.

    Args:
        group: a dataset of as many batches as there are ranks; of fewer at the end.
        batch_size, length, split: as for all steps.
    """
    together = split.size * batch_size
    counts = _map(group, _rows).batch(split.size).get_single_element()
    rows = tf.reduce_sum(counts)
    even = (tf.size(counts) == split.size) & tf.reduce_all(counts == counts[0])
    if split.uneven != "share":
        even &= rows == together
    own = group.skip(split.rank).take(tf.cast(even, tf.int64))
    if split.uneven == "share":
        count = tf.where(even, tf.zeros_like(rows), rows // split.size)
        rest = group.unbatch().skip(split.rank * count).take(count)
        return own.concatenate(_batch(rest, tf.maximum(count, 1)))
    if split.uneven == "pad":
        full, weight = (split.weight(number, length, batch_size) for number in (together, rows))
        own = _map(own, lambda batch: (batch, tf.fill([batch_size], float(full))))

        def weigh(place: Any, row: Any) -> tuple[Any, Any]:
            return row, tf.where(place < rows, tf.cast(weight, tf.float32), 0.0)

        count = tf.where(even, tf.zeros_like(rows), batch_size)
        places = group.unbatch().repeat().enumerate().shard(split.size, split.rank).take(count)
        return own.concatenate(_batch(places.map(weigh), batch_size))
    return own


def _is_batched(source: Any) -> bool:
    """Whether the elements are batches.

    Raises:
        ValueError: nobody can tell.
    """
    shapes = [spec.shape for spec in tf.nest.flatten(source.element_spec)]
    first = {None if shape.rank is None else [*shape.as_list(), "scalar"][0] for shape in shapes}
    if len(first) > 1 or "scalar" in first:
        return False  # the parts of a batch have as many rows each
    found = _makes_batches(source)
    if found is None and None in first:
        raise ValueError(
            f"are the elements of the dataset, {source.element_spec}, batches or rows? If batches, "
            "write hvd.data.shard(dataset.unbatch(), batch_size=…). If rows, tell their shape: "
            "dataset.map(lambda x: tf.ensure_shape(x, […]))."
        )
    return bool(found)


def _makes_batches(node: Any) -> bool | None:
    """Whether a dataset gives batches, by how it was made; None if that does not tell."""
    kind, inputs = _kind(node), node._inputs()
    if kind in _BATCHING:
        return True
    if kind in ("Unbatch", "TensorSlice"):
        return False
    if kind in ("FlatMap", "Interleave", "ParallelInterleave", "GroupByWindow"):
        graphs = [function.function.graph for function in node._functions()]
        ops = {op.type for graph in graphs for op in graph.get_operations()}
        if any(op.startswith(kind) for op in ops for kind in _BATCHING):
            # window(n).flat_map(lambda part: part.batch(n)) makes rows that are sequences.
            return not any(_kind(node) == "Window" for node in _nodes(node))
        if kind != "GroupByWindow":
            return None
    found = [_makes_batches(node) for node in inputs]
    if True in found:
        return True
    # A function may make a batch of a row: of the name of a file, say.
    return None if None in found or not found or kind in ("Map", "ParallelMap") else False


def _seeds(source: Any, alone: bool) -> list[tuple[int, int]]:
    """Those that the dataset shuffles with.

    Raises:
        ValueError: its order would differ by rank.
    """
    nodes = list(_nodes(source))
    shuffles = [node for node in nodes if _kind(node) in ("Shuffle", "Random")]
    seeds = [(int(node._seed), int(node._seed2)) for node in shuffles]
    if not alone and (0, 0) in seeds:
        raise ValueError(
            "the dataset shuffles without a seed, so in another order on each rank. Give it a seed,"
            " dataset.shuffle(…, seed=1), Dataset.list_files(…, seed=1), or leave the shuffling to "
            "hvd.data.shard(…, shuffle=True)."
        )
    if not alone and any(getattr(node, "_deterministic", None) == "false" for node in nodes):
        raise ValueError(
            "the dataset has deterministic=False, so another order on each rank. Leave that out in "
            "map() and interleave()."
        )
    return seeds


def _measure(source: Any) -> tuple[int, int, list[int] | None]:
    """The numbers of rows of all batches and of the largest; of each, if any may be short."""
    node = _below(source, _ELEMENTWISE)
    if _kind(node) not in ("Batch", "ParallelBatch", "PaddedBatch"):
        counts = _read_counts(source, _rows)
        return sum(counts), max(counts, default=1), counts
    length, size = _length(node._inputs()[0]), int(node._batch_size)
    return length - (length % size if node._drop_remainder else 0), size, None


def _length(source: Any) -> int:
    """The number of elements, which are counted if it is unknown."""
    if source.cardinality() >= 0:
        return int(source.cardinality())
    source = _below(source, _ELEMENTWISE | {"Shuffle"})  # which need not run
    return sum(_read_counts(source, lambda element: tf.constant(1, tf.int64)))


def _read_counts(source: Any, count: Callable[[Any], Any]) -> list[int]:
    counts: list[int] = []
    asked = time.monotonic()
    for part in _map(source, count).batch(256):
        counts += part.numpy().tolist()
        if time.monotonic() - asked > _WARNING_SECONDS:
            log.logger.warning(
                "hvd.data.shard counts the elements of a dataset of unknown length: %s so far. To "
                "do without, or if it never ends, tell the number before batch(): dataset.take(n)"
                ".apply(tf.data.experimental.assert_cardinality(n)).",
                len(counts),
            )
            asked = time.monotonic()
    return counts


def _below(source: Any, kinds: set[str]) -> Any:
    """The dataset that one of ``kinds`` was made of."""
    while _kind(source) in kinds:
        (source,) = source._inputs()
    return source


def _rows(batch: Any) -> Any:
    """The number of rows of a batch, int64."""
    part = tf.nest.flatten(batch)[0]
    if isinstance(part, tf.RaggedTensor):
        return tf.cast(part.nrows(), tf.int64)
    if isinstance(part, tf.SparseTensor):
        return part.dense_shape[0]
    return tf.shape(part, tf.int64)[0]


def _batch(rows: Any, batch_size: Any) -> tf.data.Dataset:
    """Batches of rows that were batches before: padded anew, where those may have been padded."""
    shapes = [
        spec.shape if isinstance(spec, tf.TensorSpec) else tf.TensorShape([])
        for spec in tf.nest.flatten(rows.element_spec)
    ]
    dense = all(isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(rows.element_spec))
    known = all(shape.rank is not None for shape in shapes)
    if dense and known and not all(shape.is_fully_defined() for shape in shapes):
        return rows.padded_batch(batch_size)
    return rows.batch(batch_size)


def _with_rows(batch_size: int) -> Any:
    """A function that tells TensorFlow the number of a batch's rows."""

    def ensure(part: Any) -> Any:
        if not isinstance(part, tf.Tensor):
            return part  # ragged or sparse
        return tf.ensure_shape(part, [batch_size, *part.shape[1:]])

    return lambda batch: tf.nest.map_structure(ensure, batch)


def _map(dataset: Any, function: Callable[[Any], Any]) -> Any:
    """``dataset.map``, but a tuple is one argument."""
    return _apply(dataset.map, dataset, function)


def _apply(method: Any, dataset: Any, function: Callable[[Any], Any]) -> Any:
    is_tuple = isinstance(dataset.element_spec, tuple)
    return method(lambda *parts: function(parts if is_tuple else parts[0]))


def _nodes(source: Any) -> Iterator[Any]:
    """A dataset and all that it is made of."""
    yield source
    for node in source._inputs():
        yield from _nodes(node)


def _kind(node: Any) -> str:
    """``Batch`` for TensorFlow's ``_BatchDataset``."""
    return type(node).__name__.strip("_").removesuffix("Dataset")
