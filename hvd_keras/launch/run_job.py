"""Runs a job, from start to clean-up, and restarts it after a failure on the hosts that answer."""

import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from hvd_keras import postmortem, timeline
from hvd_keras.launch import errors, options
from hvd_keras.launch.errors import AwayError, UsageError, refusing, say, say_once
from hvd_keras.launch.follow.outcome import Verdict, judge, time_to_end
from hvd_keras.launch.follow.output import Output
from hvd_keras.launch.follow.statistics import table
from hvd_keras.launch.follow.supervise import OPEN_FILES, Signals, job_directory, wait_for
from hvd_keras.launch.job_spec import POSTMORTEM, JobSpec
from hvd_keras.launch.onhost import host_facts, limits
from hvd_keras.launch.onhost.channel import new_secret
from hvd_keras.launch.onhost.process import die_with_parent
from hvd_keras.launch.onhost.worker import STARTED
from hvd_keras.launch.ranks import Ranks
from hvd_keras.launch.start import hosts
from hvd_keras.launch.start.hosts import Facts, Host, Placement
from hvd_keras.launch.start.mpirun import Plan
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
        return _stopped(signals, "the start")
    size = placement.size
    least = given.min_np or size
    if least > size:
        raise UsageError(f"--min-np got {least}; expected at most the number of ranks, {size}")
    most = given.max_np or size
    if most < size:
        raise UsageError(f"--max-np got {most}; expected at least the number of ranks, {size}")
    options.tell_without_effect(given)
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
        if await signals.heed(asyncio.sleep(pause, True)) and not spec.is_local:
            # The clean-up has just reached its hosts, unless there was a pause.
            known = {} if pause or spec.remains.lost else placement.facts
            placement = await signals.heed(_replace(spec, range(least, most + 1), size, known))
        if signals.stop is not None:
            if verdict.status != 128 + signals.stop:  # the job has not told of it
                verdict = _stopped(signals, "the restart")
            break
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


def _stopped(signals: Signals, what: str) -> Verdict:
    """Say that a signal came before `what`, while no rank ran."""
    assert signals.stop is not None
    say(f"{signal.Signals(signals.stop).name} received before {what}")
    return Verdict(128 + signals.stop, [])


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
    while True:
        try:
            return await _try_to_place(spec, look)
        except AwayError as error:
            if not look or time.monotonic() >= limit:
                raise
            say_once(f"waiting for hosts (--wait-for-hosts): {error}")
        await asyncio.sleep(limits.WAIT_AGAIN)


