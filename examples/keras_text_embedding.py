"""Train a text classifier with an embedding on several processes: sparse gradients.

    hvdrun -np 2 python examples/keras_text_embedding.py

It learns to tell from which library a paragraph of documentation comes. The texts are docstrings of
Python and of packages that hvd_keras itself needs, so nothing is downloaded.

The gradient of an embedding is a tf.IndexedSlices: rows for the words of the batch, none for the
rest of the vocabulary. As each rank sees other words, hvd gathers the rows of all ranks instead of
summing whole tables. The script need not do anything for it.
"""

import argparse
import importlib.util
import os
import re
import sys
import sysconfig
import time
import zlib
from pathlib import Path

# To be set before TensorFlow is imported: on a machine without GPUs it logs their absence as an
# error. What goes wrong later reaches Python as an exception anyway.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import hvd_keras as hvd

LIBRARIES = ("python", "numpy", "keras", "tensorflow")
WORDS = 40  # of each paragraph that count; longer ones are cut off
VOCABULARY = 20_000


def source_files(library):
    if library == "python":
        folder = Path(sysconfig.get_paths()["stdlib"])
    else:
        folder = Path(importlib.util.find_spec(library).origin).parent
    if library == "tensorflow":  # this part of it is as large as the other libraries
        folder = folder / "python" / "ops"
    others = {"site-packages", "dist-packages", "test", "tests"}
    # Sorted, because a file system lists its files in any order.
    return [
        file
        for file in sorted(folder.rglob("*.py"))
        if others.isdisjoint(file.relative_to(folder).parts)
    ]


def paragraphs(file):
    source = file.read_text("utf-8", "replace")
    # What stands between triple quotes is a docstring nearly always, and found much faster than by
    # parsing the file.
    for text in re.findall(r'"""(.+?)"""', source, re.DOTALL):
        yield from re.split(r"\n\s*\n", text)


def load_texts():
    """Return (texts, labels) to train on, and the same to test with, equal on all ranks."""
    train, test = ([], []), ([], [])
    seen = set()
    for label, library in enumerate(LIBRARIES):
        for number, file in enumerate(source_files(library)):
            # By file, so that no docstring has paragraphs on both sides.
            texts, labels = train if number % 5 else test
            for text in paragraphs(file):
                # Copies count once; a few words, or a table of numbers, do not tell anything.
                if text not in seen and len(re.findall("[a-z]{2,}", text)) >= 8:
                    seen.add(text)
                    texts.append(text)
                    labels.append(label)
    return (train[0], np.array(train[1])), (test[0], np.array(test[1]))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=128, help="of one rank, default: 128")
    parser.add_argument("--learning-rate", type=float, default=0.001, help="of one rank alone")
    parser.add_argument("--checkpoint", default="checkpoints/text_embedding.keras")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def check_same_texts(texts):
    """End the run if the ranks read different texts: a word's number must mean the same to all."""
    fingerprint = zlib.crc32("".join(texts).encode())
    total = hvd.allreduce(tf.constant(fingerprint, tf.int64), op=hvd.Sum, name="fingerprint")
    if int(total) != fingerprint * hvd.size():
        sys.exit(
            "The ranks read different texts: all hosts need the same versions of "
            + ", ".join(LIBRARIES)
        )


def build_model():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([WORDS], dtype="int32"),
            layers.Embedding(VOCABULARY, 32, mask_zero=True),
            layers.GlobalAveragePooling1D(),
            layers.Dropout(0.5),
            layers.Dense(32, activation="relu"),
            layers.Dense(len(LIBRARIES), activation="softmax"),
        ]
    )


class Stopwatch(keras.callbacks.Callback):
    """Take the time of each epoch, from its first to its last training step."""

    def on_train_begin(self, logs=None):
        self.seconds = []

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 0:
            self.started = time.perf_counter()

    def on_test_begin(self, logs=None):
        self.seconds.append(time.perf_counter() - self.started)


def main():
    args = parse_arguments()

    # hvd 1: start. Each process is one rank; if there are GPUs, it uses one of them.
    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")

    keras.utils.set_random_seed(args.seed)
    (texts, y), (test_texts, y_test) = load_texts()
    check_same_texts(texts + test_texts)

    # The vocabulary is made of all ranks' texts, before they are shared out: it must be the same.
    vectorize = keras.layers.TextVectorization(VOCABULARY, output_sequence_length=WORDS)
    vectorize.adapt(texts)
    x, x_test = np.asarray(vectorize(texts)), np.asarray(vectorize(test_texts))

    # hvd 2: each rank trains on its own share, every hvd.size()-th sample. All shares are equally
    # long, so all ranks make the same number of steps; the few samples that remain are left out.
    share = len(x) // hvd.size()
    mine = slice(hvd.rank(), share * hvd.size(), hvd.size())

    # hvd 3: average the gradients of all ranks. The batch is hvd.size() times as large as that of
    # one rank, so the learning rate grows with it.
    learning_rate = args.learning_rate * hvd.size()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(learning_rate))

    model = build_model()
    model.compile(optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])

    stopwatch = Stopwatch()
    callbacks = [
        # hvd 4: all ranks start from rank 0's weights, log the metrics over all ranks' samples,
        # reach the large learning rate gradually, and leave the writing of the model to rank 0.
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=learning_rate, warmup_epochs=3),
        hvd.callbacks.ModelCheckpoint(args.checkpoint),
        stopwatch,
    ]

    is_first = hvd.rank() == 0  # it alone talks
    if is_first:
        device = "GPU" if gpus else "CPU"
        print(f"Ranks: {hvd.size()} on {device}, {share} samples each, {args.batch_size} a step")
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
        seconds = stopwatch.seconds[1:]  # the first epoch compiles
        if seconds:
            rate = share * hvd.size() * len(seconds) / sum(seconds)
            print(f"Rate: {rate:.0f} samples/s over all ranks, from the second epoch on")
        accuracy = model.evaluate(x_test, y_test, verbose=0)[1]
        baseline = np.bincount(y_test).max() / len(y_test)
        print(f"Test accuracy: {accuracy:.4f}, saved {args.checkpoint}")
        print(f"Always answering the largest class: {baseline:.4f}")


if __name__ == "__main__":
    main()
