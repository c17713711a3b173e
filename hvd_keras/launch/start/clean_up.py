"""Removes everything that a job left on its hosts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from hvd_keras.launch.errors import say
from hvd_keras.launch.onhost import sweep
from hvd_keras.launch.start.remote_shell import Reach, answer, last_line, run_on_all


async def sweep_here(jobs: list[str], grace: float) -> None:
    """Kill processes and remove files of these jobs on this host."""
    _tell_stuck("", await asyncio.to_thread(sweep.sweep, jobs, grace))


async def sweep_hosts(
    names: Collection[str], reach: Reach, jobs: Sequence[str], grace: float
) -> set[str]:
    """Kill processes and remove files of these jobs; returns the hosts that cannot be reached."""
    command = [sys.executable, "-I", "-S", "-", str(grace), *jobs]
    text = Path(sweep.__file__).read_text()
    lost = set()
    for name, done in (await run_on_all(names, reach, command, text)).items():
        if done is None or reach.failure(done.returncode, done.stderr) is not None:
            lost.add(name)
        elif (told := answer(done.stdout, sweep.MARK)) is not None:
            _tell_stuck(f"{name}: ", told.split())
        else:
            what = f"exit status {done.returncode}: {last_line(done.stderr)}"
            say(f"{name}: the clean-up failed: {what}")
    return lost


def _tell_stuck(where: str, processes: Sequence[object]) -> None:
    if processes:
        told = ", ".join(map(str, processes))
        say(f"{where}cannot kill process {told} of the job")
