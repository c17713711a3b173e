"""Features in combination: N ranks train as one process does, or an error says why not.

Each pair of values of two features occurs in some row of a table; docs/tables/combinations.md is
written from it.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd

RANK, SIZE = hvd.rank(), hvd.size()
pytestmark = pytest.mark.ranks(3)
BATCH, STEPS, EPOCHS = 4, 4, 2

# The first value of each feature is the ordinary one.
FEATURES = {
    "ranks": ("all", "a set"),
    "layers": ("shared", "one local"),
    "callbacks": ("one", "many"),
    "accumulation": ("no", "2 steps"),
    "optimizer": ("SGD", "MultiOptimizer"),
    "precision": ("float32", "loss scale"),
    "model": ("built", "unbuilt"),
    "compiled": ("graph", "jit", "eager"),
    "interrupted": ("no", "yes"),
}

# This pair is an error; docs/tables/combinations.md explains why.
REFUSED = (("accumulation", "2 steps"), ("optimizer", "MultiOptimizer"))


def pairwise() -> list[dict[str, str]]:
    """Greedily chooses few rows in which each pair of values of two features occurs."""
    names = list(FEATURES)
    wanted = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in FEATURES[a]
        for y in FEATURES[b]
    }
    refused = dict(REFUSED)
    candidates = [
        row
        for values in itertools.product(*FEATURES.values())
        if not refused.items() <= (row := dict(zip(names, values, strict=True))).items()
    ]

    def covered(row):
        return set(itertools.combinations(row.items(), 2))

    rows = [candidates[0]]
    wanted -= covered(rows[0]) | {REFUSED}
    while wanted:
        rows.append(max(candidates, key=lambda row: len(covered(row) & wanted)))
        wanted -= covered(rows[-1])
    return [*rows, {**rows[0], **refused}]


ROWS = pairwise()


class Net(keras.Model):
    """A model with one local layer per column of ``who``, which says whose each row is."""

    def __init__(self, local: int) -> None:
        super().__init__()
        self.first = keras.layers.Dense(6, activation="tanh", name="first")
        self.second = keras.layers.Dense(1, name="second")
        self.local = [keras.layers.Dense(1, name=f"local{i}") for i in range(local)]

    def call(self, inputs):
        x, who = inputs["x"], inputs["who"]
        y = self.second(self.first(x))
        for i, layer in enumerate(self.local):
            y += tf.cast(who[:, i : i + 1], y.dtype) * layer(x)
        return y


def optimizer_of(row):
    if row["optimizer"] == "SGD":
        return keras.optimizers.SGD(0.05, momentum=0.9)
    parts = keras.optimizers.SGD(0.05, momentum=0.9), keras.optimizers.SGD(0.02)
    return keras.optimizers.MultiOptimizer(lambda v: parts["second" in v.path])


def compiled(model, optimizer, row):
    if row["precision"] == "loss scale":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
    model.compile(
        optimizer=optimizer,
        loss="mse",
        jit_compile=row["compiled"] == "jit",
        run_eagerly=row["compiled"] == "eager",
    )


def set_weights(model, seed):
    """Sets the shared layers by a seed; local layers by their number."""
    random = np.random.default_rng(seed)
    for layer in (model.first, model.second):
        layer.set_weights([random.normal(size=w.shape, scale=0.4) for w in layer.get_weights()])


def weights(model):
    """Returns the weights of the layers that all ranks share."""
    return [*model.first.get_weights(), *model.second.get_weights()]


class Interrupt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None) -> None:
        if epoch == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda i: ", ".join(ROWS[i].values()))
def test_features_in_combination(number, directory) -> None:
    row = ROWS[number]
    if row["ranks"] == "a set" and SIZE < 3:
        pytest.skip("a process set beside another rank needs 3 ranks")
    members = list(range(SIZE)) if row["ranks"] == "all" else [0, *range(2, SIZE)]
    chosen = hvd.global_process_set
    if row["ranks"] == "a set":
        chosen = hvd.add_process_set(members)
    if chosen.included():
        train_and_compare(row, chosen, directory)
    hvd.barrier()
    if row["ranks"] == "a set":
        hvd.remove_process_set(chosen)


def train_and_compare(row, chosen, directory) -> None:
    size, rank, root = chosen.size(), chosen.rank(), chosen.ranks[-1]
    local = row["layers"] == "one local"
    passes = 2 if row["accumulation"] == "2 steps" else 1
    rows = size * BATCH * STEPS
    random = np.random.default_rng(1)
    x = random.normal(size=(rows, 3)).astype("float32")
    y = random.normal(size=(rows, 1)).astype("float32")
    owner = np.arange(rows) // BATCH % size  # step by step, BATCH rows for each rank
    example = {"x": x[:1], "who": np.ones((1, 1), "float32")}

    def make_model():
        keras.utils.set_random_seed(100 + rank)  # what is unbuilt gets other weights on each rank
        model = Net(1 if local else 0)
        # The optimizer must know the local variables, so the local layer is always built.
        for layer in model.local:
            layer.build((None, 3))
            layer.set_weights([np.full((3, 1), 0.1 * (rank + 1)), np.full(1, rank)])
        if row["model"] == "built":
            model(example)
            set_weights(model, seed=rank)
        inner = hvd.PartialDistributedOptimizer(
            optimizer_of(row),
            local_layers=model.local,
            backward_passes_per_step=passes,
            average_aggregated_gradients=True,
            process_set=chosen,
        )
        compiled(model, inner, row)
        return model

    if dict(REFUSED).items() <= row.items():
        with pytest.raises(ValueError, match="Set gradient_accumulation_steps when you make the"):
            make_model()
        return
    begin: list[np.ndarray] = []  # of the shared layers, before the first step

    def fit(model, *more):
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(root),
            keras.callbacks.LambdaCallback(
                on_train_begin=lambda logs: begin.extend([] if begin else weights(model))
            ),
        ]
        if row["callbacks"] == "many":
            callbacks += [
                hvd.callbacks.MetricAverageCallback(),
                keras.callbacks.EarlyStopping("loss", patience=9),
                keras.callbacks.TerminateOnNaN(),
                keras.callbacks.CSVLogger(directory / f"{RANK}.csv"),
                keras.callbacks.ModelCheckpoint(
                    directory / "best.weights.h5", save_weights_only=True
                ),
            ]
        mine = {"x": x[owner == rank], "who": np.ones((rows // size, 1), "float32")}
        model.fit(
            mine,
            y[owner == rank],
            batch_size=BATCH,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            callbacks=[*callbacks, *more],
        )

    model = make_model()
    if row["interrupted"] == "yes":
        state = directory / "state"
        saved = hvd.callbacks.Checkpoint(state, process_set=chosen)
        with pytest.raises(KeyboardInterrupt):
            fit(model, saved, Interrupt())
        model = make_model()
        fit(model, hvd.callbacks.Checkpoint(state, process_set=chosen))
    else:
        fit(model)

    shared = weights(model)
    flat = np.concatenate([w.ravel() for w in shared])[np.newaxis]
    everyone = hvd.allgather(flat, process_set=chosen).numpy()
    assert (everyone == everyone[0]).all(), "the ranks differ"
    own = [np.concatenate([w.ravel() for w in layer.get_weights()]) for layer in model.local]
    locals_ = hvd.allgather(np.array(own).reshape(len(own), 4), process_set=chosen).numpy()
    if row["callbacks"] == "many":
        files = sorted(p.name for p in directory.glob("*.csv"))
        assert files == [f"{chosen.ranks[0]}.csv"]

    with hvd.local_fit():
        alone = Net(size if local else 0)
        alone({"x": x[:1], "who": np.ones((1, size), "float32")})
        alone.first.set_weights(begin[:2])
        alone.second.set_weights(begin[2:])
        for i, layer in enumerate(alone.local):
            layer.set_weights([np.full((3, 1), 0.1 * (i + 1)), np.full(1, i)])
        optimizer = optimizer_of(row)
        if passes == 2:
            optimizer.gradient_accumulation_steps = passes
        compiled(alone, optimizer, {**row, "compiled": "graph"})
        who = np.eye(size, dtype="float32")[owner]
        batches = {"batch_size": size * BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
        alone.fit({"x": x, "who": who}, y, **batches)
    expected = weights(alone)
    moved = max(np.abs(w - v).max() for w, v in zip(expected, begin, strict=True))
    assert moved > 1e-2, "training did nothing"
    for mine, theirs in zip(shared, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    for mine, layer in zip(locals_, alone.local, strict=False):
        theirs = np.concatenate([w.ravel() for w in layer.get_weights()])
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
