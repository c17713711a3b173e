"""What keras.distribution.DataParallel on PyTorch and hvd_keras do, beside one process.

    pip install --no-deps --pre --target /path/to/packages keras-nightly
    python tests/pytorch/apart.py [--keras-nightly /path/to/packages]

Each case prints a sum over values of the model after 4 steps: of one process, and of each of two
ranks. Equal sums say that N ranks are one process.
"""

import argparse
import os
import subprocess
import sys

CASES = ("a fit", "a train_step of one's own", "moving statistics", "a masked loss", "unequal data")
LIMIT = 60  # seconds, after which a job hangs


def rank(way: str, case: str) -> None:
    """Trains on this rank and prints its sum."""
    import keras
    import numpy as np
    import torch

    index = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))
    keras.utils.set_random_seed(1)

    def distributed(optimizer):
        return optimizer

    if way == "hvd_keras":
        import hvd_keras as hvd

        hvd.init()
        distributed = hvd.DistributedOptimizer
    elif way == "keras":
        address = "tcp://localhost:45875"
        torch.distributed.init_process_group("gloo", address, world_size=size, rank=index)
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(auto_shard_dataset=False)
        )

    class Own(keras.Model):
        def train_step(self, data):
            self.zero_grad()
            loss = self.compute_loss(y=data[1], y_pred=self(data[0], training=True))
            loss.backward()
            weights = self.trainable_weights
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in weights], weights)
            return {"loss": loss.detach()}

    random = np.random.default_rng(0)
    x, y = random.normal(size=(64, 8)).astype("float32"), random.normal(size=(64, 1))
    inputs = keras.Input([8])
    layers = [keras.layers.BatchNormalization(name="statistics")] * (case == CASES[2])
    if case == CASES[3]:
        x = (
            random.integers(1, 9, (64, 6)) * (np.arange(6) < random.integers(1, 7, (64, 1)))
        ).astype("int32")
        y, inputs = random.normal(size=(64, 6, 1)), keras.Input([6], dtype="int32")
        layers = [keras.layers.Embedding(9, 4, mask_zero=True)]
    outputs = inputs
    for layer in [*layers, keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]:
        outputs = layer(outputs)
    model = (Own if case == CASES[1] else keras.Model)(inputs, outputs)
    model.compile(distributed(keras.optimizers.SGD(0.1)), "mse")
    steps = 4 + (case == CASES[4] and index == 1)

    def batches():
        for step in range(steps):
            mine = slice(16 * (step % 4) + index, 16 * (step % 4 + 1), size)
            yield x[mine], y[mine].astype("float32")

    callbacks = []
    if way == "hvd_keras":
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(batches(), epochs=1, verbose=0, callbacks=callbacks)
    values = model.weights
    if case == CASES[2]:
        values = model.get_layer("statistics").non_trainable_variables
    total = sum(float(np.abs(keras.ops.convert_to_numpy(v)).sum()) for v in values)
    print(f"sum {total:.6f}", flush=True)
    os._exit(0)


def sums(way: str, case: str, size: int, packages: str | None) -> str:
    """Returns what a job prints, or how it ends."""
    path = {"PYTHONPATH": packages} if packages and way == "keras" else {}
    environment = os.environ | {"KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"} | path
    command = ["-m", "hvd_keras.hvdrun", "-np", str(size), "--oversubscribe", sys.executable]
    command = [sys.executable, *command, __file__, "--rank", way, case]
    job = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = job.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        job.terminate()
        job.communicate()
        return f"hangs (ended after {LIMIT} s)"
    found = sorted(line.split()[-1] for line in out.splitlines() if "sum " in line)
    if len(found) < size:
        return next((line for line in err.splitlines() if "Error: " in line), err[-300:])[:150]
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keras-nightly", help="a folder with keras-nightly")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(*options.rank)
    ways = [("plain", 1), ("hvd_keras", 2)] + [("keras", 2)] * bool(options.keras_nightly)
    for case in CASES:
        for way, size in ways:
            print(
                f"{case}: {way}, {size}: {sums(way, case, size, options.keras_nightly)}", flush=True
            )


if __name__ == "__main__":
    main()
