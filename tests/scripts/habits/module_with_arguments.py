"""A program with a main and argparse, started with python -m.

expect: equal
run: module
args: --epochs 2 --units 8 --output model.keras
"""

import argparse
import logging
import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

logger = logging.getLogger(__name__)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--units", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together")
    parser.add_argument("--output", required=True)
    return parser.parse_args()


def load_data():
    random = np.random.default_rng(0)
    x = random.normal(size=(256, 6)).astype("float32")
    return x, np.argmax(x[:, :3], axis=1)


def build_model(units):
    return keras.Sequential([layers.Dense(units, activation="relu"), layers.Dense(3)])


def main():
    args = parse_args()
    hvd.init()
    logging.basicConfig(level=logging.INFO if hvd.rank() == 0 else logging.ERROR)
    keras.utils.set_random_seed(hvd.rank())
    x, y = load_data()
    model = build_model(args.units)
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(
        hvd.data.shard((x, y), batch_size=args.batch_size // hvd.size()),
        epochs=args.epochs,
        shuffle=False,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
        verbose=2 if hvd.rank() == 0 else 0,
    )
    if hvd.rank() == 0:
        model.save(args.output)
        logger.info("saved %s", args.output)
    np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())


if __name__ == "__main__":
    main()
