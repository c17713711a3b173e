"""Time and bytes until a model is good, on three hosts joined by a slow network.

    python benchmarks/slow_network.py             # a table
    python benchmarks/slow_network.py --seeds 1   # quicker

The hosts are namespaces of this machine (tests/harness/hosts.py; needs root), each sends at most
20 Mbit/s, and an answer takes 50 ms. Ranks that average gradients in each step need hours for that,
so their steps are counted without the limit, which changes no bit, and the time of a step is
measured with it. With rounds everything is measured with it: of the whole model (DiLoCo), and of
fragments (streaming DiLoCo). The model is tested after each second round, when weights are common.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HOSTS, MEGABITS, DELAY = 3, 20, 0.025  # seconds, of each direction
BATCH, CHUNK = 8, 50  # rows of a rank; steps between tests, or between two fragments
LIMIT = 900  # seconds for a job

# Until which accuracy or loss; the most steps; the learning rates of a rank, and of all together.
TASKS = {
    "convnet on digits": {"metric": "accuracy", "goal": 0.98, "steps": 1500, "rates": [1e-3, 2e-3]},
    "language model": {"metric": "loss", "goal": 2.1, "steps": 4000, "rates": [1e-3, 2e-3]},
}
EVERY = 250
# The updates of a round, 0: without rounds; fragments; which learning rate.
KINDS = {"each": (0, 1, 1), "rounds": (EVERY, 1, 0), "fragments": (EVERY, EVERY // CHUNK, 0)}


def digits(keras: Any, np: Any) -> tuple[Any, Any, Any]:
    """8x8 images of scikit-learn: 1437 to train on, 360 to test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images = images[order].reshape(-1, 8, 8, 1).astype("float32") / 16
    labels = labels[order].astype("int32")
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(256, activation="relu"),
            layers.Dense(10),
        ]
    )
    return model, (images[:-360], labels[:-360]), (images[-360:], labels[-360:])


