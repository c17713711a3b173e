"""Runs a job, and restarts it after a failure on the hosts that answer."""

import asyncio
import dataclasses
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_keras.launch import errors, options
from hvd_keras.launch.errors import UsageError, say, say_once
from hvd_keras.launch.follow.outcome import Verdict
from hvd_keras.launch.follow.output import Output
from hvd_keras.launch.follow.supervise import Signals, wait_for
from hvd_keras.launch.job_spec import JobSpec
from hvd_keras.launch.onhost import host_facts, limits
from hvd_keras.launch.run_job import Job
from hvd_keras.launch.start import hosts
from hvd_keras.launch.start.hosts import Facts, Host, Placement
from hvd_keras.launch.start.remote_shell import Remains, ask_all


async def run(spec: JobSpec) -> Verdict:
    """Run the job until it succeeds, the user ends it, or the restarts are used up."""
    signals, given = Signals(), spec.options
    output = Output(given.prefix, given.output_dir, given.verbose, signals)
    errors.voice = output.say
    try:
        return await _run(spec, signals, output)
    finally:
        if given.max_restarts:  # there may be what was to help a restart
            reached = spec.remains.hosts - spec.remains.lost
            if await spec.remains.sweep(reached, servers=True):
                await _sweep_lost(spec.remains, signals, limits.SILENCE)
        while signals.patient() and not output.empty:
            await wait_for(signals.changed, limits.SLOW_READER_CHECK)
        errors.voice = None


async def _run(spec: JobSpec, signals: Signals, output: Output) -> Verdict:
    given = spec.options
    placement = await signals.heed(place(spec))
    if placement is None:
        assert signals.stop is not None
        say(f"{signal.Signals(signals.stop).name} received before the start")
        return Verdict(128 + signals.stop, [])
    size = placement.size
    least = given.min_np or size
    if least > size:
        raise UsageError(f"--min-np got {least}; expected at most the number of ranks, {size}")
    commits = Path.cwd() / f"hvd-commits-{secrets.token_hex(4)}"
    if given.max_restarts and "HVD_COMMITS" not in os.environ:
        given.settings["HVD_COMMITS"] = str(commits)
    verdict = await Job(spec, placement, signals, output).run()
    pause = lasted = 0.0
    for number in range(1, given.max_restarts + 1):
        if verdict.status == 0 or output.error:
            break
        if pause:
            say(f"the last start ended after {lasted:.0f} s: the next one comes in {pause:.0f} s")
        if not await signals.heed(asyncio.sleep(pause, True)):
            break
        if not spec.is_local:
            # The clean-up has just reached its hosts, unless there was a pause.
            known = {} if pause or spec.remains.lost else placement.facts
            placement = await signals.heed(_replace(spec, size, least, known))
            if placement is None:
                break
        say(f"restart {number} of {given.max_restarts}: {placement.describe()}")
        start = time.monotonic()
        verdict = await Job(spec, placement, signals, output).run()
        lasted = time.monotonic() - start
        is_quick = lasted < limits.QUICK
        pause = min(2 * pause or limits.FIRST_PAUSE, limits.LONGEST_PAUSE) if is_quick else 0.0
    if verdict.status == 0:
        shutil.rmtree(commits, ignore_errors=True)
        await _sweep_lost(spec.remains, signals, limits.SILENCE)
    elif len(spec.remains.starts) > 1:  # what the first has lost may be there again
        await _sweep_lost(spec.remains, signals, 0.0)
    if verdict.status != 0 and commits.exists():
        say(f"to continue from the last commit, start the job again with HVD_COMMITS={commits}")
    if not verdict.apart or given.no_init:
        return verdict
    if verdict.asked:
        say(
            f"{verdict.apart}. Call hvd.init() first, on every rank, and end if it fails; or use "
            "--no-init if it is intended"
        )
    elif verdict.status == 0 and given.call is None:  # a function has the ranks' environment
        say(f"{verdict.apart}. {_LOST}")
    else:
        return verdict
    return dataclasses.replace(verdict, status=verdict.status or 1)


_LOST = (
    "A script of one process, without hvd_keras, trains on all ranks by `hvdrun --auto`. One that "
    "uses hvd_keras calls hvd.init() first, on every rank. If it does: docker run, "
    "sudo, systemd-run and env -i remove hvdrun's environment. Start hvdrun inside (`docker run "
    "IMAGE hvdrun -np 2 train.py`), or pass on $TMPDIR and all variables that begin with HVD, "
    "OMPI_, PMI or SLURM_. If it trains nothing: add --no-init"
)


async def _sweep_lost(remains: Remains, signals: Signals, timeout: float) -> None:
    """Clean up the hosts that could not be reached when the job had ended."""
    limit = time.monotonic() + timeout
    while remains.lost and signals.stop is None:
        await signals.heed(remains.sweep(remains.lost, servers=True))
        if time.monotonic() >= limit:
            break
        await signals.heed(asyncio.sleep(limits.WAIT_AGAIN))
    for name in sorted(remains.lost):
        say(f"{name} cannot be reached; processes or files of the job may remain there")


