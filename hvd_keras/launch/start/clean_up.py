"""Removes everything that a job left on its hosts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from hvd_keras.launch.onhost import sweep
from hvd_keras.launch.onhost.process import GRACE
from hvd_keras.launch.start.remote_shell import Reach, run_on_all


def sweep_hosts(names: Iterable[str], reach: Reach, jobs: Sequence[str], grace: float) -> set[str]:
    """Kill processes and remove files of these jobs; returns the hosts that cannot be reached."""
    command = [sys.executable, "-I", "-S", "-", str(grace), *jobs]
    text = Path(sweep.__file__).read_text()
    lost = set()
    limit = grace + sweep.GONE + GRACE
    for name, done in run_on_all(names, reach, command, text, limit).items():
        if done is None or reach.failure(done.returncode, done.stderr) is not None:
            lost.add(name)
        elif done.stdout.strip():
            print(f"hvdrun: {name}: {done.stdout.strip()}", file=sys.stderr, flush=True)
    return lost
