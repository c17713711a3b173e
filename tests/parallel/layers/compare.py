"""Trains with one layer, loss or metric of Keras on all ranks, and on one process with all rows."""

import contextlib
import warnings
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.runtime import agree, log

BATCH, STEPS, CLASSES = 4, 3, 4  # rows per rank
layers = keras.layers
SHAPES = {
    **dict.fromkeys(("vector", "pair", "words", "masked", "masked attention"), (6,)),
    **dict.fromkeys(("classes", "unweighted", "labels", "values"), (6,)),
    **dict.fromkeys(("sequence", "padded", "attention"), (6, 4)),
    **{"image": (8, 8, 3), "pixels": (8, 8, 3), "volume": (4, 4, 4, 2), "frames": (3, 4, 4, 4, 2)},
    **{"signal": (64,), "channels": (64, 1), "text": (1,), "crossed": (1,), "steps": (8, 4)},
}


def inputs(of: str, rank: int) -> np.ndarray:
    """A rank's rows; their distribution differs by rank."""
    random = np.random.default_rng([1, rank])
    size = (STEPS * BATCH, *SHAPES[of])
    if of in ("words", "masked", "masked attention", "crossed"):
        x = random.integers(1, 9 + 5 * rank, size)
        if of.startswith("masked"):  # the ranks' sequences differ in length
            x[:, 1:][random.uniform(size=(size[0], size[1] - 1)) < 0.2 + 0.5 * rank] = 0
            x = -np.sort(-x)
        return x.astype("int32")
    if of == "text":
        return random.choice(["a", "b", "c"][rank % 2 :], size)
    x = random.normal(0.3 * rank, 1 + rank, size)
    if of == "pixels":
        x = np.floor(80 * x) % 256
    if of == "padded":
        x[:, 4 - rank :] = 0
    return x.astype("float32")


def targets(of: str, rank: int) -> np.ndarray:
    random = np.random.default_rng([2, rank])
    size = (STEPS * BATCH, 6) if of == "masked" else STEPS * BATCH
    labels = random.integers(0, CLASSES - rank % 2, size)
    if of == "steps":
        return random.integers(1, CLASSES, (size, 2))
    return labels if of == "labels" else keras.utils.to_categorical(labels, CLASSES)


def evaluated(text: str, home: Any) -> Any:
    return eval(text, {**vars(home), "keras": keras, "__name__": __name__})


def with_layer(of: str, text: str) -> keras.Model:
    layer = evaluated(text, layers)
    dtype = "string" if of == "text" else inputs(of, 0).dtype.name
    before = x = keras.Input(SHAPES[of], dtype=dtype)
    if of.startswith("masked"):
        before = layers.Embedding(20, 4, mask_zero=True)(x)
    elif of in ("vector", "pair", "sequence", "attention", "image", "volume", "frames"):
        before = layers.Dense(SHAPES[of][-1], activation="tanh")(x)
    if of in ("pair", "crossed") or text.startswith(("Attention", "AdditiveAttention")):
        after = layer([before, before])
    else:
        after = layer(before, before) if "attention" in of else layer(before)
    if after.dtype != "float32" or of in ("pixels", "signal", "channels"):
        after = layers.Rescaling(0.01)(after)
    if len(after.shape) > 2:
        after = layers.Flatten()(after)
    return keras.Model(x, layers.Dense(CLASSES, activation="softmax")(after))


def with_output(of: str) -> keras.Model:
    x = keras.Input(SHAPES[of], dtype=inputs(of, 0).dtype.name)
    hidden = layers.Embedding(20, 4, mask_zero=True)(x) if of == "masked" else x
    if of == "steps":
        return keras.Model(x, layers.Dense(CLASSES + 1)(hidden))
    return keras.Model(x, layers.Dense(CLASSES, activation="softmax")(hidden))


def outcome(kind: str, of: str, text: str, reduction: str) -> str:
    """ "=", "told", "random", "differs" or an error; the same on all ranks."""
    told: list[str] = []
    before, log.warn_once = log.warn_once, told.append
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = _compared(kind, of, text, reduction)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    finally:
        log.warn_once = before
    told += [str(warning.message) for warning in caught]
    is_told = any(w in line for line in told for w in ("other than by a mean", "MetricAverage"))
    if is_told and result in ("=", "differs"):
        result = "told"
    results = agree.gather_json("outcome", result)
    return next((text for text in results if ": " in text), results[0])  # an error of any rank


def _compared(kind: str, of: str, text: str, reduction: str) -> str:
    results = []
    for together in (True, False)[: 2 - bool(hvd.rank())]:
        keras.utils.set_random_seed(1)
        loss: Any = "categorical_crossentropy"
        metrics, rate = [], 0.05
        if kind == "layers":
            # One process alone has nobody to synchronise with.
            own = text if together else text.replace("synchronized=True", "")
            model = with_layer(of, own)
        else:
            model = with_output(of)
        if kind == "losses":
            loss = evaluated(text, keras.losses)
            loss.reduction = reduction
            rate /= 20 if reduction in ("sum", "none") else 1
        if kind == "metrics":
            loss = "sparse_categorical_crossentropy" if of == "labels" else loss
            metrics = [metric(of, text)]
        results.append(_trained(model, kind, of, loss, metrics, rate, together))
    alike = (np.allclose(*pair, rtol=1e-3, atol=2e-5) for pair in zip(*results, strict=True))
    if len(results) == 1 or all(alike):
        return "="
    is_random = any(layer._seed_generators for layer in model._flatten_layers())
    return "random" if is_random else "differs"


def metric(of: str, text: str) -> keras.metrics.Metric:
    made = evaluated(text, keras.metrics)
    if of == "values":  # such a metric gets the values alone
        update = made.update_state
        made.update_state = lambda y_true, y_pred, sample_weight=None: update(y_pred)
    return made


def _trained(
    model: keras.Model, kind: str, of: str, loss: Any, metrics: list, rate: float, together: bool
) -> list[np.ndarray]:
    parts = []
    for rank in range(hvd.size()):
        y = targets("classes" if kind == "layers" else of, rank)
        weights = np.linspace(0.5, 1 + rank, STEPS * BATCH)
        weights = weights[:, np.newaxis] if of == "masked" and kind == "losses" else weights
        parts.append((inputs(of, rank), y, weights))
    optimizer, callbacks = keras.optimizers.SGD(rate), []
    if together:
        optimizer = hvd.DistributedOptimizer(optimizer)
        callbacks.append(hvd.callbacks.BroadcastGlobalVariablesCallback(0))
        callbacks.append(hvd.callbacks.MetricAverageCallback())
        x, y, weights = parts[hvd.rank()]
    else:  # each batch has all ranks' rows of a step
        steps = [
            np.stack(a, 1) for a in zip(*([*map(_steps, part)] for part in parts), strict=True)
        ]
        x, y, weights = (a.reshape(-1, *a.shape[3:]) for a in steps)
    model.compile(optimizer, loss, metrics=metrics, jit_compile=False)
    with contextlib.nullcontext() if together else hvd.local_fit():
        history = model.fit(
            tf.constant(x) if of == "text" else x,
            y,
            sample_weight=None if of == "unweighted" else weights,
            batch_size=BATCH if together else BATCH * hvd.size(),
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        ).history
    return [*model.get_weights(), *map(np.asarray, history.values())]


def _steps(array: np.ndarray) -> np.ndarray:
    return array.reshape(STEPS, BATCH, *array.shape[1:])
