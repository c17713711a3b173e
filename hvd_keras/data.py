"""Each rank's share of the data: nothing lost, nothing twice, as many steps on every rank."""

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras import agree, rank_info
from hvd_keras._keras import keras


def shard(
    source: Any,
    *,
    batch_size: int | None = None,
    shuffle: bool | int = True,
    seed: int = 0,
    start_epoch: int = 0,
    uneven: str = "pad",
    evaluation: bool = False,
) -> tf.data.Dataset:
    """This rank's batches of a source that every rank has whole, for ``fit`` and ``evaluate``.

    Step s uses the rows [s * size * batch_size, (s + 1) * size * batch_size) of the epoch's order,
    each on one rank: N ranks train like one process with batches of N * batch_size rows. Every pass
    is an epoch, even a look (``next(iter(dataset))``): if shuffled, on all ranks or on none.

    Args:
        source: the same on every rank; one of

            - arrays ``x``, ``(x, y)`` or ``(x, y, sample_weight)``, nested as for ``fit``.
            - a ``tf.data.Dataset`` of single elements (not batched), its length known, its order
              the same on every rank. Each rank runs it for all elements, so put costly maps behind:
              ``shard(files, ...).map(decode)``.
            - a ``keras.utils.PyDataset``, of which the ranks get whole batches, all but the last of
              one length. Its ``workers`` are threads; its ``on_epoch_*`` are not called.
        batch_size: rows per rank and step; left out for a PyDataset.
        shuffle: whether each epoch has an order of its own, drawn from ``seed`` and its number, so
            that a rerun repeats it. A PyDataset's batches are shuffled; a shorter last one stays
            last. A tf.data.Dataset's elements are all held in memory; a number holds so many only.
        seed: 0 or more.
        start_epoch: number of the first pass; to resume, the ``initial_epoch`` of ``fit``.
        uneven: what becomes of an incomplete last step, if any. "pad" fills it with copies of
            sample weight 0, and scales the weights of its real rows, so that gradients and loss are
            those of one process with the short batch. "trim" leaves it out. "error" raises.
        evaluation: "pad" scales all rows alike, for the mean over the whole pass: the mean over
            the ranks of ``evaluate``'s loss is then that of one process.

    Returns:
        A ``tf.data.Dataset`` of batches; its ``len`` is the number of steps, equal on all ranks.
        Keras warns that ``fit`` does not shuffle it, unless given ``shuffle=False``.

    Raises:
        ValueError: on all ranks, with the same text: their sources or arguments differ or cannot be
            used; the rows do not divide ("error"), are too few ("trim") or have no y ("pad").

    Not covered by the weights of "pad": ``metrics`` (use ``weighted_metrics``), the statistics of
    batch normalisation, losses reduced otherwise than by Keras's default "sum_over_batch_size",
    and ``class_weight``, which Keras refuses beside sample weights.

    Example:
        train = hvd.data.shard((x, y), batch_size=32)
        test = hvd.data.shard((x_test, y_test), batch_size=32, shuffle=False, evaluation=True)
        model.fit(train, validation_data=test, epochs=10)
    """
    # Not a PyDataset: fit shuffles the batches of those once more, on each rank in another order.

    def look() -> tuple[_Source, str]:
        if min(seed, start_epoch) < 0:
            raise ValueError(f"{seed=}, {start_epoch=}, expected 0 or more.")
        if uneven not in ("pad", "trim", "error"):
            raise ValueError(f"{uneven=}, expected 'pad', 'trim' or 'error'.")
        rows = _open(source, batch_size, shuffle, seed)
        facts = f"{rows.length} rows of {rows.spec}, batch_size={rows.batch_size}, "
        return rows, facts + f"{shuffle=}, {seed=}, {start_epoch=}, {uneven=}, {evaluation=}"

    rows, views = _on_all_ranks("hvd.data.shard", look)
    if len(set(views)) > 1:
        raise ValueError(
            f"hvd.data.shard: the ranks have different sources or arguments: {_by_rank(views)}. "
            "Give every rank the same whole source; for files of its own, see agree_on_steps."
        )
    together = rank_info.size() * rows.batch_size
    steps, rest = divmod(rows.length, together)
    pad = rest > 0 and uneven == "pad"
    has_targets = keras.utils.unpack_x_y_sample_weight(rows.spec)[1] is not None
    if (steps == 0 and not pad) or (rest and uneven == "error") or (pad and not has_targets):
        raise ValueError(
            f"hvd.data.shard: {rows.length} rows do not make whole steps of {together} "
            f"({rank_info.size()} ranks with batch_size={rows.batch_size}), {uneven=}. Use another "
            f"batch_size, 'pad' (needs y, for weights) or 'trim' (needs {together} rows)."
        )
    steps += pad
    numbers, spec = itertools.count(start_epoch), tf.TensorSpec((), tf.int64)
    epoch = tf.data.Dataset.from_generator(lambda: iter([next(numbers)]), output_signature=spec)
    batches = epoch.flat_map(lambda epoch: rows.batches(epoch, steps))  # one epoch in each pass
    batches = batches.apply(tf.data.experimental.assert_cardinality(steps))
    if pad:
        # Keras divides the weighted sum by the rows of the batch, and each rank's loss by the
        # ranks: by `together`. One process would divide by `rest` in the last step.
        usual, last = 1.0, together / rest
        if evaluation:
            usual = last = steps * together / rows.length
        batches = batches.enumerate().map(
            lambda step, batch: _weigh(*batch, factor=tf.where(step < steps - 1, usual, last))
        )
    else:
        batches = batches.map(lambda batch, real: batch)
    options = tf.data.Options()
    options.deterministic = True
    return batches.prefetch(tf.data.AUTOTUNE).with_options(options)


