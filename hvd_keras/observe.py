"""Statistics and timelines of the job's communication."""

import contextlib
import json
import math
import os
import pathlib
import threading
from typing import Any

from hvd_keras import timeline
from hvd_keras.runtime import agree, libraries, log, rank_info, settings

#: Seconds between two looks at the training step, and two versions of the file.
PERIOD = 1.0


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

    Call it on every rank. In the end, rank 0 makes one file for the job, which replaces an existing
    one. To record a whole job, use ``HVD_TIMELINE`` or ``hvdrun --timeline`` instead.
    docs/observing.md describes the content.

    Args:
        file_path: the file; only rank 0's value is used. On several hosts, in a shared folder:
            until the end, each rank writes to a file of its own there.
        mark_cycles: accepted for Horovod's scripts; has no effect: hvd_keras has no cycles.

    Raises:
        ValueError: ``init()`` was not called; or, on every rank, a rank cannot write its file or is
            already writing a timeline.
    """
    del mark_cycles
    name, is_first = "hvd.start_timeline", rank_info.rank() == 0
    path = agree.on_all_ranks(name, lambda: os.fsdecode(file_path) if is_first else "")
    _start_timeline(name, path)


#: This rank, the file of the timeline that the ranks record, and what has begun it.
_timeline: tuple[int, pathlib.Path, str] | None = None

_ADVICE = {
    "hvd.start_timeline": "by hvd.start_timeline. Call hvd.stop_timeline() first.",
    "HVD_TIMELINE": "by hvdrun --timeline or HVD_TIMELINE. Leave out hvd.start_timeline(): that "
    "one records the whole job.",
}


def _start_timeline(name: str, path: str) -> None:
    global _timeline
    file = pathlib.Path(agree.gather_json(name, os.path.abspath(path))[0])
    rank, opened = rank_info.rank(), list[int]()

    def begin() -> None:
        if _timeline is not None:
            _, other, begun = _timeline
            raise ValueError(f"a timeline is being written already: '{other}', {_ADVICE[begun]}")
        if file.is_dir():
            raise ValueError(f"'{file}' is a folder. Choose a file in it.")
        try:
            opened.append(timeline.begin(file, rank, rank_info.size()))
        except OSError as error:
            raise ValueError(
                f"cannot make the file '{file}': {error.strerror}. Choose a path in a "
                "folder that exists, has space and that every rank may write to."
            ) from error

    try:
        agree.on_all_ranks(name, begin)
    except ValueError:
        for descriptor in opened:
            os.close(descriptor)
            pathlib.Path(f"{file}.rank-{rank}").unlink()
        raise
    libraries.core().hvd_trace(*opened)
    _timeline = rank, file, name


def stop_timeline() -> None:
    """End the timeline. Call it on every rank.

    Does nothing without one. Otherwise the timeline ends with ``shutdown()``.

    Raises:
        ValueError: ``init()`` was not called.
    """
    rank_info.rank()  # raises if init() was not called
    agree.run("barrier", [], name="unnamed")  # all ranks have it: by such requests they are joined
    agree.on_all_ranks("hvd.stop_timeline", lambda: libraries.core().hvd_trace(-1))
    agree.on_all_ranks("hvd.stop_timeline", merge_timeline)  # then any rank may read the file


def merge_timeline() -> None:
    """Make the timeline, on rank 0, if there is one and all ranks have closed theirs."""
    global _timeline
    rank, file, _ = _timeline or (-1, pathlib.Path(), "")
    _timeline = None
    if rank != 0:
        return
    try:
        if problem := timeline.merge(file):
            log.logger.warning("%s: name a file in a folder that all hosts share", problem)
    except OSError as error:
        log.logger.error("cannot write the timeline %s: %s", file, error.strerror)


#: What `training.progress` keeps of the last fit: epoch, epochs, steps, samples (None: unknown),
#: loss, gpu_bytes, and the time "at" which it looked.
training: dict[str, Any] = {}


class _Publisher(threading.Thread):
    """Tells hvdrun this rank's statistics and writes them to a file until the job is over."""

    def __init__(self, tells: bool, folder: pathlib.Path | None) -> None:
        super().__init__(name="hvd_stats", daemon=True)
        self._tells, self._rank, self.over = tells, rank_info.rank(), threading.Event()
        self._path = folder and folder / f"stats-{self._rank}.json"

    def run(self) -> None:
        while not self.over.wait(PERIOD):
            with contextlib.suppress(OSError):  # the last attempt will tell
                self._write()
        try:
            self._write()
        except OSError as error:
            log.logger.error("cannot write the statistics (HVD_STATS_DIRECTORY): %s", error)

    def _write(self) -> None:
        numbers = json.loads(libraries.core().hvd_stats()) | {"training": dict(training)}
        numbers["cores"] = sorted(os.sched_getaffinity(0))
        ranks = numbers.pop("ranks")
        if self._tells:  # not of all ranks: the message would grow with the job
            settings.tell_hvdrun(statistics=numbers | {"late": ranks[self._rank]})
        if self._path is not None:
            # JSON has no NaN.
            fit = {k: v if math.isfinite(v or 0) else None for k, v in numbers["training"].items()}
            unfinished = self._path.with_suffix(".new")
            unfinished.write_text(json.dumps(numbers | {"ranks": ranks, "training": fit}))
            unfinished.replace(self._path)


#: None: nothing is published.
publisher: _Publisher | None = None

# How many timelines of HVD_TIMELINE this process has begun: one with each `init()`.
_timelines = 0


def start_publishing() -> None:
    """Begins to publish statistics and a timeline if they are wanted; after the job has begun."""
    global publisher, _timelines
    chosen = settings.read()
    folder = chosen.stats_directory
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"HVD_STATS_DIRECTORY is '{folder}', which rank {rank_info.rank()} cannot make: "
                f"{error.strerror}. Name a folder that every rank may write to, or unset it."
            ) from error
    if chosen.timeline:
        file = timeline.nth(pathlib.Path(chosen.timeline), _timelines + 1)
        _start_timeline("HVD_TIMELINE", str(file))
        _timelines += 1
    if chosen.tells_statistics or folder is not None:
        publisher = _Publisher(chosen.tells_statistics, folder)
        publisher.start()


def stop_publishing() -> None:
    """Publish the final statistics."""
    global publisher
    if publisher is not None:
        publisher.over.set()
        publisher.join()
    publisher = None
