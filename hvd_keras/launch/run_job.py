"""Runs a job once, from start to clean-up."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile

from hvd_keras import postmortem, timeline
from hvd_keras.launch.errors import refusing, say
from hvd_keras.launch.follow.outcome import Verdict, judge, time_to_end
from hvd_keras.launch.follow.output import Output
from hvd_keras.launch.follow.statistics import table
from hvd_keras.launch.follow.supervise import OPEN_FILES, Signals, job_directory, wait_for
from hvd_keras.launch.job_spec import POSTMORTEM, JobSpec
from hvd_keras.launch.onhost import limits
from hvd_keras.launch.onhost.channel import new_secret
from hvd_keras.launch.onhost.process import die_with_parent
from hvd_keras.launch.onhost.worker import STARTED
from hvd_keras.launch.ranks import Ranks
from hvd_keras.launch.start.hosts import Placement
from hvd_keras.launch.start.mpirun import Plan

# What `input()` raises.
_NO_INPUT = "EOFError: EOF when reading a line"


def _conclusion(folder: Path, more: str = "") -> str:
    """Say what the files of the ranks' requests show."""
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
        """Run the job to its end and judge its outcome."""
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
                has_traceback = verdict.culprit is not None and output.traceback(verdict.culprit)[0]
                is_open = verdict.status != 0 and verdict.asked and not has_traceback
                if is_open and folder is None:
                    advice = "to see where each rank was, add --postmortem FOLDER"
                    say(self._place if "\n" in self._place else advice)
            finally:
                await self._ranks.close()
                if options.timeline is not None:
                    with contextlib.suppress(OSError):  # whoever opens it will see why
                        timeline.merge(Path(options.timeline))  # rank 0 has not if one failed
                    if Path(options.timeline).exists():
                        say(f"timeline: python -m hvd_keras.timeline {options.timeline}")
                if options.stats:
                    say(table(spec.statistics))
        if folder is not None:
            with contextlib.suppress(OSError):
                folder.rmdir()  # the ranks have left it empty if nothing went wrong
            if verdict.status != 0 and folder.exists():
                say(_conclusion(folder, f"\nmore: python -m hvd_keras.postmortem {folder}"))
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
            self._output.write_raw(f"{planned.describe()}\n".encode())
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
            text = self._output.traceback(verdict.culprit, recent=repeats)[0]
        elif verdict.waiting is not None:
            text = self._output.traceback(verdict.waiting)[1]
        for number, line in enumerate(verdict.lines):
            say(line)
            if number == 0 and text:
                self._output.write_raw(text.encode() + b"\n")
        if verdict.culprit and _NO_INPUT in self._output.traceback(verdict.culprit)[1]:
            say(
                "only rank 0 has standard input: read it there, and send it to the others with "
                "hvd.broadcast_object"
            )
        return verdict
