"""hvdrun: from the command line to the exit status."""

import asyncio
import os
import shlex
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from hvd_keras.launch import job_spec, options, plan, restarts
from hvd_keras.launch.errors import UsageError, say
from hvd_keras.launch.follow import metrics
from hvd_keras.launch.follow.outcome import Verdict
from hvd_keras.launch.follow.supervise import Signals, raise_open_files
from hvd_keras.launch.onhost.process import die_with_parent


def _launch(arguments: Sequence[str] | None) -> int:
    given = options.parse(arguments)
    if given.call is not None:
        die_with_parent(int(given.call[0]), signal.SIGTERM)
    asked = job_spec.build(given)
    if asked.options.dry_run:
        placement = asyncio.run(restarts.place(asked, look=False))
        names = (Path("JOB_DIRECTORY"), "JOB", plan.HIDDEN, "HVDRUN_ADDRESS")
        print(plan.plan(asked, placement, *names).describe())
        print(f"each rank: {shlex.join(asked.command)}")
        return 0
    raise_open_files()
    if given.metrics is not None:
        metrics.serve(given.metrics, asked.statistics)
    try:
        return asyncio.run(_run(asked)).status
    finally:
        if given.call is not None and os.getppid() != int(given.call[0]):
            shutil.rmtree(given.call[1], ignore_errors=True)  # its owner was killed


async def _run(asked: job_spec.JobSpec) -> Verdict:
    return await restarts.run(asked, Signals())


def _open_standard_streams() -> None:
    """Open the null device for each standard stream that the caller has closed."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _check_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UsageError("the current folder was deleted; change to one that exists") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `hvdrun` with these arguments (default: the process's own); returns the exit status."""
    _open_standard_streams()
    try:
        _check_folder()
        return _launch(arguments)
    except KeyboardInterrupt:  # before `Signals` listens
        say("SIGINT received before the start")
        return 128 + signal.SIGINT
    except UsageError as error:
        for line in str(error).splitlines():
            say(line)
        return 2
