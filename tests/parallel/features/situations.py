"""What is done with a model of sides.py in each situation of table.py, and the comparison."""

import contextlib
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import keras
from tests.parallel.features import table
from tests.parallel.features.sides import (
    Side,
    build,
    callbacks,
    compiled,
    every_row,
    fit,
    result,
    rows,
    shared,
    with_all_rows,
)


class Interrupt(keras.callbacks.Callback):
    """Ends a training in the middle of an epoch."""

    def on_epoch_begin(self, epoch, logs=None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None) -> None:
        if self.epoch == 1 and batch >= 2:
            raise KeyboardInterrupt


def plain(side: Side, folder: pathlib.Path) -> dict[str, np.ndarray]:
    if side.has("join"):
        return _loop(side)
    model = build(side)
    logs = fit(model, side)
    return result(model, side, None if side.has("padded last batch") else logs)


def restart(side: Side, folder: pathlib.Path) -> dict[str, np.ndarray]:
    saved = functools.partial(
        hvd.callbacks.Checkpoint, folder / "state", save_freq=2, process_set=side.of
    )
    with contextlib.suppress(KeyboardInterrupt):
        fit(build(side), side, saved(), Interrupt())
    model = build(side)
    fit(model, side, saved())
    return result(model, side)


def fewer_ranks(side: Side, folder: pathlib.Path) -> dict[str, np.ndarray]:
    saved = functools.partial(hvd.callbacks.Checkpoint, folder / "state")
    fit(build(side), side, saved(process_set=side.of), epochs=1)
    one = hvd.add_process_set([0])

    def continued() -> dict[str, np.ndarray]:
        alone = with_all_rows(side, one, side.names, alone=False)
        model = build(alone)
        fit(model, alone, saved(process_set=one))
        return result(model, alone)

    try:
        return agree.on_leader("continued", continued, side.of) or {}
    finally:
        hvd.remove_process_set(one)


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
        side = with_all_rows(side, side.of, side.names, alone=True)
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
    arguments = {"batch_size": side.batch, "verbose": 0}
    average = [] if side.alone else callbacks(side, model)[1:]
    loss = np.float32(model.evaluate(x, y, callbacks=average, **arguments))
    predicted = model.predict(x, **arguments)
    if not side.alone:
        every = hvd.allgather(predicted, process_set=side.of).numpy()
    else:
        _, _, owner = every_row(side)
        every = predicted[np.argsort(owner, kind="stable")]
    return {"loss": loss, "predictions": every}


def _loop(side: Side) -> dict[str, np.ndarray]:
    """A loop in which the last rank has a batch less than the others, and joins."""
    model = build(side)
    x, y = rows(side)
    _, _, owner = every_row(side)
    last = side.parts - 1
    problem = None
    if not side.alone:
        hvd.broadcast_variables(shared(model), last)
    for begin in range(0, len(y), side.batch):
        step = slice(begin, begin + side.batch)
        is_last = step.stop >= len(y)
        if is_last and side.mine == (last,):
            break
        try:
            with tf.GradientTape() as tape:
                predicted = model({name: v[step] for name, v in x.items()}, training=True)
                each = tf.reduce_mean(tf.square(predicted - y[step]), [1, 2])
                if side.alone and is_last:  # the rank that has joined gives zeros
                    each *= tf.cast(owner[step] != last, each.dtype)
                loss = model.optimizer.scale_loss(tf.reduce_mean(each))
            if side.has("tape") and not side.alone:
                tape = hvd.DistributedGradientTape(tape, **side.options("distributed"))
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


_SITUATIONS: dict[str, Callable[[Side, pathlib.Path], dict[str, np.ndarray]]] = {
    "restart": restart,
    "fewer ranks": fewer_ranks,
    "save and load": save_and_load,
    "early stopping": early,
    "frozen layer": frozen,
    "evaluate and predict": evaluate,
}


@functools.cache
def _one_process(names: frozenset[str], parts: int) -> dict[str, np.ndarray]:
    situation = _SITUATIONS.get(next(s for s in table.SITUATIONS if s in names), plain)
    side = with_all_rows(Side(names, None, parts, ()), None, names, alone=True)
    with hvd.local_fit():
        return situation(side, pathlib.Path())


def outcome(case: table.Case, of: Any, folder: pathlib.Path) -> tuple[str, str]:
    """Trains on all ranks that take part, and compares.

    Args:
        case: what they train.
        of: the ranks.
        folder: empty, and the same on all ranks.

    Returns:
        "=", "error", "≠" or, where the ranks disagree about it, "failed"; and the reason.
    """
    found: dict[str, np.ndarray] = {}
    problem = None
    try:
        situation = _SITUATIONS.get(case.situation, plain)
        found = situation(Side(case.names, of, of.size(), (of.rank(),)), folder)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    problems = agree.gather_json("problems", problem, of)
    if any(problems):
        return ("error" if all(problems) else "failed"), agree.by_rank(problems, of)
    if case.situation != "fewer ranks":
        for name, value in found.items():
            if len(set(agree.gather_bytes(name, value.tobytes(), of))) > 1:
                return "failed", f"{name} differs between the ranks"

    def differences() -> list[str]:
        try:
            expected = _one_process(case.alone, of.size())
            one = 2e-2 if "compression" in case.names else 1e-3
            return [
                f"{name}: {value.tolist()}, and one process has {expected[name].tolist()}"
                for name, value in found.items()
                if not np.allclose(value, expected[name], rtol=one, atol=one / 10)
            ]
        except Exception as error:
            return [f"one process fails: {type(error).__name__}: {error}"]

    views = agree.gather_json("views", differences() if of.rank() == 0 else [], of)
    return ("≠" if views[0] else "="), "; ".join(views[0])