def agree_on_steps(source: Any, *, uneven: str = "trim") -> int:
    """The number of steps that every rank can make, where each has data of its own.

    Args:
        source: this rank's number of steps, or its ``tf.data.Dataset`` of batches or
            ``keras.utils.PyDataset``. One of infinite or unknown length sets no limit.
        uneven: "trim" takes the least of the ranks' numbers; "error" raises if they differ.

    Returns:
        ``steps_per_epoch`` for ``fit``. Let the dataset repeat: Keras goes on where the last epoch
        ended, so a rank could run out of data.

    Raises:
        ValueError: on every rank, with the same text: a rank has no data, or something else than
            the above; no rank's length is known; or they differ ("error").

    Example:
        dataset = tf.data.TextLineDataset(files[hvd.rank() :: hvd.size()]).map(parse).batch(32)
        steps = hvd.data.agree_on_steps(dataset)
        model.fit(dataset.repeat(), steps_per_epoch=steps)
    """

    def look() -> tuple[None, int | None]:
        if uneven not in ("trim", "error"):
            raise ValueError(f"{uneven=}, expected 'trim' or 'error'.")
        steps = source
        if isinstance(source, tf.data.Dataset):
            steps = source.cardinality() if source.cardinality() >= 0 else None
        elif isinstance(source, keras.utils.PyDataset):
            steps = source.num_batches
        return None, None if steps is None else int(steps)

    _, everyone = _on_all_ranks("hvd.data.agree_on_steps", look)
    known = [steps for steps in everyone if steps is not None]
    if not known:
        problem = "no length is known. Give numbers of steps (count the batches once)."
    elif min(known) < 1:
        problem = "a rank has no data. Use fewer ranks, or smaller files or batches."
    elif uneven == "error" and len(set(known)) > 1:
        problem = "the ranks' numbers of steps differ. uneven='trim' takes the least."
    else:
        return int(min(known))
    raise ValueError(f"hvd.data.agree_on_steps: {problem} By rank: {_by_rank(everyone)}.")


@dataclass
class _Source:
    spec: Any  # a tf.TensorSpec for each part of a row; lists are tuples
    length: int  # rows, for all ranks
    batch_size: int  # rows per rank and step
    # From epoch and number of steps: this rank's (batch, which of its rows are not filled in).
    batches: Callable[[Any, int], tf.data.Dataset]


def _open(source: Any, batch_size: Any, shuffle: bool | int, seed: int) -> _Source:
    batched = isinstance(source, keras.utils.PyDataset)
    if batched != (batch_size is None) or (not batched and batch_size < 1):
        raise ValueError(f"{batch_size=}, expected rows per rank and step; none for a PyDataset.")
    if batched:
        return _of_batches(source, shuffle, seed)
    make = _of_elements if isinstance(source, tf.data.Dataset) else _of_arrays
    return make(source, batch_size, shuffle, seed)


def _of_elements(source: Any, batch_size: int, shuffle: bool | int, seed: int) -> _Source:
    rank, size, length = rank_info.rank(), rank_info.size(), int(source.cardinality())
    if length < 0:
        raise ValueError(
            "the dataset's length is infinite or unknown. Shard before repeat(), or tell a length: "
            "dataset.apply(tf.data.experimental.assert_cardinality(elements))."
        )

    def batches(epoch: Any, steps: int) -> tf.data.Dataset:
        rows = source
        if shuffle:
            # For the function being traced, lest the program's own seed, which may differ by rank,
            # be mixed in. With a tensor as the other seed it must not be 0.
            tf.random.set_seed(seed % (2**31 - 2) + 1)
            buffer = length if shuffle is True else shuffle
            rows = source.shuffle(buffer, epoch, reshuffle_each_iteration=False)
        rows = rows.shard(size, rank).concatenate(source.repeat())
        places = tf.data.Dataset.range(rank, steps * batch_size * size, size)
        rows = tf.data.Dataset.zip(places, rows).map(lambda place, row: (row, place < length))
        return rows.batch(batch_size, drop_remainder=True)

    return _Source(source.element_spec, length, batch_size, batches)


