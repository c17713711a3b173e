"""Steps of Keras's fit: hvd_keras, plain Keras, Keras on JAX and on PyTorch, in jobs by turns.

    python benchmarks/backends.py --jax-python /path/to/other/environment/bin/python
    python benchmarks/backends.py --torch [--keras-nightly /path/to/packages]

Each job trains the same model on two batches per step: two ranks of hvd_keras; two in
automatic mode; two processes that exchange nothing; one process with all cores and both batches;
and, with --jax-python, keras.distribution.DataParallel on JAX over two processes. Of the jobs, one
measures while the processes of the others are stopped. The time is that of the second epoch of a
fit. With --torch all jobs run Keras on PyTorch: two ranks of hvd_keras; two processes whose
train_step calls torch's DistributedDataParallel over gloo; two that exchange nothing; and, with
--keras-nightly, which all of them then use, keras.distribution.DataParallel over gloo. To create
the other environments:

    pip install keras jax numpy
    pip install --no-deps --pre --target /path/to/packages keras-nightly
"""

import argparse
import contextlib
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

RANKS = 2
SIDES = {
    "hvd_keras": "hvd_keras, 2 ranks",
    "auto": "hvd.auto, 2 ranks",
    "beside": "two processes that exchange nothing",
    "one": "one process, all cores",
    "jax": "Keras on JAX, DataParallel, two processes",
}
TORCH_SIDES = {
    "torch": "hvd_keras on PyTorch, 2 ranks",
    "ddp": "DistributedDataParallel over gloo, 2 processes",
    "parallel": "Keras's DataParallel on PyTorch, 2 processes",
    "beside": "two processes that exchange nothing",
}


def seconds_of_step(side: str, index: int, case: str, steps: int, cache: dict) -> float:
    """Trains in one of the processes; the model of a case is made once."""
    import keras
    import keras_models

    class Stopwatch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.start = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            self.seconds = time.perf_counter() - self.start

    if case not in cache:
        cache.clear()
        model, optimizer = keras_models.made(case)
        if side in ("hvd_keras", "torch"):
            import hvd_keras as hvd

            optimizer = hvd.DistributedOptimizer(optimizer)
        model.compile(optimizer, keras_models.loss())
        if side == "ddp":
            with_ddp(model)
        data = keras_models.batch(case, index)
        if side in ("one", "auto"):
            every = (keras_models.batch(case, i) for i in range(RANKS))
            data = tuple(map(np.concatenate, zip(*every, strict=True)))
        cache[case] = model, data
    model, data = cache[case]

    def batches():
        while True:
            yield data

    source = batches()
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        source = tf.data.Dataset.from_tensors(data).cache().repeat()
    watch = Stopwatch()
    model.fit(source, epochs=2, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[watch])
    return watch.seconds / steps


def with_ddp(model) -> None:
    """Lets a model's step compute by torch's wrapper, which averages gradients."""
    import torch

    parallel = torch.nn.parallel.DistributedDataParallel(model)

    def train_step(data):
        x, y = data
        y_pred = parallel(x, training=True)
        model.zero_grad()
        loss = model._compute_loss(x=x, y=y, y_pred=y_pred, training=True)
        model._loss_tracker.update_state(loss, sample_weight=len(x))
        loss.backward()
        weights = model.trainable_weights
        with torch.no_grad():
            model.optimizer.apply([v.value.grad for v in weights], weights)
        return model.compute_metrics(x, y, y_pred)

    object.__setattr__(model, "train_step", train_step)


