"""Runs the code of PAGES and of docstrings, or the scripts that are named, on each rank of a job.

The blocks of a page are one script. docs/api.md shows the docstrings; the names that their examples
take for granted are made here. The ranks' weights and objects differ.
"""

import inspect
import logging
import os
import re
import runpy
import sys
import tempfile
import textwrap
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.runtime import agree, log, settings

ROOT = Path(__file__).parents[2]

# Pages whose Python blocks run one after another.
PAGES = ("README.md", "docs/tutorial.md", "docs/guide.md")

# Of examples/; the others take arguments, and have tests of their own.
SCRIPTS = ("custom_loop", "restart", "gan", "masked_text", "fine_tuning", "tfrecords")

# They start jobs of their own, or need Spark, Ray or a session of TensorFlow 1; all those have
# tests of their own.
ELSEWHERE = {
    *("run", "BroadcastGlobalVariablesHook", "broadcast_global_variables"),
    *("hvd_keras.spark.run", "hvd_keras.spark.shard", "hvd_keras.ray.run"),
}


def blocks(page: str) -> list[str]:
    """Return the blocks of Python code on a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run_page(page: str, folder: Path) -> None:
    """Run a page as one script, and check that its last fit has made the model better."""
    given: dict[str, Any] = {"__name__": "__main__"}
    warnings: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = warnings.append  # type: ignore[method-assign]
    log.logger.addHandler(handler)
    for number, code in enumerate(blocks(page), 1):
        # A file, in which TensorFlow finds the functions' sources.
        file = folder / f"{Path(page).stem} block {number}, rank {hvd.rank()}.py"
        file.write_text(code)
        keras.utils.set_random_seed(1 + hvd.rank())
        with nullcontext() if "hvd" in code else hvd.local_fit():
            exec(compile(code, file, "exec"), given)
        hvd.barrier()
    log.logger.removeHandler(handler)
    assert not warnings, [warning.getMessage() for warning in warnings]
    losses = given["model"].history.history["loss"] if "fit(" in code else [1.0, 0.0]
    assert losses[-1] < losses[0], (page, losses)


def run_script(name: str) -> None:
    """Run an example, and check that its model learns."""
    given = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
    if name == "gan":
        assert given["after"] < given["before"], (given["after"], given["before"])
    else:
        assert given["losses"][-1] < given["losses"][0] * 0.8, given["losses"]
    if name == "restart":
        again = runpy.run_path(str(ROOT / "examples" / "restart.py"))
        assert again["checkpoint"].initial_epoch == again["EPOCHS"]
        assert again["losses"] == []


def examples() -> dict[str, str]:
    """The code of the examples, by the names of docs/api.md."""
    found = {}
    page = (ROOT / "docs" / "api.md").read_text()
    for name in re.findall(r"^\.\. auto\w+:: (\S+)$", page, re.MULTILINE):
        if name in ELSEWHERE or name.startswith(("hvd_keras.spark", "hvd_keras.ray")):
            continue
        of: Any = hvd
        for part in name.removeprefix("hvd_keras.").split("."):
            of = getattr(of, part)
        _, is_there, code = (inspect.getdoc(of) or "").partition("\nExample:\n")
        if is_there:
            # Tables of gigabytes become small.
            found[name] = re.sub(r"\d+_000_000", "1000", textwrap.dedent(code))
    return found


def dense() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation="sigmoid")])
    metrics = [keras.metrics.AUC(name="auc")]
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", metrics=metrics)
    return model


def names(folder: Path) -> dict[str, Any]:
    """What the examples take for granted."""
    random = np.random.default_rng(0)  # a source of data is equal on all ranks
    x = random.normal(size=(256, 4)).astype("float32")
    y = (x.sum(axis=1, keepdims=True) > 0).astype("float32")
    parts = {
        f"{name}_{part}": value
        for name, value in {"x": x, "y": y}.items()
        for part in ("val", "test")
    }
    files = []
    for number in range(2):
        files.append(str(folder / f"{number}.csv"))
        rows = [",".join(map(str, [*a, *b])) for a, b in zip(x, y, strict=True)]
        if hvd.rank() == 0:
            Path(files[-1]).write_text("\n".join(rows[: 100 + number]))
    if hvd.rank() == 0:
        with tf.io.TFRecordWriter(str(folder / "train-0.tfrecord")) as file:
            for row in x:
                value = tf.train.Feature(float_list=tf.train.FloatList(value=row))
                features = tf.train.Features(feature={"x": value})
                file.write(tf.train.Example(features=features).SerializeToString())
    hvd.barrier()

    def parse(line: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        numbers = tf.strings.to_number(tf.strings.split(line, ","))
        return numbers[:4], numbers[4:]

    baseline = keras.Sequential([keras.layers.Dense(1)])
    baseline.compile("sgd", "mse")
    ids = np.random.default_rng(hvd.rank()).integers(0, 100, (8, 3))
    return {
        **parts,
        **{"hvd": hvd, "hvd_keras": hvd, "keras": keras, "tf": tf, "np": np, "x": x, "y": y},
        "data": hvd.data.shard((x, y), batch_size=8),
        **{"model": dense(), "baseline": baseline, "files": files, "parse": parse},
        **{"words": ["a", "b", "c"], "config": {"rate": 0.1 * (1 + hvd.rank())}},
        **{"optimizer": keras.optimizers.SGD(0.01), "loss_fn": keras.losses.MeanSquaredError()},
        **{"bought": ids, "seen": ids, "country": ids[:, 0]},
    }


def main() -> None:
    hvd.init()
    folder = Path(agree.gather_json("folder", tempfile.mkdtemp())[0])
    os.chdir(folder)
    scripts = sys.argv[1:]
    for script in scripts:
        keras.utils.set_random_seed(1 + hvd.rank())
        run_script(script)
        hvd.barrier()
        print("ran the script", script, flush=True)
    if not scripts:
        run_documents(folder)


def run_documents(folder: Path) -> None:
    for page in PAGES:
        run_page(page, folder)
        print("ran the code of", page, flush=True)
    folder /= "of docstrings"  # whose Checkpoint finds none of the pages' files
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    dense().save("checkpoints/model.keras")
    settings.warn_only()  # the examples of a function are not whole scripts
    for name, code in examples().items():
        keras.backend.clear_session()
        keras.utils.set_random_seed(1 + hvd.rank())
        given = names(folder)
        exec(compile(code, f"<the example of {name}>", "exec"), given)
        if name == "broadcast_object_fn":
            assert given["config"] == {"rate": 0.1}
        hvd.barrier()
        print("ran the example of", name, flush=True)


if __name__ == "__main__":
    main()
