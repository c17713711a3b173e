"""Trains small models in several ways and keeps their weights: the same on any number of ranks.

python training.py FOLDER
"""

import json
import pathlib
import sys

import keras
import numpy as np
import torch
from torch.utils.data import DataLoader as Loader
from torch.utils.data import TensorDataset, WeightedRandomSampler, get_worker_info

import hvd_keras as hvd

hvd.init()
rng = np.random.default_rng(0)
X = rng.normal(size=(198, 6)).astype("float32")
Y = (X[:, :2].sum(1, keepdims=True) > 0).astype("float32")
IDS = rng.integers(0, 5, (198, 7)) * (np.arange(7) < rng.integers(1, 8, (198, 1)))
TAGS = rng.normal(size=(198, 7, 1)).astype("float32")


def dense(units, **options):
    # Other initial values on each rank, which the broadcast replaces.
    start = keras.initializers.GlorotUniform(seed=7 + hvd.rank())
    return keras.layers.Dense(units, kernel_initializer=start, **options)


def perceptron(*between):
    return keras.Sequential(
        [keras.Input([6]), dense(8, activation="tanh"), *between, dense(1, activation="sigmoid")]
    )


class OwnStep(keras.Model):
    """A train_step that does what Keras's does, by torch."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        loss.backward()
        weights = self.trainable_weights
        self.optimizer.apply([v.value.grad for v in weights], weights)
        return {"loss": loss.detach()}


def own_step():
    model = perceptron()
    return OwnStep(model.inputs, model.outputs)


class Branches(keras.Model):
    """Its second layer is used on rank 0 alone, or on no rank."""

    def __init__(self, on_rank):
        super().__init__()
        self.first, self.second, self.on_rank = dense(1), dense(1), on_rank

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)
        self.built = True

    def call(self, x):
        y = self.first(x)
        return y + 0 * self.second(x) if self.on_rank(hvd.rank()) else y


def masked():
    table = keras.initializers.RandomNormal(seed=3 + hvd.rank())
    layer = keras.layers.Embedding(5, 4, mask_zero=True, embeddings_initializer=table)
    return keras.Sequential([keras.Input([7], dtype="int32"), layer, dense(1)])


optimizers, losses = keras.optimizers, keras.losses
ROWS, SEQUENCES = (X, Y), (IDS, TAGS)
CASES = {
    "sgd": (perceptron, lambda: optimizers.SGD(0.1, momentum=0.9), "mse", ROWS, {}),
    "adam": (perceptron, lambda: optimizers.Adam(0.01), "binary_crossentropy", ROWS, {}),
    "passes": (
        *(perceptron, lambda: optimizers.SGD(0.1), "mse", ROWS),
        {"backward_passes_per_step": 2},
    ),
    "own step": (own_step, lambda: optimizers.Adam(0.01), "mse", ROWS, {}),
    "branch": (
        lambda: Branches(lambda rank: rank == 0),
        *(lambda: optimizers.Adam(0.01), "mse", ROWS, {}),
    ),
    "no branch": (
        lambda: Branches(lambda rank: False),
        *(lambda: optimizers.SGD(0.1, weight_decay=0.1), "mse", ROWS, {}),
    ),
    "sum": (perceptron, lambda: optimizers.SGD(1e-3), losses.MeanSquaredError("sum"), ROWS, {}),
    "circle": (perceptron, lambda: optimizers.SGD(0.1), losses.Circle(gamma=2.0), ROWS, {}),
    "masked sgd": (masked, lambda: optimizers.SGD(0.1), "mae", SEQUENCES, {}),
    "bfloat16": (
        lambda: perceptron(dense(8, dtype="mixed_bfloat16")),
        *(lambda: optimizers.Adam(0.01), "mse", ROWS, {}),
    ),
    "float16": (
        lambda: perceptron(dense(8, dtype="mixed_float16")),
        lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=2.0**10),
        *("mse", ROWS, {}),
    ),
    "batch norm": (
        lambda: perceptron(keras.layers.BatchNormalization()),
        *(lambda: optimizers.SGD(0.1), "mse", ROWS, {}),
    ),
    "dropout": (
        lambda: perceptron(keras.layers.Dropout(0.5, seed=1)),
        *(lambda: optimizers.SGD(0.1), "mse", ROWS, {}),
    ),
}


def loader(rows, **options):
    options = {"shuffle": True, **options} if "sampler" not in options else options
    return Loader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), rows, **options)


def weighted(rows):
    weights, random = np.linspace(1, 3, len(X)), torch.Generator()
    return loader(rows, sampler=WeightedRandomSampler(weights, 150, generator=random))


def find_dataset(worker):
    assert len(get_worker_info().dataset.tensors) == 2  # as without hvd.data.shard


# What hvd.data.shard gets, by rows per rank and step.
SOURCES = {
    "loader": (loader, {}),
    "workers": (
        lambda rows: loader(rows, num_workers=1, drop_last=True, worker_init_fn=find_dataset),
        {},
    ),
    "sampler": (weighted, {"seed": 5}),
    "dataset": (lambda rows: loader(rows).dataset, {"batch_size": ...}),
}
CASES |= dict.fromkeys(SOURCES, CASES["adam"])
CASES |= {f"{name} by batch": CASES[name] for name in ("sum", "masked sgd")}


def train(name):
    make, optimizer, loss, data, options = CASES[name]
    model = make()
    kind = keras.metrics.AUC(name="auc") if data is ROWS else "mae"
    model.compile(hvd.DistributedOptimizer(optimizer(), **options), loss, metrics=[kind])
    if name.endswith("by batch"):
        hvd.broadcast_variables(model.weights, root_rank=0)
        for start in range(0, 192, 48):
            mine = slice(start + hvd.rank(), start + 48, hvd.size())
            model.train_on_batch(*(part[mine] for part in data))
        return [np.array(v.numpy(), "float64") for v in model.weights], {}
    batch = 48 // hvd.size()  # of 198 rows: the last step has 6
    source, how = SOURCES.get(name, (lambda rows: data, {"batch_size": ...}))
    how = {key: batch if value is ... else value for key, value in how.items()}
    sharded = hvd.data.shard(source(batch), **how)
    held_out = tuple(part[:96] for part in data)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        keras.callbacks.EarlyStopping("loss", patience=9),
    ]
    history = model.fit(
        sharded,
        validation_data=hvd.data.shard(held_out, batch_size=batch, shuffle=False),
        epochs=3,
        callbacks=callbacks,
        verbose=0,
    )
    weights = [np.array(v.numpy(), "float64") for v in model.weights]
    return weights, {k: [float(v) for v in values] for k, values in history.history.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = pathlib.Path(sys.argv[1])
    logs = {}
    for case in CASES:
        weights, logs[case] = train(case)
        np.savez(folder / f"{case} {hvd.rank()} of {hvd.size()}.npz", *weights)
    (folder / f"logs {hvd.rank()} of {hvd.size()}.json").write_text(json.dumps(logs))
    assert not any(name.partition(".")[0] == "tensorflow" for name in sys.modules)
