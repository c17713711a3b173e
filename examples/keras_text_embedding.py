"""Train a text classifier with an embedding, whose gradients are sparse, on several processes.

    hvdrun -np 2 python examples/keras_text_embedding.py

The model predicts from which library a paragraph of documentation comes. The texts are docstrings
of Python and of packages that hvd_keras itself needs, so nothing is downloaded.

The gradient of an embedding is a tf.IndexedSlices: rows for the words of the batch, none for the
rest of the vocabulary. Since each rank sees different words, hvd_keras gathers the rows of all
ranks instead of summing whole tables. The script needs no special code for this.
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

# Must be set before TensorFlow is imported, which logs an error on machines without GPUs. Other
# errors reach Python as exceptions anyway.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hvd_keras as hvd
import keras
import numpy as np
import tensorflow as tf

LIBRARIES = ("python", "numpy", "keras", "tensorflow")
WORDS = 40  # words per paragraph; longer ones are truncated
VOCABULARY = 20_000


def source_files(library):
    if library == "python":
        folder = Path(sysconfig.get_paths()["stdlib"])
    else:
        folder = Path(importlib.util.find_spec(library).origin).parent
    if library == "tensorflow":  # this part is as large as the other libraries
        folder = folder / "python" / "ops"
    others = {"site-packages", "dist-packages", "test", "tests"}
    # Sorted, because the order of a directory listing differs between hosts.
    return [
        file
        for file in sorted(folder.rglob("*.py"))
        if others.isdisjoint(file.relative_to(folder).parts)
    ]


def paragraphs(file):
    source = file.read_text("utf-8", "replace")
    # Text in triple quotes is nearly always a docstring; this is much faster than parsing the file.
    for text in re.findall(r'"""(.+?)"""', source, re.DOTALL):
        yield from re.split(r"\n\s*\n", text)


def load_texts():
    """Return (texts, labels) for training and for testing, the same on all ranks."""
    train, test = ([], []), ([], [])
    seen = set()
    for label, library in enumerate(LIBRARIES):
        for number, file in enumerate(source_files(library)):
            # Split by file, so that no docstring has paragraphs in both sets.
            texts, labels = train if number % 5 else test
            for text in paragraphs(file):
                # Skip copies, and texts with too few words.
                if text not in seen and len(re.findall("[a-z]{2,}", text)) >= 8:
                    seen.add(text)
                    texts.append(text)
                    labels.append(label)
    return (train[0], np.array(train[1])), (test[0], np.array(test[1]))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=128, help="per rank, default: 128")
    parser.add_argument("--learning-rate", type=float, default=0.001, help="for one rank")
    parser.add_argument("--checkpoint", default="checkpoints/text_embedding.keras")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def check_same_texts(texts):
    """Exit if the ranks read different texts: a word must have the same number on all ranks."""
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
    (texts, y), (test_texts, y_test) = load_texts()
    check_same_texts(texts + test_texts)

    # The vocabulary must be the same on all ranks, so it is made before the texts are sharded.
    vectorize = keras.layers.TextVectorization(VOCABULARY, output_sequence_length=WORDS)
    vectorize.adapt(texts)
    x, x_test = np.asarray(vectorize(texts)), np.asarray(vectorize(test_texts))

    # hvd 2: each rank trains on its own share, every hvd.size()-th sample. All shares have the same
    # length, so all ranks make the same number of steps; the few remaining samples are left out.
    share = len(x) // hvd.size()
    mine = slice(hvd.rank(), share * hvd.size(), hvd.size())

    # hvd 3: average the gradients of all ranks. The total batch is hvd.size() times that of one
    # rank, and the learning rate grows with it.
    learning_rate = args.learning_rate * hvd.size()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(learning_rate))

    model = build_model()
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
        device = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
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
        seconds = stopwatch.seconds[1:]  # the first epoch includes tracing
        if seconds:
            rate = share * hvd.size() * len(seconds) / sum(seconds)
            print(f"Rate: {rate:.0f} samples/s over all ranks, from the second epoch on")
        accuracy = model.evaluate(x_test, y_test, verbose=0)[1]
        baseline = np.bincount(y_test).max() / len(y_test)
        print(f"Test accuracy: {accuracy:.4f}, saved {args.checkpoint}")
        print(f"Always answering the largest class: {baseline:.4f}")


if __name__ == "__main__":
    main()
