"""One start of a job, on this host or on several, and its end."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from hvd_keras.launch.follow import statistics, tensorflow_log
from hvd_keras.launch.follow.event_loop import Loop
from hvd_keras.launch.follow.local_ranks import Pipes
from hvd_keras.launch.follow.outcome import Verdict
from hvd_keras.launch.follow.output import Output
from hvd_keras.launch.follow.remote_ranks import Network, Start
from hvd_keras.launch.follow.supervise import (
    MEMORY,
    OPEN_FILES,
    Job,
    Signals,
    job_directory,
    memory_directory,
)
from hvd_keras.launch.job_spec import Request
from hvd_keras.launch.onhost import worker_local as worker
from hvd_keras.launch.onhost import worker_remote as remote
from hvd_keras.launch.onhost.channel import new_secret
from hvd_keras.launch.onhost.cores import thread_settings
from hvd_keras.launch.onhost.worker_local import GRACE
from hvd_keras.launch.plan import Placement, Plan, plan
from hvd_keras.launch.start import clean_up
from hvd_keras.launch.start.hosts import is_here
from hvd_keras.launch.start.mpirun import Mpirun
from hvd_keras.launch.start.network import own_addresses

# Seconds that what mpirun and the workers have left running gets to end by itself.
SWEEP_GRACE = 1.0


def _worker_command(directory: Path, hvdrun: str, command: Sequence[str]) -> list[str]:
    # As one JSON text the command is safe from mpirun, which would split it at a ":" for example.
    # -I -S: the worker needs nothing of the user's environment and starts in half the time.
    python = [sys.executable, "-I", "-S"]
    return [*python, worker.__file__, str(directory), hvdrun, json.dumps(command)]


def plan_here(asked: Request, directory: Path, hvdrun: str) -> Plan:
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
    return Plan(settings | asked.engine.settings(directory), command, {})


def run_here(asked: Request, signals: Signals, *, first: bool) -> Verdict:
    """Start the job on this host once and follow it to its end."""
    assert asked.size is not None
    with job_directory() as directory, memory_directory(directory.name):
        planned = plan_here(asked, directory, str(os.getpid()))
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


def run(request: Request, placement: Placement, signals: Signals, *, first: bool) -> Verdict:
    """Start the job once and follow it to its end."""
    job, secret = secrets.token_hex(8), new_secret()
    request.jobs.append(job)
    options = request.options
    with job_directory() as directory:
        output = Output(
            options.prefix,
            tensorflow_log.hidden_lines(os.environ),
            options.output_dir,
            append=not first,
        )
        network = Network(
            placement.size,
            own_addresses(
                options.network_interface,
                [host.name for host in placement.hosts or ()] or list(placement.names.values()),
            ),
            secret,
            request.start_timeout,
            directory,
            placement.names,
            {name for name in placement.names.values() if is_here(name)},
        )
        planned = plan(
            request,
            placement,
            directory=directory,
            job=job,
            secret=secret,
            addresses=network.addresses,
        )
        for path, text in planned.files.items():
            path.write_text(text)
            path.chmod(0o700)
        if options.verbose:
            print(planned.describe(), file=sys.stderr, flush=True)
        memory = f"/dev/shm/hvdrun-{job}"
        engine = request.engine
        environment = request.environment() | request.observers()
        environment |= {remote.JOB: job}
        if isinstance(engine, Mpirun):
            environment |= engine.memory_settings(memory)
        else:
            environment |= engine.rank_settings()
        loop = Loop()
        start = Start(
            request.command, os.getcwd(), environment, [memory], options.stats, os.environ
        )
        network.open(loop, output, start)

        def clean(running: Job) -> Collection[str]:
            return _clean(running, network, placement, request, job)

        try:
            mpirun_environment = os.environ | planned.settings
            if isinstance(engine, Mpirun) and engine.kind != "Open MPI":
                # hydra would put it before the one that the agent has set on each host.
                mpirun_environment.pop("TMPDIR", None)
            return Job(
                planned.command,
                mpirun_environment,
                ranks=network,
                loop=loop,
                output=output,
                signals=signals,
                verbose=options.verbose,
                first=first,
                sweep=clean,
            ).run()
        finally:
            network.close()
            loop.close()
            if options.stats:
                print(statistics.table(directory, placement.size), file=sys.stderr, flush=True)


def _clean(
    running: Job, network: Network, placement: Placement, request: Request, job: str
) -> Collection[str]:
    """Hear the workers' last words, and leave nothing on any host; returns the lost hosts."""
    limit = time.monotonic() + GRACE
    while network.live() and time.monotonic() < limit and not running.hurry:
        running.turn(0.1)
    lost = network.silent_hosts()
    grace = 0.0 if running.hurry else SWEEP_GRACE
    names = {host.name for host in placement.hosts or ()} or set(placement.names.values())
    lost = lost | clean_up.sweep_hosts(names - lost, request.reach, [job], grace)
    request.lost.update(lost)
    return lost
