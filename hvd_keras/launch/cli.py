"""hvdrun: from the command line to the exit status."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_keras.launch import (
    UsageError,
    cluster,
    options,
    request,
    restarts,
    statistics,
    tensorflow_log,
    worker,
)
from hvd_keras.launch.cores import thread_settings
from hvd_keras.launch.loop import Loop
from hvd_keras.launch.mpirun import Mpirun
from hvd_keras.launch.output import Output
from hvd_keras.launch.pipes import Pipes
from hvd_keras.launch.request import Request
from hvd_keras.launch.supervise import (
    MEMORY,
    OPEN_FILES,
    Job,
    Signals,
    job_directory,
    memory_directory,
    raise_open_files,
)
from hvd_keras.launch.verdict import Verdict


def _worker_command(directory: Path, hvdrun: str, command: Sequence[str]) -> list[str]:
    # As one JSON text the command is safe from mpirun, which would split it at a ":" for example.
    # -I -S: the worker needs nothing of the user's environment and starts in half the time.
    python = [sys.executable, "-I", "-S"]
    return [*python, worker.__file__, str(directory), hvdrun, json.dumps(command)]


def _plan_here(asked: Request, directory: Path, hvdrun: str) -> cluster.Plan:
    """How to start the ranks of a job on this host."""
    assert isinstance(asked.engine, Mpirun)
    assert asked.size is not None
    settings = thread_settings(asked.size, os.environ) | asked.observers()
    settings |= asked.engine.memory_settings(str(MEMORY / directory.name))
    if asked.options.stats:
        settings["HVD_STATS_DIRECTORY"] = str(directory)
    command = asked.engine.command(
        asked.size,
        oversubscribe=asked.options.oversubscribe,
        variables=settings,
        extra=asked.extra,
        program=_worker_command(directory, hvdrun, asked.command),
    )
    return cluster.Plan(settings | asked.engine.settings(directory), command, {})


def _run_here(asked: Request, signals: Signals, *, first: bool) -> Verdict:
    """Start the job on this host once and follow it to its end."""
    assert asked.size is not None
    with job_directory() as directory, memory_directory(directory.name):
        planned = _plan_here(asked, directory, str(os.getpid()))
        if asked.options.verbose:
            print(planned.describe(), file=sys.stderr, flush=True)
        environment = os.environ | planned.settings | {worker.FILES: str(OPEN_FILES[0])}
        hidden = tensorflow_log.hidden_lines(environment)
        output = Output(asked.options.prefix, hidden, asked.options.output_dir, append=not first)
        ranks = Pipes(asked.size, directory)
        loop = Loop()
        ranks.open(loop, output)
        try:
            return Job(
                planned.command,
                environment,
                ranks=ranks,
                loop=loop,
                output=output,
                signals=signals,
                verbose=asked.options.verbose,
                first=first,
            ).run()
        finally:
            loop.close()
            ranks.close()
            if asked.options.stats:
                print(statistics.table(directory, asked.size), file=sys.stderr, flush=True)


def _launch(arguments: Sequence[str] | None) -> int:
    given = options.parse(arguments)
    if given.end_with is not None:
        worker.die_with_parent(int(given.end_with), signal.SIGTERM)
    asked = request.build(given)
    if asked.options.dry_run:
        directory = Path("JOB_DIRECTORY")
        if asked.is_local:
            print(_plan_here(asked, directory, "HVDRUN_PID").describe())
        else:
            placement = restarts.place(asked, look=False)
            names = {"job": "JOB", "secret": cluster.HIDDEN, "addresses": "HVDRUN_ADDRESS:PORT"}
            print(cluster.plan(asked, placement, directory=directory, **names).describe())
            print(f"each rank: {shlex.join(asked.command)}")
        return 0

    def run(placement: cluster.Placement | None, signals: Signals, first: bool) -> Verdict:
        if placement is None:
            return _run_here(asked, signals, first=first)
        return cluster.run(asked, placement, signals, first=first)

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