def _of_arrays(source: Any, batch_size: int, shuffle: bool | int, seed: int) -> _Source:
    parts, spec, length = _look_into(source)

    def read(epoch: int, step: int) -> list[Any]:
        places = (step * batch_size + np.arange(batch_size)) * rank_info.size() + rank_info.rank()
        rows = _order(length, shuffle, seed, epoch)[places % length]
        return [*(part[rows] for part in parts), places < length]

    return _read_by(read, spec, length, batch_size, workers=1)


def _of_batches(source: Any, shuffle: bool | int, seed: int) -> _Source:
    number = source.num_batches
    if not number:
        raise ValueError(f"the PyDataset has {number} batches, expected 1 or more.")
    _, spec, batch_size = _look_into(source[0])
    length = (number - 1) * batch_size + _look_into(source[number - 1])[2]
    whole = length // batch_size

    def read(epoch: int, step: int) -> list[Any]:
        place = step * rank_info.size() + rank_info.rank()
        index = place % number
        if index < whole:
            index = int(_order(whole, shuffle, seed, epoch)[index])
        parts, _, rows = _look_into(source[index])
        if rows != min(batch_size, length - index * batch_size):
            text = f"batch {index} of the PyDataset has {rows} rows, the first had {batch_size};"
            raise ValueError(f"{text} only the last may have fewer, equally many each time.")
        numbers = np.arange(batch_size)
        return [*(part[numbers % rows] for part in parts), (numbers < rows) & (place < number)]

    return _read_by(read, spec, length, batch_size, max(1, source.workers))


def _read_by(read: Any, spec: Any, length: int, batch_size: int, workers: int) -> _Source:
    """``read(epoch, step)`` gives the parts of this rank's batch, and which rows are real."""
    specs = [*keras.tree.flatten(spec), tf.TensorSpec((), tf.bool)]

    def batches(epoch: Any, steps: int) -> tf.data.Dataset:
        def batch(step: Any) -> tuple[Any, Any]:
            parts = tf.numpy_function(read, (epoch, step), [part.dtype for part in specs])
            for part, row in zip(parts, specs, strict=True):
                part.set_shape([batch_size, *row.shape])
            return keras.tree.pack_sequence_as(spec, parts[:-1]), parts[-1]

        return tf.data.Dataset.range(steps).map(batch, num_parallel_calls=workers)

    return _Source(spec, length, batch_size, batches)


@functools.lru_cache(4)  # wanted in every step
def _order(length: int, shuffle: bool | int, *seeds: int) -> Any:
    return np.random.default_rng(seeds).permutation(length) if shuffle else np.arange(length)


def _look_into(source: Any) -> tuple[list[Any], Any, int]:
    """Nested arrays as a flat list, the spec of a row, and the number of rows."""
    source = keras.tree.lists_to_tuples(source)
    parts = [np.asarray(part) for part in keras.tree.flatten(source)]
    if not parts or any(part.ndim == 0 for part in parts):
        raise ValueError(f"got {source!r:.99}, expected arrays, tf.data.Dataset or PyDataset.")
    if len({len(part) for part in parts}) > 1:
        raise ValueError(f"arrays of {[len(part) for part in parts]} rows, expected equally many.")
    specs = [tf.TensorSpec(part.shape[1:], part.dtype) for part in parts]
    return parts, keras.tree.pack_sequence_as(source, specs), len(parts[0])


def _weigh(data: Any, real: Any, *, factor: Any) -> Any:
    """With sample weights: ``factor`` times the data's own, and 0 for rows that are not real."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    factors = tf.cast(real, keras.config.floatx()) * tf.cast(factor, keras.config.floatx())

    def weigh(own: Any) -> Any:
        return tf.cast(own, factors.dtype) * tf.reshape(factors, [-1] + [1] * (own.ndim - 1))

    return x, y, factors if weights is None else keras.tree.map_structure(weigh, weights)


def _on_all_ranks(name: str, look: Callable[[], tuple[Any, Any]]) -> tuple[Any, list[Any]]:
    """What this rank sees, and what each rank tells of it. An error on one rank is one on all."""
    seen = mine = error = None
    try:
        seen, mine = look()
    except Exception as caught:
        error = caught
    everyone = agree.gather_json(name, [mine, error and f"{type(error).__name__}: {error}"])
    errors = [text for _, text in everyone]
    if any(errors):
        raise ValueError(f"{name}, errors by rank: {_by_rank(errors)}") from error
    return seen, [told for told, _ in everyone]


def _by_rank(values: Iterable[Any]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
