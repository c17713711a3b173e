"""hvdrun: from the command line to the exit status."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_keras.launch import job_spec, options, plan, restarts, run_job
from hvd_keras.launch.errors import UsageError
from hvd_keras.launch.follow.outcome import Verdict
from hvd_keras.launch.follow.supervise import (
    Signals,
    raise_open_files,
)
from hvd_keras.launch.onhost import worker_local as worker


def _launch(arguments: Sequence[str] | None) -> int:
    given = options.parse(arguments)
    if given.end_with is not None:
        worker.die_with_parent(int(given.end_with), signal.SIGTERM)
    asked = job_spec.build(given)
    if asked.options.dry_run:
        directory = Path("JOB_DIRECTORY")
        if asked.is_local:
            print(run_job.plan_here(asked, directory, "HVDRUN_PID").describe())
        else:
            placement = restarts.place(asked, look=False)
            names = {"job": "JOB", "secret": plan.HIDDEN, "addresses": "HVDRUN_ADDRESS:PORT"}
            print(plan.plan(asked, placement, directory=directory, **names).describe())
            print(f"each rank: {shlex.join(asked.command)}")
        return 0

    def run(placement: plan.Placement | None, signals: Signals, first: bool) -> Verdict:
        if placement is None:
            return run_job.run_here(asked, signals, first=first)
        return run_job.run(asked, placement, signals, first=first)

    raise_open_files()
    with Signals() as signals:
        return restarts.run(asked, run, signals).status


def _open_standard_streams() -> None:
    """Put the null device where the caller has closed one, lest another file takes its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `hvdrun` with these arguments (default: the process's own); returns the exit status."""
    _open_standard_streams()
    try:
        return _launch(arguments)
    except UsageError as error:
        for line in str(error).splitlines():
            print(f"hvdrun: {line}", file=sys.stderr)
        return 2
