"""Runs a job once, from start to clean-up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hvd_keras import postmortem
from hvd_keras.launch.errors import STARTED, UsageError
from hvd_keras.launch.follow.outcome import Verdict
from hvd_keras.launch.follow.output import Output
from hvd_keras.launch.follow.ranks import Ranks
from hvd_keras.launch.follow.screen import Screen
from hvd_keras.launch.follow.statistics import table
from hvd_keras.launch.follow.supervise import OPEN_FILES, Job, Signals, job_directory
from hvd_keras.launch.job_spec import JobSpec
from hvd_keras.launch.onhost.channel import new_secret
from hvd_keras.launch.plan import Placement, Plan, memory_folder, plan
from hvd_keras.launch.start import clean_up
from hvd_keras.launch.start.hosts import is_here
from hvd_keras.launch.start.mpirun import Mpirun
from hvd_keras.launch.start.network import own_addresses


async def run(spec: JobSpec, placement: Placement, signals: Signals, *, first: bool) -> Verdict:
    """Run the job once and judge its outcome."""
    if spec.options.postmortem is None:
        return await _run(spec, placement, signals, first=first)
    folder = _new_folder(spec.options.postmortem)
    spec.options.settings["HVD_POSTMORTEM"] = str(folder)
    verdict = await _run(spec, placement, signals, first=first)
    with contextlib.suppress(OSError):
        folder.rmdir()  # the ranks have left it empty if nothing went wrong
    if verdict.status != 0 and folder.exists():
        try:
            told = f"{postmortem.conclusion(folder)}\nmore: python -m hvd_keras.postmortem {folder}"
        except ValueError as error:
            told = str(error)
        print(f"hvdrun: postmortem: {told}", file=sys.stderr, flush=True)
    return verdict


def _place(folder: Path, size: int) -> str:
    """Say where a rank was that ended without a traceback; empty if not all ranks have told."""
    told = ""
    if len([*folder.glob("rank-*.requests")]) == size:  # all were on this host, and joined
        with contextlib.suppress(ValueError):
            told = postmortem.conclusion(folder)
    return f"postmortem: {told}" if "\n" in told else ""


def _new_folder(parent: str) -> Path:
    """Make the next folder start-N, for the files of one start."""
    number = 1
    while True:
        folder = Path(parent).absolute() / f"start-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UsageError(
                f"--postmortem got {parent!r}, where no folder can be made: {error.strerror}"
            ) from error
        else:
            return folder


async def _run(spec: JobSpec, placement: Placement, signals: Signals, *, first: bool) -> Verdict:
    job, secret = secrets.token_hex(8), new_secret()
    options = spec.options
    if not spec.is_local:
        spec.jobs.append(job)
    with job_directory(job) as directory:
        changed = signals.changed.set
        output = Output(
            options.prefix,
            options.output_dir,
            append=not first,
            changed=changed,
            verbose=options.verbose,
        )
        ranks = _listen(spec, placement, secret, directory)
        planned = plan(
            spec,
            placement,
            directory=directory,
            job=job,
            secret=secret,
            addresses=ranks.addresses,
        )
        for path, text in planned.files.items():
            path.write_text(text)
            path.chmod(0o700)
        if options.verbose:
            print(planned.describe(), file=sys.stderr, flush=True)
        elif sys.stderr.isatty() and first:
            output.say(placement.describe())
        call = None if options.call is None else Path(options.call[1])
        if call is not None:
            Path(call, STARTED).touch()
        start = _start(spec, planned, job)
        folder = directory / "postmortem"
        if spec.is_local and options.postmortem is None:
            start["environment"]["HVDRUN_POSTMORTEM"] = str(folder)
        # A restart has no input, because an earlier start has consumed it.
        statistics = spec.statistics
        statistics.start(ranks.size)
        ranks.open(
            output, start, has_input=first, call=call, statistics=statistics, changed=changed
        )
        screen = Screen(statistics, output.write_raw)
        if options.screen:
            screen.start()

        place = ""

        async def sweep(grace: float) -> Collection[str]:
            nonlocal place
            place = _place(folder, ranks.size)  # the clean-up removes these files
            return await _sweep(ranks, placement, spec, job, grace)

        try:
            verdict = await Job(
                planned.command,
                _environment(spec, planned),
                ranks=ranks,
                output=output,
                signals=signals,
                verbose=options.verbose,
                stop_timeout=options.stop_timeout,
                repeats_traceback=call is not None,
                sweep=sweep,
                ended=screen.stop,
            ).run()
            has_traceback = verdict.culprit is not None and output.traceback(verdict.culprit)[0]
            is_open = verdict.status != 0 and verdict.asked and not has_traceback
            if is_open and options.postmortem is None:
                place = place or "to see where each rank was, add --postmortem FOLDER"
                print(f"hvdrun: {place}", file=sys.stderr, flush=True)
            return verdict
        finally:
            await ranks.close()
            if options.timeline is not None and Path(options.timeline).exists():
                told = f"hvdrun: timeline: python -m hvd_keras.timeline {options.timeline}"
                print(told, file=sys.stderr, flush=True)
            if options.stats:
                print(table(statistics.latest, ranks.size), file=sys.stderr, flush=True)


def _listen(spec: JobSpec, placement: Placement, secret: str, directory: Path) -> Ranks:
    names = [host.name for host in placement.hosts or ()] or list(placement.names.values())
    interface = spec.options.network_interface
    return Ranks(
        placement.size,
        [] if spec.is_local else own_addresses(interface, names),
        secret,
        float("inf") if spec.is_local else spec.options.start_timeout,
        directory,
        placement.names,
        {name for name in placement.names.values() if not name or is_here(name)},
    )


def _start(spec: JobSpec, planned: Plan, job: str) -> dict[str, Any]:
    """Return what the workers are to start, as `Worker` takes it."""
    engine = spec.engine
    has_memory = isinstance(engine, Mpirun) and bool(engine.memory_settings(""))
    return {
        "command": list(spec.command),
        "directory": os.getcwd(),
        "environment": {
            **planned.environment,
            **({"HVDRUN_VERBOSE": "1"} if spec.options.verbose else {}),
        },
        "folders": [memory_folder(job)] if has_memory else [],
        "statistics": spec.options.stats or spec.options.metrics is not None,
        "open_files": OPEN_FILES[0] if spec.is_local else None,
    }


def _environment(spec: JobSpec, planned: Plan) -> dict[str, str]:
    """Return the environment of mpirun or srun."""
    environment = os.environ | planned.settings
    engine = spec.engine
    if isinstance(engine, Mpirun) and engine.kind != "Open MPI" and not spec.is_local:
        # hydra would put it before the one that the agent has set on each host.
        environment.pop("TMPDIR", None)
    return environment


async def _sweep(
    ranks: Ranks, placement: Placement, spec: JobSpec, job: str, grace: float
) -> Collection[str]:
    """Clean up all hosts of the job; returns the lost hosts."""
    if spec.is_local:
        await asyncio.to_thread(clean_up.sweep_here, [job], grace)
        return ()
    lost = ranks.silent_hosts()
    names = {host.name for host in placement.hosts or ()} or set(placement.names.values())
    lost |= await asyncio.to_thread(clean_up.sweep_hosts, names - lost, spec.reach, [job], grace)
    spec.lost.update(lost)
    return lost
