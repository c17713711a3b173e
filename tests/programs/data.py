"""The rows of a program, and the forms in which fit and evaluate get them."""

import functools
import importlib
import tempfile
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tests.programs.draw import View

SHAPES = {"conv1d": (6, 3), "conv2d": (5, 5, 2), "lstm": (4, 3), "gru": (4, 3)}
WORDS, LENGTH, CLASSES, SIDE = 9, 4, 3, 3
VALIDATION = 18  # rows, which 2 and 3 ranks can share


class Side(NamedTuple):
    """Who runs a program: a rank of a process set, or one process without hvd_keras.

    Attributes:
        rank: within the set; None without hvd_keras.
        size: the number of ranks of the set.
        process_set: None without hvd_keras.
    """

    rank: int | None = None
    size: int = 1
    process_set: Any = None

    @property
    def hvd(self) -> Any:
        """hvd_keras, or None."""
        return None if self.rank is None else importlib.import_module("hvd_keras")

    @property
    def options(self) -> dict[str, Any]:
        """Arguments for what works in a process set."""
        return {"process_set": self.process_set} if self.process_set else {}


def _target(spec: View, kind: str, random: Any, shape: tuple[int, ...], at: Any) -> Any:
    """Targets of a shape; those of validation contradict those of training."""
    is_validation = kind == "validation"
    if spec.has_classes or spec.loss == "categorical":
        classes = random.choice([0, 0, 0, 1], shape) + is_validation
        return np.eye(CLASSES, dtype="float32")[classes] if spec.loss == "categorical" else classes
    if spec.loss in ("binary", "focal", "dice"):
        drawn = random.random(shape) < 0.2
        return (~drawn if is_validation else drawn).astype("float32")[..., None]
    y = 0.3 * random.normal(size=shape) + 0.05 * at.reshape(-1, *[1] * (len(shape) - 1))
    return (y + 3 * is_validation).astype("float32")[..., None]


def rows(spec: View, kind: str) -> tuple[Any, ...]:
    """(x, y) or (x, y, weights), nested as fit takes them; ``kind``: train, other, validation."""
    random = np.random.default_rng(["train", "other", "validation"].index(kind))
    number = VALIDATION - (spec.validation in ("arrays", "dataset", "padded"))
    if kind != "validation":
        number = spec.steps * spec.batch + spec.rest
    at = np.arange(number) % spec.batch  # the ranks' rows differ
    if spec.has_table:
        x = random.integers(1, WORDS, (number, LENGTH)).astype("int32")
        if spec.is_sequence:
            x[np.arange(LENGTH) >= 1 + (at * 5 % LENGTH)[:, None]] = 0
    else:
        x = random.normal(size=(number, *SHAPES.get(spec.body, (5,)))).astype("float32")
        x += 0.05 * at.reshape(-1, *[1] * (x.ndim - 1)).astype("float32")
    if spec.inputs != "one":
        side = random.normal(size=(number, SIDE)).astype("float32")
        x = (x, side) if spec.inputs == "tuple" else {"main": x, "side": side}
    shape = (number, LENGTH) if spec.is_sequence else (number,)
    target = functools.partial(_target, spec, kind, random, shape, at)
    y: Any = target()
    if spec.has_classes and not spec.is_sequence:
        y = y if spec.flat else y[:, None]
    elif spec.flat:
        y = y[:, 0]
    if spec.outputs != "one":
        first, second = y, target().reshape(y.shape)
        y = (first, second) if spec.outputs == "list" else {"a": first, "b": second}
    if spec.weights != "sample":
        return x, y
    weights = random.uniform(0.5, 2, (number, 1) if spec.is_sequence else number)
    return x, y, weights.astype("float32")


def _hvd() -> Any:
    """hvd_keras, which one process has only if a program needs its order of rows."""
    import hvd_keras

    hvd_keras.init()
    return hvd_keras


def _part(nest: Any, which: Any) -> Any:
    return tf.nest.map_structure(lambda array: array[which], nest)


