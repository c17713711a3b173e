"""The table of features that tests/parallel/features/test_combinations.py crosses.

A case is a set of features in one situation. Each rank trains with its part of every batch, and one
process with the whole batch; both run the same code here, for different sides.
"""

import contextlib
import dataclasses
import functools
import pathlib
import zlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras import agree, process_sets, shards

BATCH, STEPS, LENGTH, WORDS = 4, 4, 3, 12


@dataclasses.dataclass(frozen=True)
class Side:
    """The ranks of a process set, or one process that has all rows.

    Attributes:
        names: the features of the case, and its situation.
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
    def batch(self) -> int:
        """The rows of a batch on this side."""
        return BATCH * len(self.mine)


def side_of(names: frozenset[str], of: Any) -> Side:
    """This rank, one of those that train together."""
    return Side(names, of, of.size(), (of.rank(),))


def with_all_rows(side: Side, of: Any, *, alone: bool) -> Side:
    """One process for the ranks of another side."""
    return Side(side.names, of, side.parts, tuple(range(side.parts)), alone)


def _initializer(name: str) -> Any:
    return keras.initializers.RandomUniform(-0.5, 0.5, seed=zlib.crc32(name.encode()) % 2**31)


def dense(units: int, name: str, **arguments: Any) -> Any:
    """A layer with the same first weights on all sides."""
    return keras.layers.Dense(units, name=name, kernel_initializer=_initializer(name), **arguments)


@keras.saving.register_keras_serializable("tests")
class Net(keras.Model):
    """A network of the layers that the features ask for; ``who`` says whose a row is."""

    def __init__(self, names: list[str], local: list[int], divided: int | None) -> None:
        super().__init__()
        self.names, self.divided = list(names), divided
        self.first = dense(6, "first", activation="tanh")
        self.second = dense(1, "second")
        self.masking = keras.layers.Masking() if "masked loss" in names else None
        self.normalization = None
        if "Normalization" in names:
            self.normalization = keras.layers.Normalization(mean=[0.5] * 3, variance=[4.0] * 3)
        self.table = None
        if divided is not None:
            init = _initializer("table")
            process_set = process_sets.of_id(divided)
            self.table = hvd.layers.Embedding(
                WORDS, 6, shard="rows", embeddings_initializer=init, process_set=process_set
            )
        elif {"divided table", "sparse"} & set(names):
            self.table = keras.layers.Embedding(
                WORDS, 6, name="table", embeddings_initializer=_initializer("table")
            )
        self.numbers = local
        self.local = [dense(1, f"local{i}") for i in local]
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
                compression=compression(self.side),
            )
        head = self.second.trainable_variables
        own = head if self.side.has("second optimizer") else []
        rest = [v for v in self.trainable_variables if not any(v is other for other in own)]
        self.optimizer.apply(tape.gradient(scaled, rest), rest)
        if own:
            self.second_optimizer.apply(tape.gradient(loss, own), own)
        self._loss_tracker.update_state(loss)
        return self.get_metrics_result()


def compression(side: Side) -> Any:
    return hvd.Compression.fp16 if side.has("compression") else hvd.Compression.none


def _plain_optimizer(side: Side) -> Any:
    options: dict[str, Any] = {}
    if side.has("accumulation"):
        options["gradient_accumulation_steps"] = 2
    if side.has("EMA"):
        options |= {"use_ema": True, "ema_momentum": 0.8}
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
        compression=compression(side),
        shard_state=side.has("shard_state"),
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
        optimizer=optimizer,
        loss="mse",
        jit_compile=side.has("jit_compile"),
        run_eagerly=side.has("eager") and not side.alone,
        steps_per_execution=2 if side.has("steps_per_execution") else 1,
    )
    return model


def build(side: Side) -> Net:
    """Makes and compiles a model. Local layers are built, because the optimizer must know them."""
    has_step = side.has("tape", "second optimizer", "custom train_step", "join")
    local: list[int] = []
    if side.has("local layers"):
        local = list(side.mine)
    divided = side.of.id() if side.has("divided table") and not side.alone else None
    model = (StepNet if has_step else Net)(sorted(side.names), local, divided)
    for layer in model.local:
        layer.build((None, LENGTH, 3))
    if side.alone or not side.has("unbuilt"):
        x, _ = rows(side)
        model({name: values[:1] for name, values in x.items()})
    return compiled(model, side)


@functools.cache
def _all_rows(size: int, unequal: bool) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """All rows, and whose each is, step by step."""
    owner = np.tile(np.repeat(np.arange(size), BATCH), STEPS)
    if unequal:  # the last rank has half a batch in the last step
        owner = owner[: -BATCH // 2]
    random = np.random.default_rng(1)
    x = random.normal(size=(len(owner), LENGTH, 3)).astype("float32")
    x[owner == size - 1, 1:] *= random.integers(0, 2, (int(sum(owner == size - 1)), 2, 1))
    ids = random.integers(0, WORDS, (len(owner), LENGTH)).astype("int32")
    who = np.repeat(np.eye(size, dtype="float32")[owner][:, np.newaxis], LENGTH, 1)
    y = random.normal(size=(len(owner), LENGTH, 1)).astype("float32")
    y += owner[:, np.newaxis, np.newaxis]  # ranks have different gradients
    return {"x": x, "ids": ids, "who": who}, y, owner


def rows(side: Side) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The rows of this side, step by step."""
    x, y, owner = _all_rows(side.parts, side.has("unequal batches"))
    mine = np.isin(owner, side.mine)
    return {name: values[mine] for name, values in x.items()}, y[mine]