def process(side: str, address: str, steps: int) -> None:
    """Runs one process of a job: answers each name of a case with the seconds of a step."""
    index = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
    if side in ("hvd_keras", "torch"):
        import hvd_keras as hvd

        hvd.init()
    elif side in ("ddp", "parallel"):
        import keras
        import torch

        torch.distributed.init_process_group(
            "gloo", f"tcp://localhost:{45872 + (side == 'ddp')}", world_size=RANKS, rank=index
        )
        if side == "parallel":
            keras.distribution.set_distribution(
                keras.distribution.DataParallel(auto_shard_dataset=False)
            )
    elif side == "auto":
        import hvd_keras as hvd

        hvd.auto()
    elif side == "jax":
        os.sched_setaffinity(0, {index % os.cpu_count()})  # JAX has no setting for its threads
        import keras

        keras.distribution.initialize("localhost:45871", RANKS, index)
        own_data = keras.distribution.DataParallel(auto_shard_dataset=False)
        keras.distribution.set_distribution(own_data)
    link = socket.socket(socket.AF_UNIX)
    link.connect(address)
    stream = link.makefile("rw")
    cache: dict = {}
    for line in stream:
        taken = seconds_of_step(side, index, line.strip(), steps, cache)
        print(taken, file=stream, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jax-python", type=Path, help="Python of an environment with JAX")
    parser.add_argument("--torch", action="store_true", help="compare on PyTorch")
    parser.add_argument("--keras-nightly", type=Path, help="a folder with keras-nightly")
    parser.add_argument("--repeats", type=int, default=9, help="of each measurement (default 9)")
    parser.add_argument("--cases", nargs="+", help="default: all")
    parser.add_argument("--steps", type=int, default=50, help="of an epoch (default 50)")
    parser.add_argument("--smoke", action="store_true", help="few steps, to see that it works")
    parser.add_argument("--json", action="store_true", help="print one line of JSON, no table")
    parser.add_argument("--process", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        process(*options.process, options.steps)
        return
    if options.smoke:
        options.steps, options.repeats = 2, 2
    import keras_models
    import peer
    import report

    peer.end_in_time()
    names = TORCH_SIDES if options.torch else SIDES
    missing = {"jax": not options.jax_python, "parallel": not options.keras_nightly}
    sides = [side for side in names if not missing.get(side)]
    cases = options.cases or list(keras_models.CASES)[: 1 if options.smoke else None]
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = str(Path(folder) / "turns")
        listener.bind(address)
        listener.listen()
        listener.settimeout(1)
        with contextlib.ExitStack() as ending:
            jobs = {}
            for side in sides:
                python = str(options.jax_python.absolute()) if side == "jax" else sys.executable
                command = [python, __file__, "--process", side, address]
                command += ["--steps", str(options.steps)]
                if side == "one":
                    cores = str(len(os.sched_getaffinity(0)))
                    threads = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
                    command = ["env", *(f"{name}={cores}" for name in threads), *command]
                else:
                    start = [sys.executable, "-m", "hvd_keras.hvdrun", "--oversubscribe"]
                    backend = ["KERAS_BACKEND=jax"] if side == "jax" else []
                    if options.torch:
                        backend = ["KERAS_BACKEND=torch", "OMP_NUM_THREADS=1"]
                    if options.keras_nightly:  # all have the same Keras
                        backend.append(f"PYTHONPATH={options.keras_nightly.absolute()}")
                    command = [*start, "--no-init", "-np", str(RANKS), "env", *backend, *command]
                jobs[side] = peer.Job(command, 1 if side == "one" else RANKS, listener)
                ending.callback(jobs[side].end)
            rows = []
            for case in cases:
                times = [
                    [job.measure(case) for job in jobs.values()] for _ in range(options.repeats + 1)
                ]
                ours, *others = zip(*times[1:], strict=True)
                what = f"a step of fit, {case}, {RANKS} x {keras_models.rows(case)}"
                of_case = [
                    report.compare(what, RANKS, names[side], ours, theirs)
                    for side, theirs in zip(sides[1:], others, strict=True)
                ]
                rows += of_case
                if not options.json:
                    print(report.table(of_case), flush=True)
    if options.json:
        report.show(rows, as_json=True)


if __name__ == "__main__":
    main()