def frames(spec: View, data: Any) -> Any:
    """The same rows as pandas has them."""
    import pandas

    x, y, *_ = data
    x = pandas.DataFrame(x, columns=[f"x{number}" for number in range(x.shape[1])])
    return x, pandas.Series(y) if spec.flat else pandas.DataFrame(y)


class Batches(keras.utils.PyDataset):
    """Batches of arrays."""

    def __init__(self, data: Any, size: int) -> None:
        super().__init__()
        self.data, self.size = data, size

    def __len__(self) -> int:
        return -(-len(tf.nest.flatten(self.data)[0]) // self.size)

    def __getitem__(self, number: int) -> Any:
        return _part(self.data, slice(number * self.size, (number + 1) * self.size))


def _generated(data: Any) -> Any:
    """A dataset of rows whose length is unknown."""
    made = tf.data.Dataset.from_tensor_slices(data)
    spec = made.element_spec
    return tf.data.Dataset.from_generator(made.as_numpy_iterator, output_signature=spec)


def _records(data: Any, folder: str) -> Any:
    """TFRecord files of unequal length, of the rows' numbers; each rank writes its own copies."""
    number = len(tf.nest.flatten(data)[0])
    for name, some in enumerate(np.split(np.arange(number), [5, 7])):
        with tf.io.TFRecordWriter(f"{folder}/{name}.tfrecord") as file:
            for row in some:
                file.write(row.tobytes())

    def parse(records: Any) -> Any:
        at = tf.io.decode_raw(records, tf.int64)[:, 0]
        return tf.nest.map_structure(lambda part: tf.gather(part, at), data)

    return _hvd().data.files(f"{folder}/*.tfrecord", map=parse)


def _halved(*batch: Any) -> Any:
    """What a map does: halves x, which is the first part."""
    half = lambda part: part / 2 if part.dtype.is_floating else part  # noqa: E731
    return tf.nest.map_structure(half, batch[0]), *batch[1:]


def left(spec: View) -> int:
    """How many rows of training all ranks use together."""
    rest = spec.rest % spec.batch
    if spec.uneven == "trim":
        rest = 0
    elif spec.uneven == "share" and spec.order == "kept":
        rest -= rest % 2  # of 1 and 7 rows, 2 and 3 ranks leave out one
    return spec.steps * spec.batch + spec.rest // spec.batch * spec.batch + rest


class Feed:
    """What a program gives to fit."""

    def __init__(self, kind: str, spec: View, side: Side) -> None:
        self.spec, self.kind, self.side = spec, kind, side
        self.data = rows(spec, kind)
        self.folder = tempfile.TemporaryDirectory()  # of files, as long as this exists
        size = spec.local or side.size
        sizes = [spec.batch // size] * size  # of each rank's batch
        if spec.unequal and kind != "validation":
            sizes = [n * spec.batch // 12 for n in {1: [12], 2: [8, 4], 3: [6, 2, 4]}[size]]
        self.sizes = [spec.batch] if side.rank is None else sizes
        self.batch = self.sizes[side.rank or 0]
        number = len(tf.nest.flatten(self.data)[0])
        step = np.arange(number) // spec.batch * spec.batch
        place = (np.arange(number) - step) / np.minimum(spec.batch, number - step)
        owner = np.searchsorted(np.cumsum(sizes) / spec.batch, place, "right")
        self.is_mine = (owner == side.rank) | (side.rank is None)
        if spec.local:  # whose layer a row has
            (x, beside), *more = self.data
            beside = np.concatenate([beside, np.eye(size, dtype="float32")[owner]], axis=1)
            self.data = ((x, beside), *more)

    def mine(self) -> Any:
        """This rank's rows as arrays, step by step."""
        return _part(self.data, self.is_mine)

    def fit(self) -> dict[str, Any]:
        """Arguments of ``fit``."""
        spec = self.spec
        more = {"steps_per_epoch": spec.repeat} if spec.repeat else {}
        if spec.data == "agree":
            made = tf.data.Dataset.from_tensor_slices(self.mine()).batch(self.batch)
            own = (
                len(made)
                if self.side.rank is None
                else _hvd().data.agree_on_steps(made, **self.side.options)
            )
            return {"x": made.repeat(), "steps_per_epoch": own}
        if self.side.rank is None and spec.order == "kept":
            data = _part(self.data, slice(left(spec)))
            if spec.data in ("arrays", "local") and not spec.repeat:
                return self._arrays(data)
            if spec.data == "frame":
                return self._arrays(frames(spec, data))
            if spec.data == "pydataset" and not spec.repeat:
                return {"x": Batches(data, spec.batch), "shuffle": False}
            # Not _generated: docs/using/sharp-bits.md, "Data of unknown length".
            made = tf.data.Dataset.from_tensor_slices(data).batch(spec.batch)
            return {"x": self._changed(made), **more}
        if spec.data == "local":
            return self._arrays(self.mine())
        return {"x": self._changed(self.sharded(spec.data)), "shuffle": False, **more}

    def _arrays(self, data: Any) -> dict[str, Any]:
        names = ("x", "y", "sample_weight")
        return dict(zip(names, data, strict=False)) | {"batch_size": self.batch, "shuffle": False}

    def _changed(self, made: Any) -> Any:
        made = made.map(_halved) if self.spec.change == "map" else made
        made = made.repeat() if self.spec.repeat else made
        return made.prefetch(2) if self.spec.change == "prefetch" else made

    def sharded(self, form: str, **options: Any) -> Any:
        """This rank's dataset of ``hvd.data.shard``."""
        spec, data, source = self.spec, self.data, self.data
        own = self.sizes if len(set(self.sizes)) > 1 else self.batch
        options = {"batch_size": own, "uneven": spec.uneven, **options}
        options |= self.side.options
        options.setdefault("shuffle", spec.order == "hvd")
        if form == "frame":
            source = frames(spec, data)
        elif form == "pydataset":
            source = Batches(data, options.pop("batch_size"))
        elif form == "tfrecord":
            source = _records(data, self.folder.name)
        elif form == "generator":
            source = _generated(data)
        elif form in ("rows", "batches", "regrouped"):
            source = tf.data.Dataset.from_tensor_slices(data)
            source = source.shuffle(100, seed=5) if spec.order == "own" else source
            size = {"batches": self.batch, "regrouped": 5}.get(form)
            source = source.batch(size) if size else source
            if form == "batches":
                del options["batch_size"]
        if spec.change == "cache" and isinstance(source, tf.data.Dataset):  # not of arrays
            source = source.cache()
        return _hvd().data.shard(source, **options)

    def validation(self) -> dict[str, Any]:
        """Arguments of ``fit`` that validate on this feed."""
        spec = self.spec
        form = spec.validation
        given: dict[str, Any] = {"validation_freq": spec.validation_freq}
        if form == "none":
            return {}
        if spec.validation_steps:
            given["validation_steps"] = spec.validation_steps
        if form in ("arrays", "local"):
            data = self.data if form == "arrays" or self.side.rank is None else self.mine()
            size = spec.batch if form == "arrays" else self.batch
            return {"validation_data": data, "validation_batch_size": size, **given}
        return {"validation_data": self.evaluation(form), **given}

    def evaluation(self, form: str) -> Any:
        """A dataset for ``evaluate``."""
        if self.side.rank is None or form == "dataset":
            return tf.data.Dataset.from_tensor_slices(self.data).batch(self.spec.batch)
        if form == "padded":
            kinds = ("rows", "regrouped", "pydataset")
            source = self.spec.data if self.spec.data in kinds else "arrays"
            return self.sharded(source, shuffle=False, uneven="pad", evaluation=True)
        form = "arrays" if form == "sharded" else form
        kept = View({**self.spec.spec, "order": "kept", "change": "none"})
        return Feed(self.kind, kept, self.side).sharded(form, uneven="share")
