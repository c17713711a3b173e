"""The program `hvdrun`: the launcher, and what it knows of programs written for Horovod."""

import asyncio
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

from hvd_keras.auto import launching
from hvd_keras.horovod import horovodrun
from hvd_keras.launch import job_spec, options, run_job
from hvd_keras.launch.errors import UsageError, say
from hvd_keras.launch.follow import statistics
from hvd_keras.launch.follow.supervise import raise_open_files
from hvd_keras.launch.onhost.process import die_with_parent

EXTENSIONS = (launching.EXTENSION, horovodrun.EXTENSION)


def _launch() -> int:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UsageError("the current folder was deleted; change to one that exists") from error
    given = options.parse(None, EXTENSIONS)
    if given.call is not None:
        die_with_parent(int(given.call[0]), signal.SIGTERM)
    asked = job_spec.build(given)
    if asked.options.dry_run:
        placement = asyncio.run(run_job.place(asked, look=False))
        names = (Path("JOB_DIRECTORY"), "JOB", "", "HVDRUN_ADDRESS")
        print(asked.plan(placement, *names).describe())
        print(f"each rank: {shlex.join(asked.command)}")
        return 0
    raise_open_files()
    if given.metrics is not None:
        address, port = given.metrics
        statistics.serve(address, port, asked.statistics)
    try:
        return asyncio.run(run_job.run(asked)).status
    finally:
        if given.call is not None and os.getppid() != int(given.call[0]):
            shutil.rmtree(given.call[1], ignore_errors=True)  # its owner was killed


def main() -> int:
    """Run `hvdrun` with this process's arguments; returns the exit status."""
    # The null device stands for each standard stream that the caller has closed.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:  # it was closed when Python began
            setattr(sys, name, os.fdopen(number, "w", closefd=False, errors="backslashreplace"))
    try:
        return _launch()
    except KeyboardInterrupt:  # before `Signals` listens
        say("SIGINT received before the start")
        return 128 + signal.SIGINT
    except UsageError as error:
        for line in str(error).splitlines():
            say(line)
        return 2


if __name__ == "__main__":
    sys.exit(main())