async def _try_to_place(spec: JobSpec, look: bool) -> Placement:
    wanted = await spec.wanted()
    if spec.is_local:
        return Placement(wanted, {"": {"host": socket.gethostname()}})
    found, asked = Placement(wanted, {}), wanted
    if not look and all(host.slots for host in wanted):
        here = [host for host in wanted if hosts.is_here(host.name)]
        asked = here if len(here) > 1 else []  # `_look` refuses this host's second name
    if asked:
        found, problems, away = await _look(spec, asked, {})
        if problems:
            told = "\n".join(f"{name} {text}" for name, text in problems.items())
            raise AwayError(told) if away else UsageError(told)
    slots = found.size
    size = spec.options.size or slots
    if size > slots and not spec.options.oversubscribe:
        there = f"{slots} slots ({', '.join(map(str, found.hosts))})"
        error = UsageError if spec.options.host_discovery_script is None else AwayError
        raise error(
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


async def _replace(spec: JobSpec, sizes: range, first: int, known: Facts) -> Placement | None:
    """Place the ranks for a restart; None if too few hosts answer for too long.

    ``sizes``: how many ranks there may be; ``first``: how many there were at first.
    """
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
        slots, may_share = found.size, spec.options.oversubscribe
        if slots >= sizes[0] or (slots and may_share):
            return found.share(max(min(sizes[-1], slots), first if may_share else 0))
        if time.monotonic() >= limit:
            there = f"the hosts that answer have {slots} slots"
            say(f"no restart: {there}, and {sizes[0]} are needed (--min-np)")
            return None
        await asyncio.sleep(limits.LOOK_AGAIN)
        known = {}


# What `input()` raises.
_NO_INPUT = "EOFError: EOF when reading a line"


def _conclusion(folder: Path, more: str = "") -> str:
    try:
        return f"postmortem: {postmortem.conclusion(folder)}{more}"
    except (OSError, ValueError) as error:
        return f"postmortem: {error}"


def _new_folder(parent: str) -> Path:
    """Make the next folder start-N, for the files of one start."""
    number = 1
    with refusing(f"--postmortem got {parent!r}, where no folder can be made"):
        while (folder := Path(parent).absolute() / f"start-{number}").exists():
            number += 1
        folder.mkdir(parents=True)
    return folder


@dataclass
class Job:
    """One start of a job: mpirun, and its workers, which report through `Ranks`."""

    _spec: JobSpec
    _placement: Placement
    _signals: Signals
    _output: Output
    _number: str = field(default_factory=lambda: secrets.token_hex(8))
    _stopping: bool = False
    _place: str = ""  # where ranks were that have ended without a traceback

    async def run(self) -> Verdict:
        spec, options, output = self._spec, self._spec.options, self._output
        folder = None if options.postmortem is None else _new_folder(options.postmortem)
        if folder is not None:
            options.settings["HVD_POSTMORTEM"] = str(folder)
        if options.timeline is not None:
            with refusing(f"--timeline got {options.timeline!r}, which cannot be replaced"):
                timeline.remove(Path(options.timeline))
        output.start()
        spec.statistics.start(self._placement.size)
        spec.remains.hosts.update(host.name for host in self._placement.hosts)
        spec.remains.starts.append(self._number)
        with job_directory(self._number) as self._directory, TemporaryFile() as self._text:
            planned = self._prepare()
            try:
                verdict = self._verdict(await self._follow(planned))
                has_traceback = verdict.culprit is not None and self._traceback(verdict.culprit)[0]
                is_open = verdict.status != 0 and verdict.asked and not has_traceback
                if is_open and folder is None:
                    advice = "to see where each rank was, add --postmortem FOLDER"
                    say(self._place if "\n" in self._place else advice)
            finally:
                await self._ranks.close()
                if options.timeline is not None:
                    try:
                        for file in timeline.of_job(Path(options.timeline)):
                            timeline.merge(file)  # rank 0 has not if one failed
                        if Path(options.timeline).exists():
                            name = shlex.quote(options.timeline)
                            say(f"timeline: python -m hvd_keras.timeline {name}")
                    except OSError as error:
                        say(f"timeline: {error}; the ranks' files are beside it")
                if options.stats:
                    say(table(spec.statistics))
        if folder is not None:
            with contextlib.suppress(OSError):
                folder.rmdir()  # the ranks have left it empty if nothing went wrong
            if verdict.status != 0 and folder.exists():
                more = f"\nmore: python -m hvd_keras.postmortem {shlex.quote(str(folder))}"
                say(_conclusion(folder, more))
        return verdict

    def _prepare(self) -> Plan:
        """Listen to the workers, and make the files that mpirun needs."""
        spec, options, placement = self._spec, self._spec.options, self._placement
        secret, changed = new_secret(), self._signals.changed.set
        self._ranks = Ranks(spec, placement, self._directory, secret, self._output, changed)
        names = self._directory, self._number, secret, self._ranks.addresses
        planned = spec.plan(placement, *names)
        for path, text in planned.files.items():
            path.write_text(text)
            path.chmod(0o700)
        if options.verbose:
            self._output.write_raw(f"{planned.describe()}\n".encode(errors="surrogateescape"))
        elif sys.stderr.isatty() and spec.statistics.starts == 1:
            say(placement.describe())
        if options.call is not None:
            Path(options.call[1], STARTED).touch()
        # What the workers are to start, as `Worker` takes it.
        start = {
            "command": list(spec.command),
            "directory": os.getcwd(),
            "environment": planned.environment,
            "open_files": OPEN_FILES[0] if spec.is_local else None,
            "server": spec.remains.server if options.max_restarts else "",
            "stop_timeout": options.stop_timeout,
        }
        self._ranks.open(start)
        return planned

    async def _follow(self, planned: Plan) -> set[str]:
        """Run mpirun and clean up; returns the lost hosts."""
        hvdrun = os.getpid()
        self._mpirun = mpirun = subprocess.Popen(
            planned.command,
            env={**os.environ, **planned.settings},
            stdin=subprocess.DEVNULL,
            stdout=2 if self._spec.options.verbose else self._text,
            stderr=subprocess.STDOUT,
            # In a separate session it gets no Ctrl-C of the terminal.
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(hvdrun),
        )
        self._signals.forward = lambda number: self._ranks.tell(signal=number)
        try:
            await self._wait()
        finally:
            if mpirun.poll() is None:
                os.killpg(mpirun.pid, signal.SIGKILL)
                mpirun.wait()
            self._ranks.release()
            await self._until(lambda: not self._ranks.live(), limits.GRACE)
            lost = await self._sweep()
            self._output.finish()
        return lost

    async def _sweep(self) -> set[str]:
        """Clean up all hosts; returns those that are lost."""
        folder = self._directory / POSTMORTEM
        if len([*folder.glob("rank-*.requests")]) == self._placement.size:  # all have joined, here
            self._place = _conclusion(folder)
        self._ranks.note_silence()
        grace = 0.0 if self._signals.hurry else limits.SWEEP_GRACE
        names = [host.name for host in self._placement.hosts]
        return await self._spec.remains.sweep(names, grace)

    async def _wait(self) -> None:
        """Wait for the end of the job and of mpirun; end the job where that must be done."""
        # Workers have the patience to let their ranks save their work, and report how they ended;
        # mpirun is ended when they have.
        await self._until(self._must_end, float("inf"))
        if not self._all_over() and not self._has_ended():
            self._stopping = True
            # SLURM signals the ranks' workers, and hvdrun perhaps not.
            signalled = self._signals.stop or any(one.by_signal for one in self._ranks.reports)
            grace = self._spec.options.stop_timeout if signalled else limits.GRACE
            self._ranks.tell(stop=grace)
            await self._until(self._ranks.over, grace + limits.KILL_GRACE)
        self._ranks.release()
        if not self._stopping:
            await self._until(self._has_ended, limits.GRACE)
        if not self._has_ended():
            self._stopping = True
            self._mpirun.terminate()
            await self._until(self._has_ended, limits.OVER_GRACE)

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for it, at most so long, and not when the user is in a hurry."""
        limit = time.monotonic() + seconds
        while not (condition() or self._signals.hurry) and (left := limit - time.monotonic()) > 0:
            await wait_for(self._signals.changed, min(left, limits.CHECK))

    def _has_ended(self) -> bool:
        return self._mpirun.poll() is not None

    def _all_over(self) -> bool:
        return all(report.over for report in self._ranks.reports)

    def _must_end(self) -> bool:
        return (
            self._has_ended()
            or self._ranks.check()
            or self._all_over()
            or time_to_end(self._ranks.reports, time.monotonic())
            or self._output.error is not None
            or self._signals.stop is not None
        )

    def _traceback(self, rank: int, recent: bool = True) -> tuple[str, str]:
        """What `Output.traceback` has, unless the rank has handled that error and gone on."""
        report = self._ranks.reports[rank]
        if report.status != 1:
            return "", ""
        # A rank that has joined tells of an error that ends it, but not with --verbose, and not if
        # the script prints it and calls sys.exit(1).
        tells = "joined" in report.marks and not self._spec.options.verbose
        return self._output.traceback(rank, recent, last=tells and not report.error)

    def _verdict(self, lost: Collection[str]) -> Verdict:
        reports = self._ranks.reports
        error = self._output.error
        if self._signals.stop is not None:
            cause = f"{signal.Signals(self._signals.stop).name} received; all ranks were ended"
            verdict = Verdict(128 + self._signals.stop, [cause])
        elif error is not None:
            cause = f"cannot write the ranks' output: {error.strerror}; the job was ended"
            verdict = Verdict(1, [cause])
        else:
            mpirun_status = self._mpirun.returncode
            was_killed = mpirun_status < 0 and not self._stopping
            verdict = judge(reports, mpirun_status, lost, was_killed=was_killed)
            if self._ranks.problem:
                lines = [self._ranks.problem, *verdict.lines[1:]]
                verdict = Verdict(1, lines, explained=False)
        if not verdict.explained or (
            verdict.status != 0 and not any(report.started for report in reports)
        ):
            self._text.seek(0)
            self._output.write_raw(self._text.read())
        text = ""
        if verdict.culprit is not None:
            # An exception of `hvd_keras.run` repeats it, even if it has been printed just before.
            repeats = self._spec.options.call is not None
            text = self._traceback(verdict.culprit, recent=repeats)[0]
        elif verdict.waiting is not None:
            text = self._output.traceback(verdict.waiting)[1]
        for number, line in enumerate(verdict.lines):
            say(line)
            if number == 0 and text:
                self._output.write_raw(text.encode() + b"\n")
        if verdict.culprit and _NO_INPUT in self._traceback(verdict.culprit)[1]:
            say(
                "only rank 0 has standard input: read it there, and send it to the others with "
                "hvd.broadcast_object"
            )
        return verdict
