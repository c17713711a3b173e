"""Trains with the features of a case (see table.py), in its situation.

Each rank trains with its part of every batch, and one process with the whole batch. Both run the
same code here, for different sides.
"""

import dataclasses
import functools
import tempfile
import zlib
from typing import Any

import numpy as np
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.gradients import shards
from hvd_keras.runtime import process_sets
from hvd_keras.runtime.keras import keras
from tests.parallel.features import table

BATCH, STEPS, LENGTH, WORDS = 4, 4, 3, 12


@dataclasses.dataclass(frozen=True)
class Side:
    """The ranks of a process set, or one process that has all rows.

    Attributes:
        names: the features that this side has, and the situation.
        of: the ranks that train.
        parts: how many ranks' rows a batch has.
        mine: which of these this side has.
        alone: one process trains instead of ranks.
    """

    names: frozenset[str]
    of: Any
    parts: int
    mine: tuple[int, ...]
    alone: bool = False

    def has(self, *names: str) -> bool:
        """Whether the case has one of these features."""
        return not self.names.isdisjoint(names)

    @property
    def features(self) -> list[table.Feature]:
        """The entries of the table."""
        return [f for name, f in table.FEATURES.items() if name in self.names]

    def options(self, kind: str) -> dict[str, Any]:
        """All features' arguments of one kind."""
        found = {k: v for feature in self.features for k, v in getattr(feature, kind).items()}
        if kind == "distributed" and self.has("compression"):
            found["compression"] = hvd.Compression.fp16
        return found

    @property
    def batch(self) -> int:
        """The rows of a batch on this side."""
        return BATCH * len(self.mine)


def with_all_rows(side: Side, of: Any, names: frozenset[str], *, alone: bool) -> Side:
    """One process for the ranks of another side."""
    return Side(names, of, side.parts, tuple(range(side.parts)), alone)


def _initializer(name: str, seed: int = 0) -> Any:
    seed += zlib.crc32(name.encode()) % 2**30
    return keras.initializers.RandomUniform(-0.5, 0.5, seed=seed)


def dense(units: int, name: str, init: Any, **arguments: Any) -> Any:
    """A layer with an initializer."""
    return keras.layers.Dense(units, name=name, kernel_initializer=init, **arguments)


@keras.saving.register_keras_serializable("tests")
class Net(keras.Model):
    """A network of the layers that the features ask for; ``who`` says whose a row is.

    Args:
        names: of features.
        local: the ranks whose local layers it has.
        divided: the process set that has a table in parts, if any has.
        seed: of the weights that are broadcast.
    """

    def __init__(
        self, names: list[str], local: list[int], divided: int | None, seed: int = 0
    ) -> None:
        super().__init__()
        self.names, self.divided = list(names), divided
        self.first = dense(6, "first", _initializer("first", seed), activation="tanh")
        self.second = dense(1, "second", _initializer("second", seed))
        self.masking = keras.layers.Masking() if "masked loss" in names else None
        self.normalization = None
        if "Normalization" in names:
            self.normalization = keras.layers.Normalization()
        self.table = None
        if divided is not None:
            init = _initializer("table")
            process_set = process_sets.of_id(divided)
            self.table = hvd.layers.Embedding(
                WORDS, 6, shard="rows", embeddings_initializer=init, process_set=process_set
            )
        elif {"divided table", "sparse"} & set(names):
            self.table = keras.layers.Embedding(
                WORDS, 6, name="table", embeddings_initializer=_initializer("table", seed)
            )
        self.numbers = local
        names = ["local"] if len(local) == 1 else [f"local{i}" for i in local]
        self.local = [
            dense(1, name, _initializer("local", i)) for i, name in zip(local, names, strict=True)
        ]
        self.add = keras.layers.Add()

    def call(self, inputs):
        x, ids, who = inputs["x"], inputs["ids"], inputs["who"]
        if self.masking is not None:
            x = self.masking(x)
        if self.normalization is not None:
            x = self.normalization(x)
        hidden = self.first(x)
        if self.table is not None:
            hidden = self.add([hidden, self.table(ids)])
        parts = [self.second(hidden)]
        for i, layer in zip(self.numbers, self.local, strict=True):
            parts.append(layer(x) * tf.cast(who[..., i : i + 1], parts[0].dtype))
        return self.add(parts) if len(parts) > 1 else parts[0]

    def get_config(self):
        return {"names": self.names, "local": self.numbers, "divided": self.divided}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


