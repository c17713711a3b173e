"""Runs a job once, from start to clean-up."""

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from hvd_keras import postmortem
from hvd_keras.launch.errors import STARTED, refusing, say
from hvd_keras.launch.follow.outcome import Verdict
from hvd_keras.launch.follow.output import Output
from hvd_keras.launch.follow.ranks import Ranks
from hvd_keras.launch.follow.statistics import table
from hvd_keras.launch.follow.supervise import OPEN_FILES, Job, Signals, job_directory
from hvd_keras.launch.job_spec import JobSpec
from hvd_keras.launch.onhost.channel import new_secret
from hvd_keras.launch.plan import POSTMORTEM, Placement, plan
from hvd_keras.launch.start import all_hosts
from hvd_keras.launch.start.hosts import is_here
from hvd_keras.launch.start.network import own_addresses


def _conclude(folder: Path, status: int) -> None:
    """Say what the files of ``--postmortem`` show after a failure."""
    with contextlib.suppress(OSError):
        folder.rmdir()  # the ranks have left it empty if nothing went wrong
    if status != 0 and folder.exists():
        try:
            text = f"{postmortem.conclusion(folder)}\nmore: python -m hvd_keras.postmortem {folder}"
        except ValueError as error:
            text = str(error)
        say(f"postmortem: {text}")


def _place(folder: Path, size: int) -> str:
    """Say where a rank was that ended without a traceback; empty if not all ranks have told."""
    text = ""
    if len([*folder.glob("rank-*.requests")]) == size:  # all were on this host, and joined
        with contextlib.suppress(ValueError):
            text = postmortem.conclusion(folder)
    return f"postmortem: {text}" if "\n" in text else ""


def _new_folder(parent: str) -> Path:
    """Make the next folder start-N, for the files of one start."""
    number = 1
    with refusing(f"--postmortem got {parent!r}, where no folder can be made"):
        while (folder := Path(parent).absolute() / f"start-{number}").exists():
            number += 1
        folder.mkdir(parents=True)
    return folder


async def run(
    spec: JobSpec,
    placement: Placement,
    signals: Signals,
    output: Output,
    has_failed: Callable[[], None],
) -> Verdict:
    """Run the job once and judge its outcome; call ``has_failed`` before it cleans up a failure."""
    job, secret = secrets.token_hex(8), new_secret()
    options, statistics = spec.options, spec.statistics
    folder = None if options.postmortem is None else _new_folder(options.postmortem)
    if folder is not None:
        options.settings["HVD_POSTMORTEM"] = str(folder)
    output.start()
    statistics.start(placement.size)
    is_first = statistics.starts == 1
    if not spec.is_local:
        spec.jobs.append(job)
    with job_directory(job) as directory:
        names = [host.name for host in placement.hosts]
        spec.served.update(names)
        call = None if options.call is None else Path(options.call[1])
        ranks = Ranks(
            placement.size,
            [] if spec.is_local else own_addresses(options.network_interface, names),
            secret,
            float("inf") if spec.is_local else options.start_timeout,
            directory,
            placement.names,
            {name for name in placement.names.values() if not name or is_here(name)},
            output,
            statistics,
            signals.changed.set,
            is_first,  # a restart has no input, because an earlier start has consumed it
            call,
        )
        planned = plan(spec, placement, directory, job, secret, ranks.addresses)
        for path, text in planned.files.items():
            path.write_text(text)
            path.chmod(0o700)
        if options.verbose:
            output.write_raw(f"{planned.describe()}\n".encode())
        elif sys.stderr.isatty() and is_first:
            say(placement.describe())
        if call is not None:
            Path(call, STARTED).touch()
        # What the workers are to start, as `Worker` takes it.
        start = {
            "command": list(spec.command),
            "directory": os.getcwd(),
            "environment": planned.environment,
            "open_files": OPEN_FILES[0] if spec.is_local else None,
            "server": spec.server if options.max_restarts else "",
        }
        ranks.open(start)
        place = ""

        async def sweep(grace: float) -> Collection[str]:
            nonlocal place
            place = _place(directory / POSTMORTEM, ranks.size)  # the clean-up removes these files
            ranks.note_silence()
            jobs = [job, spec.server]
            if [report.status for report in ranks.reports.values()] != [0] * ranks.size:
                has_failed()
                jobs = [job]
            if spec.is_local:
                await all_hosts.sweep_here(jobs, grace)
                return ()
            lost = await all_hosts.sweep_hosts(names, spec.reach, jobs, grace)
            spec.lost.update(lost)
            return lost

        withheld = () if spec.is_local else spec.dialect.withheld
        environment = {k: v for k, v in os.environ.items() if k not in withheld}
        try:
            verdict = await Job(
                planned.command,
                {**environment, **planned.settings},
                ranks,
                output,
                signals,
                options,
                sweep,
            ).run()
            has_traceback = verdict.culprit is not None and output.traceback(verdict.culprit)[0]
            is_open = verdict.status != 0 and verdict.asked and not has_traceback
            if is_open and folder is None:
                say(place or "to see where each rank was, add --postmortem FOLDER")
        finally:
            await ranks.close()
            if options.timeline is not None and Path(options.timeline).exists():
                say(f"timeline: python -m hvd_keras.timeline {options.timeline}")
            if options.stats:
                say(table(statistics))
    if folder is not None:
        _conclude(folder, verdict.status)
    return verdict
