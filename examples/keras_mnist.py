"""Train a convolutional network on handwritten digits, on several processes.

    hvdrun -np 2 python examples/keras_mnist.py

Without the lines marked "hvd" this is an ordinary Keras script for one process. By default it uses
the 8x8 digits of scikit-learn (pip install scikit-learn), so nothing is downloaded.
"""

import argparse
import gzip
import os
import sys
import time
from pathlib import Path

# Must be set before TensorFlow is imported, which logs an error on machines without GPUs. Other
# errors reach Python as exceptions anyway.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hvd_keras as hvd
import keras
import numpy as np

FASHION = Path("/usr/share/datasets/fashion-mnist")


def load_digits():
    from sklearn.datasets import load_digits

    digits = load_digits()
    # Neighbouring digits are by one writer, so they are permuted; the same on every rank.
    order = np.random.default_rng(0).permutation(len(digits.images))
    test, train = order[:360], order[360:]
    return tuple((digits.images[part], digits.target[part]) for part in (train, test))


def load_fashion():
    def read_idx(name):
        path = FASHION / name
        if not path.exists():
            sys.exit(f"{path} is missing. On Debian: apt-get install dataset-fashion-mnist")
        data = gzip.decompress(path.read_bytes())
        dimensions = data[
            3
        ]  # the header: two zero bytes, the type, the number of dimensions, 4 bytes per dimension
        shape = np.frombuffer(data, ">i4", dimensions, offset=4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)

    return tuple(
        (read_idx(f"{part}-images-idx3-ubyte.gz"), read_idx(f"{part}-labels-idx1-ubyte.gz"))
        for part in ("train", "t10k")
    )


def load_mnist():
    # A separate file for each rank, because the ranks may download at the same time.
    return keras.datasets.mnist.load_data(path=f"mnist-{hvd.rank()}.npz")


LOADERS = {"digits": load_digits, "fashion": load_fashion, "mnist": load_mnist}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", choices=LOADERS, default="digits")
    parser.add_argument("--epochs", type=int, help="default: 40 for the few digits, else 12")
    parser.add_argument("--batch-size", type=int, default=32, help="per rank, default: 32")
    parser.add_argument("--learning-rate", type=float, default=0.001, help="for one rank")
    parser.add_argument("--checkpoint", default="checkpoints/mnist.keras")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.epochs = args.epochs or (40 if args.dataset == "digits" else 12)
    return args


def build_model(image_shape):
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Dropout(0.25),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(10, activation="softmax"),
        ]
    )


class Stopwatch(keras.callbacks.Callback):
    """Measure the time of each epoch, from its first to its last training step."""

    def on_train_begin(self, logs=None):
        self.seconds = []

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 0:
            self.started = time.perf_counter()

    def on_test_begin(self, logs=None):
        self.seconds.append(time.perf_counter() - self.started)


def main():
    args = parse_arguments()

    # hvd 1: start. Each process is one rank, and gets one GPU if there are any.
    hvd.init()

    keras.utils.set_random_seed(args.seed)
    (x, y), (x_test, y_test) = LOADERS[args.dataset]()
    brightest = x.max()
    x, x_test = (images[..., None].astype("float32") / brightest for images in (x, x_test))

    # hvd 2: each rank trains on its own share, every hvd.size()-th sample. All shares have the same
    # length, so all ranks make the same number of steps; the few remaining samples are left out.
    share = len(x) // hvd.size()
    mine = slice(hvd.rank(), share * hvd.size(), hvd.size())

    # hvd 3: average the gradients of all ranks. The total batch is hvd.size() times that of one
    # rank, and the learning rate grows with it.
    learning_rate = args.learning_rate * hvd.size()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(learning_rate))

    model = build_model(x.shape[1:])
    model.compile(optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])

    stopwatch = Stopwatch()
    callbacks = [
        # hvd 4: all ranks start from rank 0's weights, log the metrics over all ranks' samples,
        # reach the large learning rate gradually, and let rank 0 alone write the model.
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=learning_rate, warmup_epochs=3),
        hvd.callbacks.ModelCheckpoint(args.checkpoint),
        stopwatch,
    ]

    is_first = hvd.rank() == 0  # only this rank prints
    if is_first:
        print(f"Ranks: {hvd.size()} with {share} samples each, {args.batch_size} a step")
    model.fit(
        x[mine],
        y[mine],
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_data=(x_test[hvd.rank() :: hvd.size()], y_test[hvd.rank() :: hvd.size()]),
        callbacks=callbacks,
        verbose=2 if is_first else 0,
    )

    if is_first:
        seconds = stopwatch.seconds[1:]  # the first epoch includes tracing
        if seconds:
            rate = share * hvd.size() * len(seconds) / sum(seconds)
            print(f"Rate: {rate:.0f} samples/s over all ranks, from the second epoch on")
        accuracy = model.evaluate(x_test, y_test, verbose=0)[1]
        print(f"Test accuracy: {accuracy:.4f}, saved {args.checkpoint}")


if __name__ == "__main__":
    main()