def language(keras: Any, np: Any) -> tuple[Any, Any, Any]:
    """The next character of Python's help texts after 24 (Bengio et al., 2003, JMLR 3)."""
    from pydoc_data.topics import topics

    text = np.frombuffer("".join(topics[key] for key in sorted(topics)).encode(), np.uint8)
    known, codes = np.unique(text, return_inverse=True)
    rows = np.lib.stride_tricks.sliding_window_view(codes.astype("int32"), 25)
    last = len(rows) * 9 // 10
    layers = keras.layers
    characters = keras.Input((24,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(len(known), 16)(characters))
    x = layers.Dense(256, activation="relu")(x)
    for _ in range(3):
        x += layers.Dense(256, activation="relu")(x)
    model = keras.Model(characters, layers.Dense(len(known))(x))
    train, test = rows[:last:3], rows[last:][:: (len(rows) - last) // 4000]
    return model, (train[:, :-1], train[:, -1]), (test[:, :-1], test[:, -1])


def rank(task: str, kind: str, steps: int, seed: int) -> None:
    """Train on one rank; rank 0 prints after how many steps, seconds and bytes the goal is met."""
    (every, fragments, which), how = KINDS[kind], TASKS[task]
    goal = how["goal"]
    import keras
    import numpy as np

    import hvd_keras as hvd

    hvd.init()
    keras.utils.set_random_seed(seed)
    model, train, test = (digits if "digits" in task else language)(keras, np)
    optimizer: Any = keras.optimizers.Adam(how["rates"][which])
    outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    options = {"sync_every": every, "outer_optimizer": outer, "fragments": fragments}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        hvd.DistributedOptimizer(optimizer, **(options if every else {})),
        loss,
        metrics=["accuracy"],
        steps_per_execution=5,
    )

    def sent() -> int:
        return sum(kind["bytes"] for kind in hvd.stats()["collectives"].values())

    class Watch(keras.callbacks.Callback):
        """Counts without the first steps, which are compiled, and without evaluations."""

        def __init__(self) -> None:
            super().__init__()
            self.steps, self.seconds, self.since, self.bytes = 0, 0.0, None, 0
            self.most, self.last = 0, 0  # bytes of CHUNK steps of an epoch, which do not end it
            self.curve: list[Any] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.last = sent()

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.since = self.since and time.perf_counter()
            self.before = sent()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 5
            self.bytes += sent() - self.before
            if (batch + 1) % CHUNK == 0:
                if batch + 1 < chunk:
                    self.most = max(self.most, sent() - self.last)
                self.last = sent()
            if self.since is not None:
                self.seconds += time.perf_counter() - self.since
            self.since = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            value = dict(
                zip(("loss", "accuracy"), model.evaluate(*test, 500, verbose=0), strict=True)
            )
            self.curve.append(
                [self.steps, self.seconds, self.bytes, self.most, value["loss"], value["accuracy"]]
            )
            reached = value["accuracy"] >= goal if goal < 1 else value["loss"] <= goal
            model.stop_training |= reached

    watch = Watch()
    chunk = 2 * every or CHUNK
    data = hvd.data.shard(train, batch_size=BATCH, seed=seed).repeat()
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), watch]
    epochs = max(1, steps // chunk)
    model.fit(data, steps_per_epoch=chunk, epochs=epochs, verbose=0, callbacks=callbacks)
    if hvd.rank() == 0:
        print(json.dumps({"curve": watch.curve, "parameters": model.count_params()}), flush=True)


def job(hosts: Any, *options: object) -> dict[str, Any]:
    """Run a job of one rank on each host, and return what rank 0 prints."""
    command = [sys.executable, "-m", "hvd_keras.hvdrun", "-np", HOSTS, "--no-prefix"]
    command += ["-H", ",".join(f"{host.name}:1" for host in hosts), sys.executable, __file__]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
    done = hosts[0].run([*map(str, [*command, "--rank", *options])], LIMIT, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{options} failed:\n{done.stdout}{done.stderr}")
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def measure(hosts: Any, task: str, seed: int) -> dict[str, Any]:
    """Train one task in each way; return steps, seconds, bytes, and the last loss and accuracy."""
    found: dict[str, Any] = {"task": task, "seed": seed}
    for kind in KINDS:
        hosts.throttle(*((None,) if kind == "each" else (MEGABITS, DELAY)))
        found[kind] = job(hosts, task, kind, TASKS[task]["steps"], seed)["curve"][-1]
    *_, slow = job(hosts, task, "each", CHUNK, seed)["curve"]
    found["each"][1] = slow[1] / (slow[0] - 5) * found["each"][0]
    found["each"][3] = found["each"][2] / found["each"][0] * CHUNK
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        task, kind, *numbers = options.rank
        rank(task, kind, *map(int, numbers))
        return
    sys.path.insert(0, str(HERE.parent))
    from tests.harness.hosts import Hosts, missing

    if problem := missing():
        raise SystemExit(problem)
    found = []
    with Hosts(HOSTS) as hosts:
        for seed in range(options.seeds):
            for task in TASKS:
                found.append(measure(hosts, task, seed))
                print(json.dumps(found[-1]), flush=True)
    print("| until | gradients in each step | rounds | fragments | over |\n|---|---|---|---|---|")
    for task, how in TASKS.items():
        own = [one for one in found if one["task"] == task]
        for i, unit in enumerate(("steps", "seconds", "MB", f"MB in {CHUNK} steps")):
            scale = 1e6 if unit.startswith("MB") else 1
            sides = [[one[kind][i] / scale for one in own] for kind in KINDS]
            middle = " | ".join(f"{statistics.median(side):.4g}" for side in sides)
            over = ", ".join(
                f"{statistics.median(a / b for a, b in zip(sides[0], side, strict=True)):.3g}"
                for side in sides[1:]
            )
            print(f"| {task}, {how['metric']} {how['goal']}: {unit} | {middle} | {over} |")


if __name__ == "__main__":
    main()