def data(side: Side) -> dict[str, Any]:
    """The arguments of ``fit`` that give its data."""
    x, y = rows(side)
    batch = side.batch
    if not side.has("data of unknown length"):
        return {"x": x, "y": y, "batch_size": batch}

    def batches():
        for begin in range(0, len(y), batch):
            yield {n: v[begin : begin + batch] for n, v in x.items()}, y[begin : begin + batch]

    signature = tf.nest.map_structure(
        lambda v: tf.TensorSpec([None, *v.shape[1:]], v.dtype), (x, y)
    )
    return {"x": tf.data.Dataset.from_generator(batches, output_signature=signature)}


def fit(model: Net, side: Side, *callbacks: Any, epochs: int = 2) -> Any:
    """Trains; returns the logs of each epoch."""
    first = [hvd.callbacks.BroadcastGlobalVariablesCallback(side.of.ranks[-1])]
    first.append(hvd.callbacks.MetricAverageCallback())
    if side.has("tape") and not side.alone:
        for callback in first:
            callback._hvd_process_set = side.of
    chosen = [*([] if side.alone else first), *callbacks]
    arguments = {"epochs": epochs, "shuffle": False, "verbose": 0, "callbacks": chosen}
    return model.fit(**data(side), **arguments).history


def result(model: Net, side: Side, logs: Any = None) -> dict[str, np.ndarray]:
    """What both sides must have in common, by name; the same on all ranks that train."""
    found = {}
    for layer in (model.first, model.second, model.table):
        for weight in [] if layer is None else layer.weights:
            name = f"{layer.name.rstrip('_0123456789')}/{weight.name}"
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


class Interrupt(keras.callbacks.Callback):
    """Ends a training in the middle of an epoch."""

    def on_epoch_begin(self, epoch, logs=None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None) -> None:
        if self.epoch == 1 and batch >= 2:
            raise KeyboardInterrupt


# Situations.


def plain(side: Side, folder: pathlib.Path) -> dict[str, np.ndarray]:
    if side.has("join"):
        return _loop(side)
    model = build(side)
    return result(model, side, fit(model, side))


def restart(side: Side, folder: pathlib.Path) -> dict[str, np.ndarray]:
    model = build(side)
    if not side.alone:
        saved = functools.partial(
            hvd.callbacks.Checkpoint, folder / "state", save_freq=2, process_set=side.of
        )
        with contextlib.suppress(KeyboardInterrupt):
            fit(model, side, saved(), Interrupt())
        model = build(side)
        fit(model, side, saved())
        return result(model, side)
    fit(model, side)
    return result(model, side)


def fewer_ranks(side: Side, folder: pathlib.Path) -> dict[str, np.ndarray]:
    model = build(side)
    if side.alone:
        fit(model, side)
        return result(model, side)
    saved = functools.partial(hvd.callbacks.Checkpoint, folder / "state")
    fit(model, side, saved(process_set=side.of), epochs=1)
    one = hvd.add_process_set([0])
    found = {}
    if side.of.rank() == 0:
        side = with_all_rows(side, one, alone=False)
        model = build(side)
        fit(model, side, saved(process_set=one))
        found = result(model, side)
    hvd.barrier()
    hvd.remove_process_set(one)
    return found