@keras.saving.register_keras_serializable("tests")
class StepNet(Net):
    """With a training step of its own."""

    side: Side
    second_optimizer: Any = None

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape(persistent=True) as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x, y, predicted, weight, training=True)
            scaled = self.optimizer.scale_loss(loss)
        if self.side.has("tape") and not self.side.alone:
            tape = hvd.PartialDistributedGradientTape(
                tape,
                local_layers=self.local,
                process_set=self.side.of,
                **self.side.options("distributed"),
            )
        head = self.second.trainable_variables
        own = head if self.side.has("second optimizer") else []
        rest = [v for v in self.trainable_variables if not any(v is other for other in own)]
        self.optimizer.apply(tape.gradient(scaled, rest), rest)
        if own:
            self.second_optimizer.apply(tape.gradient(loss, own), own)
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(y)[0])
        return self.get_metrics_result()


def _plain_optimizer(side: Side) -> Any:
    options = side.options("optimizer")
    for option, limit in {"clipnorm": 0.2, "global_clipnorm": 0.3, "clipvalue": 0.05}.items():
        if side.has(option):
            options[option] = limit
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


def _distributed(optimizer: Any, model: Net, side: Side) -> Any:
    if side.alone or side.has("tape"):
        return optimizer
    return hvd.PartialDistributedOptimizer(
        optimizer,
        local_layers=model.local,
        process_set=side.of,
        **side.options("distributed"),
    )


def compiled(model: Net, side: Side) -> Net:
    """Compiles a model as the features ask."""
    optimizer = _plain_optimizer(side)
    if side.has("MultiOptimizer"):
        parts = optimizer, _plain_optimizer(side)
        optimizer = keras.optimizers.MultiOptimizer(lambda v: parts["second" in v.path])
    optimizer = _distributed(optimizer, model, side)
    if side.has("loss scaling"):
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
    if isinstance(model, StepNet):
        model.side = side
        if side.has("second optimizer"):
            second = keras.optimizers.SGD(0.1, momentum=0.5)
            model.second_optimizer = _distributed(second, model, side)
    model.compile(
        optimizer=optimizer, loss="mse", **{"jit_compile": False, **side.options("compile")}
    )
    return model


def build(side: Side) -> Net:
    """Makes and compiles a model. Local layers are built, because the optimizer must know them."""
    has_step = any(feature.own_step for feature in side.features)
    local: list[int] = []
    if side.has("local layers"):
        local = list(side.mine) if side.alone else [side.of.rank()]
    divided = side.of.id() if side.has("divided table") and not side.alone else None
    seed = 0 if side.alone else side.of.size() - 1 - side.of.rank()  # the last rank broadcasts
    model = (StepNet if has_step else Net)(sorted(side.names), local, divided, seed)
    for layer in model.local:
        layer.build((None, LENGTH, 3))
    if model.normalization is not None:
        model.normalization.adapt(every_row(side)[0]["x"])
    if not side.has("unbuilt"):
        x, _ = rows(side)
        model({name: values[:1] for name, values in x.items()})
    return compiled(model, side)


