"""Models and batches of fit.py and backends.py. Only Keras and NumPy, for any of its backends.

    python benchmarks/keras_models.py

Measures when ``hvdrun --auto -np 2`` pays: the time of an epoch of a script of one process, which
is this file with the name of a model, compared with the script alone. Both have all cores.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

import keras
import numpy as np
import report

BATCH = 64
ROWS, WIDTH, LENGTH = 50_000, 64, 32  # of the embedding; the length of a text in words


def perceptron() -> keras.Model:
    layers = [keras.layers.Flatten()]
    layers += [keras.layers.Dense(n, activation="relu") for n in (256, 128)]
    return keras.Sequential([keras.Input((28, 28, 1)), *layers, keras.layers.Dense(10)])


def convnet() -> keras.Model:
    layers = []
    for filters in (16, 32):
        layers += [keras.layers.Conv2D(filters, 3, activation="relu"), keras.layers.MaxPool2D()]
    layers += [keras.layers.Flatten(), keras.layers.Dense(64, activation="relu")]
    return keras.Sequential([keras.Input((28, 28, 1)), *layers, keras.layers.Dense(10)])


def embedding() -> keras.Model:
    layers = [keras.layers.Embedding(ROWS, WIDTH), keras.layers.GlobalAveragePooling1D()]
    return keras.Sequential(
        [keras.Input((LENGTH,), dtype="int32"), *layers, keras.layers.Dense(10)]
    )


def resnet() -> keras.Model:
    return keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10)


CASES = {
    "perceptron": (perceptron, keras.optimizers.SGD),
    "convnet": (convnet, keras.optimizers.SGD),
    "embedding, SGD": (embedding, keras.optimizers.SGD),
    "embedding, Adam": (embedding, keras.optimizers.Adam),
}
MORE = {"ResNet-50, 32 x 32": (resnet, keras.optimizers.SGD)}  # if asked for


def made(case: str) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    """Returns the model, with the same first weights at every call and on every rank."""
    keras.utils.set_random_seed(1)
    build, make_optimizer = (CASES | MORE)[case]
    return build(), make_optimizer(0.01)


#: What --auto is measured with: the rows of a batch, and the batches of an epoch.
AUTO = {
    "perceptron": (32, 400),
    "convnet": (128, 40),
    "embedding, Adam": (256, 20),
    "ResNet-50, 32 x 32": (64, 8),
}


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def rows(case: str) -> int:
    """Returns the rows of a batch; few for ResNet-50, of 102 MB: so the exchange counts."""
    return BATCH // 16 if (CASES | MORE)[case][0] is resnet else BATCH


def batch(case: str, rank: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(rank)
    build = (CASES | MORE)[case][0]
    if build is embedding:
        x = random.integers(0, ROWS, (BATCH, LENGTH)).astype("int32")
    else:
        shape = (32, 32, 3) if build is resnet else (28, 28, 1)
        x = random.normal(size=(rows(case), *shape)).astype("float32")
    return x, random.integers(0, 10, rows(case))


class Epochs(keras.callbacks.Callback):
    """The seconds of each epoch."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self.start)


def train(case: str, smoke: bool) -> None:
    """The script of one process: prints the seconds of an epoch, a median of three."""
    rows, steps = (16, 2) if smoke else AUTO[case]
    model, optimizer = made(case)
    model.compile(optimizer, loss())
    data = [np.resize(part, (rows * steps, *part.shape[1:])) for part in batch(case, 0)]
    epochs = Epochs()
    model.fit(*data, batch_size=rows, epochs=4, verbose=0, callbacks=[epochs])
    print(statistics.median(epochs.seconds[1:]))


def seconds(*command: str) -> float:
    """Measures an epoch of the script in a new process, or two."""
    environment = {k: v for k, v in os.environ.items() if "_NUM_" not in k}  # all cores
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, help="of each measurement (default 3)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON, no table")
    parser.add_argument("--smoke", action="store_true", help="once, as a quick check")
    parser.add_argument("case", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        train(options.case, options.smoke)
        return
    auto = [sys.executable, "-m", "hvd_keras.hvdrun", "--auto", "-np", "2", "--oversubscribe"]
    found = []
    for case, (rows, steps) in list(AUTO.items())[: 1 if options.smoke else None]:
        alone = [sys.executable, __file__, case, *["--smoke"] * options.smoke]
        repeats = options.repeats or (1 if options.smoke else 3)
        pairs = [(seconds(*auto, "--no-prefix", *alone), seconds(*alone)) for _ in range(repeats)]
        what = f"an epoch with --auto, {case}, {steps} batches of {rows} rows"
        found.append(report.compare(what, 2, "one process", *zip(*pairs, strict=True)))
    report.show(found, options.json)


if __name__ == "__main__":
    main()
