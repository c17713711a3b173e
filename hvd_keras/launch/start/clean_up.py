"""Removes everything that a job left on its hosts."""

import asyncio
from collections.abc import Collection, Sequence

from hvd_keras.launch.errors import say
from hvd_keras.launch.onhost import sweep
from hvd_keras.launch.start.remote_shell import Reach, ask_all


async def sweep_here(jobs: list[str], grace: float) -> None:
    """Kill processes and remove files of these jobs on this host."""
    _tell_stuck("", await asyncio.to_thread(sweep.sweep, jobs, grace))


async def sweep_hosts(
    names: Collection[str], reach: Reach, jobs: Sequence[str], grace: float
) -> set[str]:
    """Kill processes and remove files of these jobs; returns the hosts that cannot be reached."""
    answers = await ask_all(names, reach, sweep, ["-I", "-S", "-", str(grace), *jobs])
    for name, answer in answers.items():
        if answer.problem and not answer.away:
            say(f"{name}: the clean-up failed: it {answer.problem}")
        _tell_stuck(f"{name}: ", answer.text.split())
    return {name for name, answer in answers.items() if answer.away}


def _tell_stuck(where: str, processes: Sequence[object]) -> None:
    if processes:
        say(f"{where}cannot kill process {', '.join(map(str, processes))} of the job")