# What must be equal on all hosts.
_EQUAL = {name: name.lower() for name in ("Python", "hvd_keras", "TensorFlow", "Keras")}
_EQUAL["hvd_keras in"] = "place"


def difference(
    theirs: Mapping[str, Any], own: Mapping[str, Any], directory: str, program: str
) -> str:
    """Return why a host with these facts cannot take part; empty if it can."""
    for name, fact in _EQUAL.items():
        got, expected = theirs[fact], own[fact]
        if got != expected:
            has = f"has {name} {got}" if got else f"has no {name}"
            return f"{has}; expected {expected}, as here"
    if not theirs["directory"]:
        return f"has no folder {directory}; expected the folder in which hvdrun was started"
    if not theirs["program"]:
        return f"has no program {program}; expected it at the same path on all hosts"
    return ""


async def place(spec: JobSpec, look: bool = True) -> Placement:
    """Place the ranks for the first start; asks all hosts, or if not `look`, as few as possible."""
    limit = time.monotonic() + spec.options.wait_for_hosts
    wanted = await spec.wanted()
    if spec.is_local:
        return Placement(wanted, {"": {"host": socket.gethostname()}})
    found, asked = Placement(wanted, {}), wanted
    if not look and all(host.slots for host in wanted):
        here = [host for host in wanted if hosts.is_here(host.name)]
        asked = here if len(here) > 1 else []  # `_look` refuses this host's second name
    if asked:
        found, problems, away = await _look(spec, asked, {})
        while away and look and time.monotonic() < limit:
            say_once(f"waiting for {', '.join(away)} (--wait-for-hosts)")
            await asyncio.sleep(limits.WAIT_AGAIN)
            found, problems, away = await _look(spec, await spec.wanted(), {})
        if problems:
            raise UsageError("\n".join(f"{name} {text}" for name, text in problems.items()))
    slots = found.size
    size = spec.options.size or slots
    if size > slots and not spec.options.oversubscribe:
        there = f"{slots} slots ({', '.join(map(str, found.hosts))})"
        raise UsageError(
            f"-np got {size}, but the hosts have {there}; expected at most {slots}, more slots "
            "with -H, or --oversubscribe"
        )
    return found.share(size)


async def _look(
    spec: JobSpec, wanted: Sequence[Host], known: Facts
) -> tuple[Placement, Mapping[str, str], Sequence[str]]:
    """Ask each host for its facts, unless they are `known`, and compare them with ours.

    Returns the room for ranks, on hosts without problems; the problems; and which of these hosts
    could not be reached.
    """
    arguments = os.getcwd(), spec.command[0]
    names = [host.name for host in wanted if host.name not in known]
    words = ["-I", "-", *arguments, *sys.path]
    answers = await ask_all(names, spec.remains.reach, host_facts, words)
    facts = {host.name: known[host.name] for host in wanted if host.name in known}
    facts |= {name: json.loads(answer.text) for name, answer in answers.items() if answer.text}
    own = host_facts.look(*arguments)
    problems = {
        name: problem
        for name, answer in answers.items()
        if (problem := answer.problem or difference(facts[name], own, *arguments))
    }
    owners: dict[str, str] = {}
    for name, theirs in facts.items():
        twin = owners.setdefault(theirs["host"], name)
        if twin != name and name not in problems:  # MPI would assume that they share memory
            problems[name] = (
                f"calls itself {theirs['host']!r}, as {twin} does; expected distinct host names "
                "(see `hostname`), or one entry if both are the same host"
            )
    away = sorted(name for name, answer in answers.items() if answer.away)
    given, counted = spec.options, []
    for host in wanted:
        if host.name not in problems:
            gpus, cores = facts[host.name]["gpus"], facts[host.name]["cores"]
            ranks = host.slots or given.per_host or (given.size == options.AUTO and gpus) or cores
            counted.append(Host(host.name, ranks))
    return Placement(counted, facts), problems, away


async def _replace(spec: JobSpec, size: int, least: int, known: Facts) -> Placement | None:
    """Place the ranks for a restart; None if too few hosts answer for too long."""
    limit = time.monotonic() + spec.options.restart_timeout
    while True:
        wanted: Sequence[Host] = []
        try:
            wanted = await spec.wanted()
        except UsageError as error:  # the hosts' list may be there again soon
            say_once(f"no hosts: {error}")
        found, problems, _ = await _look(spec, wanted, known)
        # Processes may still run on a host that was lost.
        await spec.remains.sweep(spec.remains.lost & found.facts.keys())
        for name, text in problems.items():
            say_once(f"left out: {name} {text}")
        slots = found.size
        if slots >= least or (slots and spec.options.oversubscribe):
            return found.share(size if spec.options.oversubscribe else min(size, slots))
        if time.monotonic() >= limit:
            there = f"the hosts that answer have {slots} slots"
            say(f"no restart: {there}, and {least} are needed (--min-np)")
            return None
        await asyncio.sleep(limits.LOOK_AGAIN)
        known = {}
