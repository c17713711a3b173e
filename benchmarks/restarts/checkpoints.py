"""What a step costs in which a checkpoint is saved: Checkpoint, Orbax's and Keras's callback.

    pip install orbax-checkpoint
    hvdrun -np 2 benchmarks/restarts/checkpoints.py

Adam trains a convolutional network of 27 million weights (325 MB with their moments). The callbacks
take turns within one run, and each saves in every 10th step. Printed are medians, as multiples of a
step without checkpoints: of the step that saves, of the next one, in which the file may be written,
of the eight steps after these, and of what all ten take longer. Orbax's and Keras's callback save
on rank 0 alone.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import keras
import numpy as np

import hvd_keras as hvd

EVERY = 10  # steps


class Times(keras.callbacks.Callback):
    """Measures steps from the end of one to the end of the next, with all callbacks."""

    def __init__(self):
        super().__init__()
        self.seconds = []
        self._last = None

    def on_train_batch_end(self, batch, logs=None):
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now


def build():
    """Three convolutions of 32 pixels by 32, and a wide layer."""
    layers = [keras.Input((32, 32, 3))]
    for filters in (64, 96, 128):
        layers.append(keras.layers.Conv2D(filters, 3, padding="same", activation="relu"))
    layers += [keras.layers.MaxPooling2D(2), keras.layers.Flatten()]
    layers += [keras.layers.Dense(820, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), loss="mse")
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="(default: %(default)s)")
    options = parser.parse_args()
    hvd.init()
    model, steps = build(), 3 * EVERY
    x = np.random.default_rng(hvd.rank()).normal(size=(options.batch_size, 32, 32, 3))
    y = x[:, 0, :10, 0]
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(hvd.broadcast_object(name, 0))
        ways = {
            "none": list,
            "hvd.callbacks.Checkpoint": lambda: [
                hvd.callbacks.Checkpoint(folder / "own", save_freq=EVERY, restore=False)
            ],
            "keras.callbacks.OrbaxCheckpoint": lambda: [
                keras.callbacks.OrbaxCheckpoint(str(folder / "orbax"), save_freq=EVERY)
            ],
            "keras.callbacks.ModelCheckpoint": lambda: [
                keras.callbacks.ModelCheckpoint(str(folder / "model.keras"), save_freq=EVERY)
            ],
        }
        for number in range(options.rounds + 1):
            for way, make in ways.items():
                times = Times()
                callbacks = [broadcast, *make(), times]
                data = (np.broadcast_to(part, (steps, *part.shape)) for part in (x, y))
                x_of_all, y_of_all = (part.reshape(-1, *part.shape[2:]) for part in data)
                model.fit(
                    x_of_all,
                    y_of_all,
                    batch_size=len(x),
                    verbose=0,
                    shuffle=False,
                    callbacks=callbacks,
                )
                if number:  # the first round warms up
                    found.setdefault(way, []).append(times.seconds)
    if hvd.rank() == 0:
        base = statistics.median(s for seconds in found["none"] for s in seconds)
        print(f"A step without checkpoints takes {base:.2f} s.\n")
        print("| saved by | save | next | afterwards | longer in all |\n|---|---|---|---|---|")
        for way, rounds in found.items():
            # Times begin with the second step.
            starts = (EVERY - 2, 2 * EVERY - 2)
            tens = [s[start : start + EVERY] for s in rounds for start in starts]
            parts = [ten[:1] for ten in tens], [ten[1:2] for ten in tens], [ten[2:] for ten in tens]
            columns = [statistics.median(itertools.chain(*part)) / base for part in parts]
            columns.append(statistics.median(map(sum, tens)) / base - EVERY)
            print(f"| {way} | {' | '.join(f'{c:.2f}' for c in columns)} |", flush=True)


if __name__ == "__main__":
    main()