def early(side: Side, folder: pathlib.Path) -> dict[str, np.ndarray]:
    model = build(side)
    stop = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=0.3)
    logs = fit(model, side, stop, epochs=6)
    assert 1 < len(logs["loss"]) < 6
    return result(model, side, logs)


def save_and_load(side: Side, folder: pathlib.Path) -> dict[str, np.ndarray]:
    model = build(side)
    fit(model, side, epochs=1)
    if side.has("divided table", "shard_state") and not side.alone:
        hvd.save_model(model, folder / "model.keras")
    elif not side.alone:
        model.save(folder / "model.keras")
    if not side.alone:
        hvd.barrier(side.of)
        side = with_all_rows(side, side.of, alone=True)
        model = keras.models.load_model(folder / "model.keras")
        hvd.barrier(side.of)
    x, _ = rows(side)
    return {"predictions": model.predict(x, batch_size=99, verbose=0)}


def frozen(side: Side, folder: pathlib.Path) -> dict[str, np.ndarray]:
    model = build(side)
    fit(model, side, epochs=1)
    model.first.trainable = False
    model = compiled(model, side)
    return result(model, side, fit(model, side, epochs=1))


def evaluate(side: Side, folder: pathlib.Path) -> dict[str, np.ndarray]:
    model = build(side)
    fit(model, side, epochs=1)
    x, y = rows(side)
    batch = side.batch
    loss = np.float32(model.evaluate(x, y, batch_size=batch, verbose=0))
    predicted = model.predict(x, batch_size=batch, verbose=0)
    if not side.alone:
        loss = hvd.allreduce(loss, process_set=side.of).numpy()
        every = hvd.allgather(predicted, process_set=side.of).numpy()
    else:
        _, _, owner = _all_rows(side.parts, False)
        every = predicted[np.argsort(owner, kind="stable")]
    return {"loss": loss, "predictions": every}


def _loop(side: Side) -> dict[str, np.ndarray]:
    """A loop in which the last rank has a batch less than the others, and joins."""
    model = build(side)
    x, y = rows(side)
    _, _, owner = _all_rows(side.parts, False)
    last = side.parts - 1
    problem = None
    if not side.alone:
        hvd.broadcast_variables(shared(model), 0)
    for begin in range(0, len(y), side.batch):
        step = slice(begin, begin + side.batch)
        is_last = step.stop >= len(y)
        if is_last and side.mine == (last,):
            break
        with tf.GradientTape() as tape:
            predicted = model({name: values[step] for name, values in x.items()}, training=True)
            each = tf.reduce_mean(tf.square(predicted - y[step]), [1, 2])
            if side.alone and is_last:  # the rank that has joined gives zeros
                each *= tf.cast(owner[step] != last, each.dtype)
            loss = model.optimizer.scale_loss(tf.reduce_mean(each))
        if side.has("tape") and not side.alone:
            tape = hvd.DistributedGradientTape(tape, compression=compression(side))
        try:
            variables = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, variables), variables)
        except tf.errors.OpError as error:
            problem = str(error)
            break
    if side.alone:
        return result(model, side)
    root = int(hvd.join())
    problems = [text for text in agree.gather_json("problems", problem) if text]
    if problems:
        raise RuntimeError(problems[0])
    hvd.broadcast_variables(shared(model), root)
    return result(model, side)


def shared(model: Net) -> list[Any]:
    own = [v for layer in model.local for v in layer.variables]
    return [v for v in model.variables if not any(v is other for other in own)]


Situation = Callable[[Side, pathlib.Path], dict[str, np.ndarray]]
SITUATIONS: dict[str, Situation] = {
    "plain": plain,
    "clipnorm": plain,
    "global_clipnorm": plain,
    "clipvalue": plain,
    "restart": restart,
    "fewer ranks": fewer_ranks,
    "save and load": save_and_load,
    "early stopping": early,
    "frozen layer": frozen,
    "evaluate and predict": evaluate,
    "data of unknown length": plain,
    "unequal batches": plain,
}
