"""``hvd.data.shard`` on TensorFlow: each rank's part of each step, as a ``tf.data.Dataset``."""

import importlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras.data import reading, sources
from hvd_keras.data.reading import Source
from hvd_keras.data.row_files import Opened, Rows, is_row_source, opened
from hvd_keras.data.row_files import files as files
from hvd_keras.data.sources import Passes
from hvd_keras.data.split import Split
from hvd_keras.data.tensorflow import arrays, datasets
from hvd_keras.data.tensorflow.records import Records
from hvd_keras.runtime import agree, process_sets
from hvd_keras.runtime.keras import PyDataset, keras, require
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set


def shard(
    source: Any,
    *more: Any,
    batch_size: int | Sequence[int] | None = None,
    shuffle: bool | int | None = None,
    seed: int = 0,
    start_epoch: int = 0,
    uneven: str | None = None,
    evaluation: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.data.Dataset:
    """Return this rank's batches of a source that every rank has as a whole.

    Step s uses the rows [s * size * batch_size, (s + 1) * size * batch_size) of the epoch's order,
    each on one rank, so N ranks train like one process with batches of N * batch_size rows. Each
    iteration over the result is an epoch, even a single ``next(iter(dataset))``. So if the data is
    shuffled, iterate on all ranks or on none.

    Args:
        source: the same on every rank; one of

            - arrays ``x``, ``(x, y)`` or ``(x, y, sample_weight)``, nested as for ``fit``; also
              tensors, ragged and sparse ones, SciPy's sparse matrices, and DataFrames. As in
              ``fit(x, y)``, floating-point arrays become ``floatx()``, usually float32.
            - a ``tf.data.Dataset`` of rows or of batches, of known or unknown length, in the same
              order on every rank. Each rank runs it for all elements, so apply costly and random
              maps afterwards: ``shard(files, ...).map(decode)``. If its length is unknown, it is
              read once more to count the rows, skipping ``map`` and ``shuffle`` where possible.
            - a ``keras.utils.PyDataset`` whose batches have the same size, except the last. The
              ranks get whole batches. Its ``workers`` are run as threads; its ``on_epoch_*``
              methods are not called.
            - files, from ``hvd.data.files``.
            - a Hugging Face ``Dataset``, a source of ``grain``, or any object with a length and
              rows by number, such as ``row = source[7]``: a nest of numbers, strings and arrays of
              the same shapes in all rows. It is shuffled as files are.
        batch_size: rows per rank and step. Optional for a batched dataset: by default each of its
            batches is one rank's batch. Not allowed for a PyDataset. A list has one number for each
            rank, such as [64, 32] for a fast and a slow machine, for sources with rows by number
            (arrays, files, Hugging Face); ``fit`` counts each row alike.
        shuffle: whether to shuffle each epoch anew, by ``seed`` and the epoch's number, so that a
            rerun repeats the order. A PyDataset's batches are shuffled as wholes; a shorter last
            one stays last. For a tf.data.Dataset, True holds all rows in memory, and a number holds
            only that many. Default: True, except for a dataset that is batched, shuffles itself or
            has unknown length. One that shuffles itself begins with its second order: this function
            compares the first rows on all ranks.
        seed: a number, 0 or more.
        start_epoch: the number of the first epoch; to resume, the ``initial_epoch`` of ``fit``.
            ``hvd.callbacks.Checkpoint`` sets it by itself.
        uneven: what to do with an incomplete last step. "share" divides its rows equally among the
            ranks, like the short last batch of one process, and leaves out a remainder of fewer
            rows than ranks; with a list of batch sizes perhaps the step, with a warning. "pad"
            leaves nothing out: batches become ``(x, y, sample_weight)``, the last step is filled
            with copies of weight 0, and the weights of its real rows are scaled, so that gradients
            and loss are those of one process with the short batch. "trim" drops the step. "error"
            raises. Default: "share"; but "trim" for a dataset that was batched with
            ``drop_remainder=True``, so that all batches keep its static size.
        evaluation: "pad" scales all rows alike, for the mean over the whole pass: then the mean of
            the ranks' ``evaluate`` losses is that of one process.
        process_set: the ranks that train together.

    Returns:
        A ``tf.data.Dataset`` of batches whose ``len`` is the number of steps, equal on all ranks.
        For validation, split the source before: ``fit`` has no ``validation_split`` for it.

    Raises:
        ValueError: (on all ranks, with the same text) the ranks' sources or arguments differ or
            cannot be used: a dataset is infinite, shuffles without a seed, shuffles batches of
            which one is too small for a step, was padded unknown how, or may or may not be
            batched; the rows do not fill the steps ("error"), are too few, or have no y ("pad").
        tf.errors.FailedPreconditionError: (in ``fit``) a dataset has more or fewer elements than
            were counted or declared.

    The weights of "pad" do not affect ``metrics`` (use ``weighted_metrics``), the statistics of
    batch normalisation, activity regularizers, what a ``compute_loss`` of one's own adds, the
    numbers by which masked losses are divided, and losses whose reduction is not Keras's default
    "sum_over_batch_size". For sequences, Keras needs a dimension more:
    ``.map(lambda x, y, weight: (x, y, weight[:, tf.newaxis]))``.
    ``class_weight`` of ``fit`` multiplies them; with weights of your own, Keras refuses it.

    Example:
        train = hvd.data.shard((x, y), batch_size=32)
        test = hvd.data.shard((x_test, y_test), batch_size=32, shuffle=False)
        model.fit(train, validation_data=test, epochs=10)
    """
    if more:
        if isinstance(more[0], Integral):
            got = f"the second argument {more[0]}, expected it with its name, batch_size={more[0]}."
        else:
            got = "several sources, expected one: shard((x, y), …)."
        raise TypeError(f"hvd.data.shard: got {got}")
    # Returns no PyDataset, because fit would shuffle its batches again, differently on each rank.
    process_sets.check(process_set, "data.shard")
    keeps_size = uneven is None and datasets.has_static_batches(source)
    mode = ("trim" if keeps_size else "share") if uneven is None else uneven
    source = opened(source, Records, process_set)
    files = datasets.cache_files(source) if isinstance(source, tf.data.Dataset) else []
    # A file that has its index is complete, and only read.
    files = [(host, name) for host, name in files if not os.path.exists(f"{name}.index")]
    sources.check_caches(agree.gather_json("hvd.data.shard caches", files, process_set))

    def look() -> Source:
        rank, ranks = process_set.rank(), process_set.size()
        split = Split(rank, ranks, batch_size, shuffle, seed, mode, evaluation)
        if isinstance(batch_size, list | tuple):
            split = _of_unequal(split, batch_size)
        sources.check_arguments(split, start_epoch)
        return _open(source, split)

    rows = agree.on_all_ranks("hvd.data.shard", look, process_set)
    given = f"{batch_size=}, {shuffle=}, {seed=}, {start_epoch=}, {uneven=}, {evaluation=}"
    sources.check_source(rows, given, process_set)
    shuffling = source if datasets.seeds_of(source, alone=True) else None
    # A dataset of one element, the pass and its first row: made anew each time one begins.
    passes = Passes(start_epoch, shuffling, rows)
    epoch = tf.data.Dataset.range(1).map(
        lambda _: tf.ensure_shape(tf.numpy_function(passes.begin, [], tf.int64), [2])
    )
    epoch._hvd_passes = passes
    batches = epoch.flat_map(lambda begin: rows.batches(begin[0], begin[1]))
    batches._hvd_pass = passes  # one epoch in each
    if mode == "pad":
        batches = batches.map(_weigh)
    batches = batches.apply(tf.data.experimental.assert_cardinality(rows.steps))
    # Parallel maps, here and behind, must keep the order.
    options = tf.data.Options()
    options.deterministic = True
    return batches.prefetch(tf.data.AUTOTUNE).with_options(options)


def agree_on_steps(
    source: Any, *, uneven: str = "trim", process_set: ProcessSet = global_process_set
) -> int:
    """Return the number of steps that every rank can make, if each rank has its own data.

    Args:
        source: this rank's number of steps, or its ``tf.data.Dataset`` of batches or
            ``keras.utils.PyDataset``. Data of infinite or unknown length sets no limit.
        uneven: "trim" takes the smallest of the ranks' numbers; "error" raises if they differ.
        process_set: the ranks that train together.

    Returns:
        An int, the ``steps_per_epoch`` for ``fit``. Let the dataset repeat: Keras continues where
        the last epoch ended, so otherwise a rank could run out of data.

    Raises:
        ValueError: (on every rank, with the same text) a rank has no data, or a ``source`` of
            another type; no rank's length is known; or the numbers differ ("error").

    Example:
        dataset = tf.data.TextLineDataset(files[hvd.rank() :: hvd.size()]).map(parse).batch(32)
        steps = hvd.data.agree_on_steps(sum(1 for _ in dataset))
        model.fit(dataset.repeat(), steps_per_epoch=steps)
    """

    def length(source: Any) -> Any:
        if isinstance(source, tf.data.Dataset):
            return source.cardinality() if source.cardinality() >= 0 else None
        return source

    return sources.steps(source, length, "a tf.data.Dataset", uneven, process_set)


def passes_of(dataset: Any) -> list[Passes]:
    """Return the numbers of the passes of all sharded sources that a dataset is made of."""
    nodes = datasets.nodes(dataset)
    found = [node._hvd_passes for node in nodes if hasattr(node, "_hvd_passes")]
    for one in found if repeats(dataset) else ():
        one.repeats = True  # for good: a prefetch may have begun some
    return found


def repeats(dataset: Any) -> bool:
    """Whether a pass over a dataset may have several over a sharded source."""
    return any(datasets.kind_of(node) == "Repeat" for node in datasets.nodes(dataset))


def repeated(dataset: Any) -> Passes | None:
    """Return the passes over a sharded source that is repeated; None if there is none.

    Each element of the dataset must be made of one batch of the source.
    """
    return _pass_below(dataset) if repeats(dataset) else None


def batch_of(dataset: Any) -> int | None:
    """Return how many rows a batch of this rank has, if a sharded source tells; else None."""
    passes = _pass_below(dataset)
    if passes is None or datasets.changes_rows(dataset, _AROUND):
        return None
    return int(passes.source.batch_size * passes.source.split.parts)


_AROUND = datasets.PASSING_ON | {"Repeat"}


def _pass_below(dataset: Any) -> Passes | None:
    if not isinstance(dataset, tf.data.Dataset):
        return None
    return getattr(datasets.below(dataset, _AROUND), "_hvd_pass", None)


def seekable(dataset: Any) -> Passes | None:
    """Return the passes of a sharded source that can begin at any row; None if there is none.

    Each element of the dataset must be made of one batch of the source.
    """
    passes = None if repeats(dataset) else _pass_below(dataset)
    return passes if passes is not None and passes.source.unit else None


def _of_unequal(split: Split, batch_size: Sequence[int]) -> Split:
    """Return the same with a batch size for each rank."""
    if len(batch_size) != split.size or not all(
        isinstance(n, Integral) and int(n) > 0 for n in batch_size
    ):
        raise ValueError(
            f"{batch_size=}, expected {split.size} numbers of 1 or more, one for each rank."
        )
    # As if more ranks had equal batches, of which this one has several.
    size = math.gcd(*map(int, batch_size))
    first, last, end = (
        sum(map(int, batch_size[:rank])) // size
        for rank in (split.rank, split.rank + 1, split.size)
    )
    return replace(split, rank=first, size=end, batch_size=size, parts=last - first)


def weigh_classes(dataset: Any, class_weight: Any) -> Any:
    """Multiply the weights of ``uneven="pad"`` by those that Keras gives to classes."""
    home = importlib.import_module("keras.src.trainers.data_adapters.tf_dataset_adapter")
    require(home, "make_class_weight_map_fn", "for class_weight with uneven='pad'")
    of_keras = home.make_class_weight_map_fn(class_weight)

    def weigh(x: Any, y: Any, weights: Any) -> Any:
        *_, factors = of_keras(x, y)  # [batch], or for sequences [batch, steps]
        rank = tf.maximum(tf.rank(weights), tf.rank(factors))
        factors, weights = (
            tf.reshape(
                part, tf.concat([tf.shape(part), tf.ones(rank - tf.rank(part), tf.int32)], 0)
            )
            for part in (tf.cast(factors, weights.dtype), weights)
        )
        return x, y, factors * weights

    return dataset.map(weigh).prefetch(tf.data.AUTOTUNE)


def _open(source: Any, split: Split) -> Source:
    given = type(source).__name__
    parts = tf.nest.flatten(source) if isinstance(source, tuple | list | dict) else [source]
    if any(map(_is_sparse, parts)):
        source = tf.data.Dataset.from_tensor_slices(tf.nest.map_structure(_as_in_fit, source))
    if split.parts != 1 and isinstance(source, tf.data.Dataset | PyDataset):
        raise ValueError(
            f"batch_size is a list, and the source is a {given}; expected arrays, "
            "files or rows by number. Or give each rank its own data, of any batch size."
        )
    if isinstance(source, tf.data.Dataset):
        return datasets.dataset_source(source, split)
    if isinstance(source, PyDataset):
        if (batch_size := split.batch_size) is not None:
            raise ValueError(f"{batch_size=}, expected none for a PyDataset, which has batches.")
        return arrays.pydataset_source(source, split)
    if isinstance(source, (Iterator, tf.distribute.DistributedDataset)):
        raise ValueError(
            f"got a {type(source).__name__}, expected arrays, tf.data.Dataset or PyDataset. Make a "
            "dataset of a generator, tf.data.Dataset.from_generator(function, output_signature=…), "
            "the same on every rank. Or let each rank generate its own rows: give fit the "
            "generator itself, with steps_per_epoch=hvd.data.agree_on_steps(steps)."
        )
    if split.batch_size is None:
        raise ValueError("batch_size=None, expected rows per rank and step, as in batch_size=32.")
    if is_row_source(source):
        source = Opened(Rows(source))
    is_numbered = isinstance(source, Opened)
    return (arrays.numbered_rows_source if is_numbered else arrays.arrays_source)(source, split)


def _is_sparse(part: Any) -> bool:
    """Whether rows are of different lengths, or a sparse matrix, also of SciPy."""
    is_of_scipy = hasattr(part, "tocoo") and part.ndim == 2
    return is_of_scipy or isinstance(part, tf.RaggedTensor | tf.SparseTensor)


def _as_in_fit(part: Any) -> Any:
    """Return a part of rows, perhaps ragged or sparse, as ``fit`` casts and shapes it."""
    if not getattr(part, "shape", ()):  # a number of a list
        return part
    if not _is_sparse(part):
        return reading.as_fit_casts(*reading.parts_of([part], tf.nest.flatten))
    if hasattr(part, "tocoo"):
        matrix = part.tocoo(copy=True)
        matrix.sum_duplicates()  # which also orders them
        places = np.stack([matrix.row, matrix.col], 1)
        part = tf.SparseTensor(places, matrix.data, matrix.shape)
    return tf.cast(part, keras.backend.floatx()) if part.dtype.is_floating else part


def _weigh(data: Any, factors: Any) -> Any:
    """Add sample weights: ``factors``, times the data's own weights."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    factors = tf.cast(factors, keras.backend.floatx())

    def weigh(own: Any) -> Any:
        return tf.cast(own, factors.dtype) * tf.reshape(factors, [-1] + [1] * (own.ndim - 1))

    return x, y, factors if weights is None else tf.nest.map_structure(weigh, weights)
