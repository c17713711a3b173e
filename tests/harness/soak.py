"""Trains on three hosts while a random fault comes every 20 to 60 s, and compares the end.

``python -m tests.harness.soak --minutes 30``; the weights must be those of an undisturbed run, bit
for bit, and nothing may be left on any host. Goodput with one kill a minute, the part of the time
that went into steps which count: ``--minutes 20 --every 60 --only "kill a rank"``.
"""

import argparse
import itertools
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.harness import cluster, restarting
from tests.harness.cluster import Running
from tests.harness.hosts import Host, Hosts, missing

HOSTS = "server1:1,server2:1,server3:1"
PAUSE = 0.1  # seconds a step
# Part of the time in which it trains; the rest goes into starts, or is not needed.
SHARE = 0.4
STEPS = restarting.ROWS // restarting.BATCH // 3  # of an epoch
START = 300.0  # seconds, far above what a start takes
# Seconds; a stopped rank counts as lost then, and one that was stopped while it started.
TIMEOUT, FIRST_TIMEOUT = 15, 40
RANK = r"^\S+ \S+/restarting\.py "  # not hvdrun, whose command ends with that of the ranks
SETTINGS = {
    "HVD_TIMEOUT_SECONDS": str(TIMEOUT),
    "HVD_FIRST_TIMEOUT_SECONDS": str(FIRST_TIMEOUT),
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def kill(words: str, number: int = signal.SIGKILL) -> Callable[[Running, int, random.Random], bool]:
    """Sends a signal to these processes of a host, if there are some."""

    def fault(job: Running, host: int, _: random.Random) -> bool:
        if not job.pids(host, words):
            return False
        job.kill(host, words, number)
        return True

    return fault


def disturb(
    begin: Callable[[Host], None], end: Callable[[Host], None], least: float, most: float
) -> Callable[[Running, int, random.Random], bool]:
    """Something that lasts so many seconds."""

    def fault(job: Running, host: int, chance: random.Random) -> bool:
        begin(job.hosts[host])
        time.sleep(chance.uniform(least, most))
        end(job.hosts[host])
        return True

    return fault


FAULTS = {
    "kill a rank": kill(RANK),
    "stop a rank": kill(RANK, signal.SIGSTOP),
    "kill a worker": kill("onhost.worker"),
    "kill a daemon": kill("prted "),
    "blip": disturb(Host.unplug, Host.plug, 1, 5),
    "cut": disturb(Host.unplug, Host.plug, 12, 20),
    "reset": disturb(Host.reset, Host.accept, 1, 5),
    "crash": disturb(Host.crash, Host.boot, 1, 10),
}
NOT_HERE = ("crash", "cut")  # hvdrun's own host, the first, stays


def steps_done(job: Running) -> int:
    """How many steps of the training count until now."""
    found = re.findall(r"epoch (\d+) batch (\d+)$", job.output, re.MULTILINE)
    return max((int(epoch) * STEPS + int(batch) + 1 for epoch, batch in found), default=0)


def trouble(
    job: Running,
    seconds: float,
    chance: random.Random,
    options: Any,
    look: Callable[[], object],
) -> Counter[str]:
    """Faults until the time is over or the job has ended, and looks; returns what has happened."""
    happened: Counter[str] = Counter()
    limit = time.monotonic() + seconds
    while True:
        wait = options.every or chance.uniform(20, 60)
        while wait > 0 and job.process.poll() is None and time.monotonic() < limit:
            time.sleep(min(1.0, wait))
            wait -= 1
            look()
        if job.process.poll() is not None or time.monotonic() >= limit:
            return happened
        name = options.only or chance.choice(list(FAULTS))
        host = chance.randrange(1 if name in NOT_HERE else 0, len(job.hosts))
        if FAULTS[name](job, host, chance):
            happened[name] += 1
            print(f"{limit - time.monotonic():.0f} s left: {name} on server{host + 1}", flush=True)


def goodput(job: Running, seconds: float, chance: random.Random, options: Any) -> Counter[str]:
    """As ``trouble``; also prints which part of the time went into steps that count."""
    seen: list[tuple[float, int]] = []
    job.wait_for("batch", 1)
    happened = trouble(
        job, seconds, chance, options, lambda: seen.append((time.monotonic(), steps_done(job)))
    )
    # In most seconds in which it trains nothing is wrong, so the median is the undisturbed rate.
    rate = statistics.median(
        (d - b) / (t - s) for (s, b), (t, d) in itertools.pairwise(seen) if d > b
    )
    took, done = seen[-1][0] - seen[0][0], seen[-1][1] - seen[0][1]
    print(
        f"soak: goodput {done / rate / took:.3f}: {done} steps of {1 / rate:.3f} s in {took:.0f} s",
        flush=True,
    )
    return happened


def end(job: Running, seconds: float) -> str:
    """The digest of the end; exits if there is none within so many seconds."""
    try:
        status = job.process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        sys.exit(f"soak: hvdrun has not ended within {seconds:.0f} s:\n{job.output[-5000:]}")
    found = re.findall(r"ends with (\w+)", job.output)
    if status != 0 or len(found) != 1:
        sys.exit(f"soak: hvdrun has ended with status {status}:\n{job.output[-5000:]}")
    return str(found[0])


def main() -> None:
    """Everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: %(default)s)")
    parser.add_argument("--every", type=float, help="seconds between faults (default: 20 to 60)")
    parser.add_argument("--only", choices=FAULTS, help="the only kind of fault")
    options = parser.parse_args()
    if reason := missing():
        sys.exit(f"soak: {reason}")
    seconds = options.minutes * 60
    share = 1.6 * SHARE if options.only else SHARE
    epochs = max(3, round(seconds * share / PAUSE / STEPS))
    script = [sys.executable, restarting.__file__]
    environment = cluster.environment_of_tests(**SETTINGS)
    with tempfile.TemporaryDirectory() as name, Hosts(3) as hosts:
        folders = [pathlib.Path(name, what) for what in ("undisturbed", "disturbed")]
        for folder in folders:
            folder.mkdir()
        command = [*script, "checkpoints", str(epochs)]
        options_ = ["-H", HOSTS, "--max-restarts", "1000"]
        print(f"soak: {epochs} epochs of {STEPS} steps, undisturbed", flush=True)
        # Nobody is stopped here, and the machine may have other work.
        patient = cluster.environment_of_tests()
        with cluster.started(
            hosts, "-H", HOSTS, *command, "0", folder=folders[0], env=patient
        ) as job:
            expected = end(job, seconds + START)
        with cluster.started(
            hosts, *options_, *command, str(PAUSE), folder=folders[1], env=environment
        ) as job:
            happened = goodput(job, seconds, random.Random(options.seed), options)
            got = end(job, seconds + START)
            restarts = job.output.count("hvdrun: restart ")
        left = {host.name: [*host.processes().values(), *host.leftovers()] for host in hosts}
    print(f"soak: {sum(happened.values())} faults {dict(happened)}, {restarts} restarts")
    if got != expected or any(left.values()):
        sys.exit(f"soak: ends with {got}, expected {expected}; left: {left}")
    print("soak: the same weights as undisturbed, and nothing is left")


if __name__ == "__main__":
    main()
