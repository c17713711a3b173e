"""Time and bytes until a model is good, on three hosts joined by a slow network.

    python benchmarks/slow_network.py             # a table
    python benchmarks/slow_network.py --seeds 1   # quicker

The hosts are namespaces of this machine (tests/harness/hosts.py; needs root), each sends at most
20 Mbit/s, and, where the kernel has netem, an answer takes 50 ms. Ranks that average gradients in
each step need hours for that, so their steps are counted without the limit, which changes no bit,
and the time of a step is measured with it. With rounds everything is measured with it.
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
HOSTS, MEGABITS, DELAY = 3, 20, "25ms"  # of each direction
BATCH, CHUNK = 8, 50  # rows of a rank; steps between evaluations
LIMIT = 900  # seconds for a job

# Until which accuracy or loss; the most steps; the learning rates of a rank, and of all together.
TASKS = {
    "convnet on digits": {"metric": "accuracy", "goal": 0.98, "steps": 1500, "rates": [1e-3, 2e-3]},
    "language model": {"metric": "loss", "goal": 2.1, "steps": 4000, "rates": [1e-3, 2e-3]},
}
EVERY = 250


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
    model = keras.Sequential(
        [
            keras.Input((24,), dtype="int32"),
            layers.Embedding(len(known), 32),
            layers.Flatten(),
            layers.Dense(512, activation="relu"),
            layers.Dense(len(known)),
        ]
    )
    train, test = rows[:last:3], rows[last:][:: (len(rows) - last) // 4000]
    return model, (train[:, :-1], train[:, -1]), (test[:, :-1], test[:, -1])


def rank(task: str, every: int, steps: int, seed: int, goal: float, rate: float) -> None:
    """Train on one rank; rank 0 prints after how many steps, seconds and bytes the goal is met."""
    import keras
    import numpy as np

    import hvd_keras as hvd

    hvd.init()
    keras.utils.set_random_seed(seed)
    model, train, test = (digits if "digits" in task else language)(keras, np)
    optimizer: Any = keras.optimizers.Adam(rate)
    outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    how = {"sync_every": every, "outer_optimizer": outer} if every else {}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        hvd.DistributedOptimizer(optimizer, **how),
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
            self.curve: list[Any] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.since = self.since and time.perf_counter()
            self.before = sent()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 5
            self.bytes += sent() - self.before
            if self.since is not None:
                self.seconds += time.perf_counter() - self.since
            self.since = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            value = dict(
                zip(("loss", "accuracy"), model.evaluate(*test, 500, verbose=0), strict=True)
            )
            self.curve.append(
                [self.steps, self.seconds, self.bytes, value["loss"], value["accuracy"]]
            )
            reached = value["accuracy"] >= goal if goal < 1 else value["loss"] <= goal
            model.stop_training |= reached

    watch = Watch()
    chunk = every or CHUNK
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


def limit(hosts: Any) -> bool:
    """Slow the hosts' network down; return whether it has the delay, too."""
    try:
        for host in hosts:
            kind = ["netem", "rate", f"{MEGABITS}mbit", "delay", DELAY]
            host._administer("tc", "qdisc", "replace", "dev", "eth0", "root", *kind)
    except RuntimeError:
        hosts.throttle(MEGABITS)
        return False
    return True


def measure(hosts: Any, task: str, seed: int) -> dict[str, Any]:
    """Train one task both ways; return steps, seconds, bytes, and the last loss and accuracy."""
    how = TASKS[task]
    alone, together = how["rates"]
    hosts.throttle(None)
    *_, each = job(hosts, task, 0, how["steps"], seed, how["goal"], together)["curve"]
    has_delay = limit(hosts)
    *_, slow = job(hosts, task, 0, CHUNK, seed, how["goal"], together)["curve"]
    *_, rounds = job(hosts, task, EVERY, how["steps"], seed, how["goal"], alone)["curve"]
    each[1] = slow[1] / (slow[0] - 5) * each[0]
    return {"task": task, "seed": seed, "delay": has_delay, "each": each, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rank", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        task, *numbers, goal, rate = options.rank
        rank(task, *map(int, numbers), float(goal), float(rate))
        return
    sys.path.insert(0, str(HERE.parent))
    from tests.harness.hosts import Hosts, missing

    if problem := missing():
        raise SystemExit(problem)
    found = []
    with Hosts(HOSTS) as hosts:
        for task in TASKS:
            for seed in range(options.seeds):
                found.append(measure(hosts, task, seed))
                print(json.dumps(found[-1]), flush=True)
    if not found[0]["delay"]:
        print("This kernel has no netem: packets had no delay, so each step was cheaper.")
    print("| until | gradients in each step | rounds | over |\n|---|---|---|---|")
    for task, how in TASKS.items():
        own = [one for one in found if one["task"] == task]
        for i, unit in enumerate(("steps", "seconds", "MB sent by a rank")):
            scale = 1e6 if unit.startswith("MB") else 1
            each, rounds = ([one[kind][i] / scale for one in own] for kind in ("each", "rounds"))
            over = statistics.median(a / b for a, b in zip(each, rounds, strict=True))
            middle = " | ".join(f"{statistics.median(side):.4g}" for side in (each, rounds))
            print(f"| {task}, {how['metric']} {how['goal']}: {unit} | {middle} | {over:.3g} |")


if __name__ == "__main__":
    main()
