"""Writes docs/tables/auto.csv: python -m tests.parallel.layers.divided [TEXT].

Traces one training step with every layer, loss, metric and optimizer of Keras, and places its ops
as ``hvdrun --auto`` does. A step is divided if no rank needs the rows of the others.
"""

import csv
import inspect
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_keras.auto.places import WholeError
from hvd_keras.auto.run import function, planned
from tests.parallel.layers import cases, compare

TABLE = pathlib.Path("docs/tables/auto.csv")
#: Classes that others stand for, or that are no optimizers of a step.
NO_OPTIMIZERS = {"Optimizer", "LossScaleOptimizer"}


def steps() -> Iterator[tuple[str, str, Any, str, Any]]:
    """Yield for each class: its kind, an expression, the compiled model, and what it gets."""
    for kind in ("layers", "losses", "metrics"):
        for of, text, reduction in cases.cases(kind):
            if reduction != cases.REDUCTIONS[0]:
                continue
            loss, metrics = "categorical_crossentropy", []
            is_layer = kind == "layers"
            model = compare.with_layer(of, text) if is_layer else compare.with_output(of)
            if kind == "losses":
                loss = compare.evaluated(text, keras.losses)
            if kind == "metrics":
                loss = "sparse_categorical_crossentropy" if of == "labels" else loss
                metrics = [compare.metric(of, text)]
            model.compile(keras.optimizers.SGD(), loss, metrics=metrics, jit_compile=False)
            yield kind, text, model, of, "classes" if is_layer else of
    for name, found in inspect.getmembers(keras.optimizers, inspect.isclass):
        if not issubclass(found, keras.optimizers.Optimizer) or name in NO_OPTIMIZERS:
            continue
        model = compare.with_output("classes")
        inner = [lambda _: keras.optimizers.SGD()] if name == "MultiOptimizer" else []
        model.compile(found(*inner), "categorical_crossentropy", jit_compile=False)
        yield "optimizers", f"{name}()", model, "classes", "classes"


def placed(model: Any, of: str, target: str) -> tuple[str, list[str]]:
    """Return how a step is divided, and the ops that need the rows of all ranks."""
    x, y = compare.inputs(of, 0)[:4], compare.targets(target, 0)[:4]
    batch: Any = (tf.constant(x), tf.constant(y))
    if target not in ("unweighted", "masked", "steps"):
        batch = (*batch, tf.constant(np.linspace(0.5, 1, 4), tf.float32))
    model.train_on_batch(*batch)  # makes all variables
    specs = [tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in batch]
    step = function(lambda *data: model.train_step(data), autograph=False)
    try:
        plan, _ = planned(step.get_concrete_function(*specs), 0)
    except WholeError as why:
        return "whole", [str(why)]
    except Exception as error:
        return "whole", [f"{type(error).__name__} {str(error).splitlines()[0]}"]
    gathered = {
        v.node.type for _, kind, v in plan.exchanges.values() if kind == "gather" and v.node
    }
    ops = sorted({op.partition(" (")[0] for op in plan.whole})
    return ("gathers", ops) if ops else ("rows", sorted(gathered)) if gathered else ("divided", [])


def main(only: str = "") -> None:
    """Write the table; with ``only``, print the rows of classes that have it in their name."""
    rows = []
    for kind, text, model, of, target in steps():
        if only in text:
            how, ops = placed(model, of, target)
            rows.append((kind, text, of, how, " ".join(ops)))
            print(*rows[-1], flush=True)
    if not only:
        with TABLE.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(
                [("kind", "class", "input", "step", "ops"), *rows]
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
