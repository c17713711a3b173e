"""Train a recommender whose tables are divided between the processes, on made-up clicks.

    hvdrun -np 2 python examples/dlrm.py

The data has the shape of Criteo's: 13 numbers and 26 categories per click, whose ids follow a power
law. The model is DLRM (Naumov et al., 2019, https://arxiv.org/abs/1906.00091): each category looks
up a row of a table, and the dot products of all pairs of rows are the features. Each process holds
a part of the large tables; hvd_keras sends ids to the process that holds their rows, and the rows
back, in one exchange for all tables. AUC and loss are those of all processes' samples.
"""

import argparse
import os

# Must be set before TensorFlow is imported, which logs an error on machines without GPUs. Other
# errors reach Python as exceptions anyway.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hvd_keras as hvd
import keras
import numpy as np

NUMBERS, CATEGORIES = 13, 26
# How large the tables are, compared with the largest.
SIZES = [1, 0.3, 0.1, 0.03, 0.01, 0.001]


def vocabularies(largest):
    return {
        f"category {i}": max(4, int(largest * SIZES[i % len(SIZES)])) for i in range(CATEGORIES)
    }


def make_clicks(count, sizes, seed):
    """Return ({input: values}, clicks); whether one clicks depends on numbers and frequent ids."""
    random = np.random.default_rng(seed)
    numbers = random.normal(size=(count, NUMBERS)).astype("float32")
    inputs, score = {"numbers": numbers}, numbers[:, :3].sum(axis=1)
    for i, (name, size) in enumerate(sizes.items()):
        ids = np.minimum(random.zipf(1.3, count), size) - 1
        inputs[name] = ids.astype("int64")[:, np.newaxis]
        taste = np.random.default_rng(i).normal(size=64)  # the same in training and test data
        score += taste[ids % 64] * (i % 3 == 0)
    clicks = random.random(count) < 1 / (1 + np.exp(-score))
    return inputs, clicks.astype("float32")[:, np.newaxis]


def build_model(sizes, width):
    layers = keras.layers
    numbers = keras.Input([NUMBERS], name="numbers")
    ids = {name: keras.Input([1], dtype="int64", name=name) for name in sizes}
    # hvd: instead of one keras.layers.Embedding for each category.
    lookup = hvd.layers.Embeddings(
        {name: hvd.layers.Embedding(size, width) for name, size in sizes.items()}, name="tables"
    )
    rows = lookup(ids)
    dense = layers.Dense(width, activation="relu")(layers.Dense(64, activation="relu")(numbers))
    every = layers.Concatenate(axis=1)([layers.Reshape([1, width])(dense), *rows.values()])
    pairs = layers.Flatten()(layers.Dot(axes=2)([every, every]))
    hidden = layers.Dense(64, activation="relu")(layers.Concatenate()([dense, pairs]))
    output = layers.Dense(1, activation="sigmoid")(hidden)
    return keras.Model({"numbers": numbers, **ids}, output), lookup


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=100_000, help="of all ranks")
    parser.add_argument("--batch-size", type=int, default=512, help="per rank, default: 512")
    parser.add_argument("--largest", type=int, default=200_000, help="rows of the largest tables")
    parser.add_argument("--width", type=int, default=16, help="columns of the tables")
    parser.add_argument("--save", default="checkpoints/dlrm.keras")
    return parser.parse_args()


def main():
    args = parse_arguments()
    hvd.init()
    keras.utils.set_random_seed(0)
    sizes = vocabularies(args.largest)
    model, lookup = build_model(sizes, args.width)
    if hvd.rank() == 0:
        print(lookup.plan())
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adagrad(0.02 * hvd.size()))
    model.compile(optimizer, loss="binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    clicks = make_clicks(args.samples, sizes, seed=1)
    data = hvd.data.shard(clicks, batch_size=args.batch_size)
    # All ranks evaluate equally many batches, because each lookup needs all of them.
    test = hvd.data.shard(
        make_clicks(args.samples // 10, sizes, seed=2), batch_size=args.batch_size, shuffle=False
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.ProgressLogger(),
    ]
    history = model.fit(
        data, epochs=args.epochs, validation_data=test, callbacks=callbacks, shuffle=False
    )
    hvd.save_model(model, args.save)
    if hvd.rank() == 0:
        print(f"Test AUC: {history.history['val_auc'][-1]:.4f}, saved {args.save}")


if __name__ == "__main__":
    main()
