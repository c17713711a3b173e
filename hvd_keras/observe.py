"""Statistics and timelines of the job's communication."""

import contextlib
import json
import os
import pathlib
import threading
import time
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras import ops
from hvd_keras.runtime import agree, libraries, log, rank_info, settings
from hvd_keras.runtime.keras import keras

# Seconds between two looks at the training step, and two versions of the file.
_PERIOD = 1.0


def stats() -> dict[str, Any]:
    """Return what this process has exchanged since ``init()``, and how long the ranks waited.

    Takes microseconds and does not communicate: the ranks tell each other their waiting times with
    every request. The times of the latest request are known after the next one.

    Returns:
        A new dict:

        - ``"rank"``: this process's rank.
        - ``"seconds"``: the time since ``init()``.
        - ``"collectives"``: for each kind, such as ``"allreduce"``, a dict of ``"requests"``,
          ``"bytes"`` (this rank's inputs), ``"waiting_seconds"`` (until all other ranks were
          ready) and ``"moving_seconds"`` (while data moved). TensorFlow may compute meanwhile.
        - ``"ranks"``: for each rank of the job, a dict of ``"last"``, the number of times it came
          last, at least 0.1 ms after the others, and ``"awaited_seconds"``, the time that the
          others then waited for it, on average. Counts requests of this rank's process sets.

    Raises:
        ValueError: ``init()`` was not called.
    """
    rank_info.rank()  # raises if init() was not called
    counters: dict[str, Any] = json.loads(libraries.core().hvd_stats())
    return counters


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Start a timeline of all ranks, for https://ui.perfetto.dev or chrome://tracing.

    Call it on every rank. Rank 0 writes one file for the job and replaces an existing one. To
    record a whole job, use ``HVD_TIMELINE`` or ``hvdrun --timeline`` instead. docs/observing.md
    describes the content.

    Args:
        file_path: the file; only rank 0's value is used.
        mark_cycles: accepted for Horovod's scripts; has no effect, since there are no cycles.

    Raises:
        ValueError: ``init()`` was not called; or, on every rank, rank 0 cannot write the file or is
            already writing a timeline.
    """
    del mark_cycles

    def start() -> None:
        core = libraries.core()
        if rank_info.rank() == 0 and core.hvd_start_timeline(os.fsencode(file_path)) != 0:
            raise ValueError(core.hvd_error().decode())

    agree.on_all_ranks("hvd.start_timeline", start)


def stop_timeline() -> None:
    """End the timeline. Call it on every rank.

    Does nothing if there is none. Otherwise the timeline ends with ``shutdown()``.

    Raises:
        ValueError: ``init()`` was not called.
    """
    ops.barrier()  # the ranks' latest times are exchanged with the next request
    libraries.core().hvd_stop_timeline()
    ops.barrier()  # after this, any rank may read the file


def samples_of(model: Any, steps: int) -> float:
    """Return how many samples a model has trained on since its metrics were reset, or NaN."""
    # Keras's train_step weights the loss by the number of samples, so the loss metric's count is
    # their sum. If it equals the number of steps since then, a custom train_step may have omitted
    # the weight.
    count = getattr(getattr(model, "_loss_tracker", None), "count", None)
    samples = np.nan if count is None else float(count)
    return samples if samples > steps else np.nan


class Progress(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps how far a ``fit`` is, for ``hvdrun --stats`` and ``--metrics``.

    It looks at the loss and the number of samples once per second, because that waits for a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0
        self._tested = False  # metrics have been reset since the last training step
        self._steps = 0  # of this epoch
        self._before: dict[str, float] = {"steps": 0, "samples": 0}  # this epoch
        self._gpu = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        _training.clear()
        self._gpu = bool(tf.config.list_logical_devices("GPU"))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        samples = _training.get("samples", 0)
        samples = np.nan if samples is None else samples
        self._before = {"steps": _training.get("steps", 0), "samples": samples}
        self._steps, self._tested = 0, False
        _training.update(epoch=epoch + 1, epochs=self.params["epochs"])

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps = batch + 1
        if time.monotonic() >= self._next:
            self._keep(logs)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._keep(None)
        self._tested = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._keep(logs)

    def _keep(self, logs: dict[str, Any] | None) -> None:
        now: dict[str, Any] = {"steps": self._before["steps"] + self._steps, "at": time.monotonic()}
        if not self._tested:  # afterwards the loss metric counts validation's samples
            samples = self._before["samples"] + samples_of(self.model, self._steps)
            now["samples"] = None if np.isnan(samples) else samples
        if logs and "loss" in logs:
            now["loss"] = float(logs["loss"])
        if self._gpu:
            now["gpu_bytes"] = tf.config.experimental.get_memory_info("GPU:0")["current"]
        _training.update(now)
        self._next = time.monotonic() + _PERIOD


# What Progress keeps of the last fit: epoch, epochs, steps, samples (None: unknown), loss,
# gpu_bytes, and the time "at" which it looked.
_training: dict[str, Any] = {}


class _Publisher:
    """Tells hvdrun this rank's statistics, or writes them to a file."""

    def __init__(self, folder: pathlib.Path | None) -> None:
        self._rank = rank_info.rank()
        self._path = None if folder is None else folder / f"stats-{self._rank}.json"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvd_stats", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(_PERIOD):
            with contextlib.suppress(OSError):  # the last attempt will tell
                self._write()

    def _write(self) -> None:
        numbers = json.loads(libraries.core().hvd_stats()) | {"training": dict(_training)}
        if self._path is None:
            numbers["late"] = numbers.pop("ranks")[self._rank]  # grows with the job otherwise
            settings.tell_hvdrun(statistics=numbers)
            return
        unfinished = self._path.with_suffix(".new")
        unfinished.write_text(json.dumps(numbers))
        unfinished.replace(self._path)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        try:
            self._write()
        except OSError as error:
            log.logger.error("cannot write the statistics (HVD_STATS_DIRECTORY): %s", error)


_publisher: _Publisher | None = None


def start_publishing() -> None:
    """Begins to publish statistics if they are wanted; after the job has begun."""
    global _publisher
    chosen = settings.read()
    if chosen.tells_statistics or chosen.stats_directory is not None:
        _publisher = _Publisher(None if chosen.tells_statistics else chosen.stats_directory)


def is_publishing() -> bool:
    """Whether statistics are being published."""
    return _publisher is not None


def stop_publishing() -> None:
    """Publish the final statistics."""
    global _publisher
    if _publisher is not None:
        _publisher.stop()
    _publisher = None