@functools.cache
def all_rows(
    size: int, left_out: int, in_files: bool
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """All rows, and whose each is, step by step; the last step has fewer.

    A rank has rows that follow each other; but where hvd.data.shard divides them, every size-th,
    and of files only of a last step that is not whole.
    """
    owner = np.tile(np.repeat(np.arange(size), BATCH), STEPS)
    if left_out:
        owner = owner[:-left_out]
        begin = len(owner) // (size * BATCH) * size * BATCH if in_files else 0
        owner[begin:] = np.arange(len(owner) - begin) % size
    random = np.random.default_rng(1)
    x = random.normal(size=(len(owner), LENGTH, 3)).astype("float32")
    x[owner == size - 1, 1:] *= random.integers(0, 2, (int(sum(owner == size - 1)), 2, 1))
    ids = random.integers(0, WORDS, (len(owner), LENGTH)).astype("int32")
    who = np.repeat(np.eye(size, dtype="float32")[owner][:, np.newaxis], LENGTH, 1)
    y = random.normal(size=(len(owner), LENGTH, 1)).astype("float32")
    y += owner[:, np.newaxis, np.newaxis]  # ranks have different gradients
    return {"x": x, "ids": ids, "who": who}, y, owner


def _left_out(side: Side) -> int:
    if side.has("short last batch"):
        return side.parts
    return int(side.has("padded last batch"))


def every_row(side: Side) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """The rows of all ranks, and whose each is."""
    return all_rows(side.parts, _left_out(side), side.has("files"))


@functools.cache
def _files(side: Side) -> Any:
    """A source of all rows, in TFRecord files of unequal length."""
    x, y, _ = every_row(side)
    parts = {**x, "y": y}
    folder = tempfile.TemporaryDirectory()
    for number, rows in enumerate(np.split(np.arange(len(y)), [3, 4])):
        with tf.io.TFRecordWriter(f"{folder.name}/{number}.tfrecord") as file:
            for row in rows:
                of = {k: tf.io.serialize_tensor(v[row]).numpy() for k, v in parts.items()}
                lists = {k: tf.train.BytesList(value=[v]) for k, v in of.items()}
                features = {k: tf.train.Feature(bytes_list=v) for k, v in lists.items()}
                example = tf.train.Example(features=tf.train.Features(feature=features))
                file.write(example.SerializeToString())

    def parse(records):
        wanted = dict.fromkeys(parts, tf.io.FixedLenFeature([], tf.string))
        texts = tf.io.parse_example(records, wanted)
        tensors = {}
        for name, like in parts.items():
            one = functools.partial(tf.io.parse_tensor, out_type=like.dtype)
            found = tf.map_fn(one, texts[name], fn_output_signature=like.dtype)
            tensors[name] = tf.ensure_shape(found, [None, *like.shape[1:]])
        label = tensors.pop("y")
        return tensors, label

    source = hvd.data.files(f"{folder.name}/*.tfrecord", map=parse)
    return source, folder  # whose files are removed when it is no longer referred to


def rows(side: Side) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The rows of this side, step by step."""
    x, y, owner = every_row(side)
    mine = np.isin(owner, side.mine)
    return {name: values[mine] for name, values in x.items()}, y[mine]


def data(side: Side) -> dict[str, Any]:
    """The arguments of ``fit`` that give its data."""
    x, y = rows(side)
    batch = side.batch
    if (_left_out(side) or side.has("files")) and not side.alone:
        source = _files(side)[0] if side.has("files") else every_row(side)[:2]
        arguments = {"batch_size": batch, "shuffle": False, "process_set": side.of}
        if not side.has("padded last batch"):
            mine = hvd.data.shard(source, **arguments)
            return {"x": mine.filter(lambda *_: True) if side.has("unknown length") else mine}
        mine = hvd.data.shard(source, uneven="pad", **arguments)
        # Keras wants a dimension more for sequences.
        return {"x": mine.map(lambda x, y, weight: (x, y, weight[:, tf.newaxis]))}
    if not side.has("unknown length"):
        return {"x": x, "y": y, "batch_size": batch}

    def batches():
        for begin in range(0, len(y), batch):
            yield {n: v[begin : begin + batch] for n, v in x.items()}, y[begin : begin + batch]

    signature = tf.nest.map_structure(
        lambda v: tf.TensorSpec([None, *v.shape[1:]], v.dtype), (x, y)
    )
    return {"x": tf.data.Dataset.from_generator(batches, output_signature=signature)}


def callbacks(side: Side, model: Net) -> list[Any]:
    """Those that every training on several ranks has."""
    own = [v for layer in model.local for v in layer.variables] if side.has("tape") else None
    first = [hvd.callbacks.BroadcastGlobalVariablesCallback(side.of.ranks[-1], own)]
    first.append(hvd.callbacks.MetricAverageCallback())
    if side.has("VerifyWeights"):
        first.append(hvd.callbacks.VerifyWeights(1))
    if side.has("tape"):
        for callback in first:
            callback._hvd_process_set = side.of
    return first


def fit(model: Net, side: Side, *more: Any, epochs: int = 2) -> Any:
    """Trains; returns the logs of each epoch."""
    chosen = [*([] if side.alone else callbacks(side, model)), *more]
    arguments = {"epochs": epochs, "shuffle": False, "verbose": 0, "callbacks": chosen}
    return model.fit(**data(side), **arguments).history


def result(model: Net, side: Side, logs: Any = None) -> dict[str, np.ndarray]:
    """What both sides must have in common, by name; the same on all ranks that train."""
    found = {}
    for layer in (model.first, model.second, model.table):
        for weight in [] if layer is None else layer.weights:
            kind = weight.name.rpartition("/")[2].removesuffix(":0")
            name = f"{layer.name.rstrip('_0123456789')}/{kind}"
            name = "table" if layer is model.table else name
            is_part = shards.of(weight) is not None
            found[name] = shards.whole(weight) if is_part else np.asarray(weight)
    local = np.concatenate(
        [w.ravel() for layer in model.local for w in layer.get_weights()] or [[]]
    )
    if not side.alone and model.local:
        local = hvd.allgather(local, process_set=side.of).numpy()
    found["local"] = local
    for name, values in (logs or {}).items():
        found[f"log {name}"] = np.asarray(values)
    return found


def shared(model: Net) -> list[Any]:
    own = [v for layer in model.local for v in layer.variables]
    return [v for v in model.variables if not any(v is other for other in own)]
