"""Runs the command of one rank and reports how it ended.

mpirun or srun starts a worker once per rank, on every host (see `start_worker.py`). It connects to
hvdrun, learns the command, and passes the command's input, its output and the report of its end
through that connection: mpirun would join pieces of lines, mix in messages of its own, and its exit
status can be 0 for a job that was killed. A rank whose hvdrun or daemon is gone is ended.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .channel import (
    LARGE_PIECE,
    PIECE,
    SILENCE,
    Channel,
    ProtocolError,
    error_text,
    silence,
    watch_liveness,
)
from .cores import usable_cores
from .process import GRACE, die_with_parent
from .rsh_agent import DAEMON
from .sweep import AGENT

# Environment variables through which hvdrun reaches its workers. The job's number stays in the
# environment of the command and of all that it starts, so that they can be found and ended.
SECRET = "HVDRUN_SECRET"
ADDRESSES = "HVDRUN_ADDRESSES"
JOB = "HVDRUN_JOB"

# The rank as Open MPI 4 and 5, PMIx, MPICH and SLURM tell it; the surest first.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")

# Environment variables for the command: the file that `hvd.init()` makes, and the folder that
# holds what `hvd_keras.run` calls.
ARRIVAL = "HVDRUN_ARRIVAL"
SCRIPT_HAS_ENDED = "ended"
MARKS = ("asked-for", "joined", "chosen")
CALL = "HVDRUN_CALL"

# Its files: the pickled function with its arguments, and what the function has returned.
FUNCTION = "function"
RESULT = "result"

# Seconds to reach hvdrun: of one try, and of all of them.
CONNECT_TIMEOUT = 5.0
REACH_TIMEOUT = 30.0

# Seconds between two looks whether hvdrun's host and mpirun's daemon still live.
CHECK = 0.5

# Bytes that may wait for a slow connection before the command has to wait, too.
BACKLOG = 1 << 18

# The script that ends everything left of a job on this host.
SWEEP = Path(__file__).with_name("sweep.py")


def find_rank(environment: Mapping[str, str]) -> int:
    """Return this process's rank, which mpirun has put into the environment."""
    for name in RANK_VARIABLES:
        if name in environment:
            return int(environment[name])
    raise SystemExit(
        f"hvdrun: mpirun gave this process no rank: none of {', '.join(RANK_VARIABLES)} is set; "
        "use Open MPI's or MPICH's mpirun (hvdrun --mpirun PATH)"
    )


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[str]:
    """Yield a short path of a folder, because a socket's address has at most 107 characters."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _connect_to(address: str) -> socket.socket:
    if address.startswith("/"):
        connection = socket.socket(socket.AF_UNIX)
        path = Path(address)
        with in_folder(path.parent) as folder:
            connection.connect(f"{folder}/{path.name}")
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), CONNECT_TIMEOUT)


def connect(addresses: str) -> socket.socket:
    """Connect to hvdrun at the first of its addresses that answers."""
    limit = time.monotonic() + REACH_TIMEOUT
    problems: dict[str, str] = {}
    while time.monotonic() < limit:
        for address in addresses.split(","):
            try:
                return _connect_to(address)
            except OSError as error:
                problems[address] = error_text(error)
        time.sleep(0.5)
    told = "; ".join(f"{address}: {problem}" for address, problem in problems.items())
    raise SystemExit(
        f"hvdrun: {socket.gethostname()} cannot connect to hvdrun: {told}; check that no "
        "firewall blocks connections between the job's hosts"
    )


def temporary_folder() -> Path:
    """The job's folder for temporary files on this host, removed with the job however it ends.

    (Killed processes cannot remove their files.) mpirun's agent may have made it, see `rsh_agent`.
    """
    name = f"hvdrun-{os.environ[JOB]}"
    folder = Path(tempfile.gettempdir())
    if folder.name != name:
        folder = folder / name
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


class Worker(asyncio.Protocol):
    """One rank's end of the connection to hvdrun, and its command."""

    def __init__(self, rank: int, secret: str) -> None:
        self._rank = rank
        self._channel = Channel(secret, is_hvdrun=False)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._parent = os.getppid()
        self._child: subprocess.Popen[bytes] | None = None
        self._outputs: dict[int, str] = {}  # descriptors of the command's output
        self._input = bytearray()  # what the command has not yet read
        self._input_ends = False
        self._folder: Path | None = None  # for files that the command reads or writes
        self._arrived = False
        self._statistics_time = 0  # of the file that was sent last
        self._function: list[bytes] | None = None
        self._failure: int | None = None  # the status of a command that could not start
        self._stopped = False
        self._hvdrun_gone = False
        self._reported = False  # the report is on its way to hvdrun
        self._told_all = False  # hvdrun has closed its end after that

    async def run(self) -> int:
        """Run the command to its end; returns the status to exit with."""
        self._loop.add_signal_handler(signal.SIGCHLD, self._changed.set)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._follow_daemon, number)
        while self._failure is None and (self._child is None or self._child.poll() is None):
            await self._turn()
            if self._child is None and self._stopped:
                return 128 + signal.SIGTERM
        return await self._finish()

    async def _turn(self) -> None:
        """Wait until something changes, at most CHECK seconds; then check what must be polled."""
        self._changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), CHECK)
        self._look_for_arrival()
        self._send_statistics()
        if not self._hvdrun_gone and silence(self._connection) > SILENCE:
            self._lose_hvdrun()
        if os.getppid() != self._parent and not self._stopped:
            self._follow_daemon()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """From asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(BACKLOG)
        self._connection = transport.get_extra_info("socket")
        watch_liveness(self._connection)

    def data_received(self, data: bytes) -> None:
        """From asyncio."""
        was_open = self._channel.open
        try:
            for message in self._channel.feed(data):
                self._take_message(message)
        except ProtocolError:
            self._lose_hvdrun()
            return
        if self._channel.open and not was_open:
            host, cores = socket.gethostname(), usable_cores()
            self._channel.put(hello={"rank": self._rank, "host": host, "cores": cores})
        if answer := self._channel.take():
            self._transport.write(answer)

    def eof_received(self) -> None:
        """From asyncio."""
        # Having read the report, hvdrun closes its end.
        self._told_all = self._reported and self._transport.get_write_buffer_size() == 0

    def connection_lost(self, error: Exception | None) -> None:
        """From asyncio."""
        self._lose_hvdrun()

    def pause_writing(self) -> None:
        """From asyncio."""
        for descriptor in self._outputs:
            self._loop.remove_reader(descriptor)

    def resume_writing(self) -> None:
        """From asyncio."""
        for descriptor, name in self._outputs.items():
            self._loop.add_reader(descriptor, self._take_output, descriptor, name)

    def _send(self, **message: Any) -> None:
        if not self._hvdrun_gone and not self._reported:
            self._channel.put(**message)
            self._transport.write(self._channel.take())

    def _look_for_arrival(self) -> None:
        if self._folder is not None and not self._arrived and self._arrival.exists():
            self._arrived = True
            self._send(arrived=True)

    def _has_ended(self) -> bool:
        """Whether the script has ended by itself, after `hvd.init()`."""
        try:
            return self._folder is not None and self._arrival.read_text() == SCRIPT_HAS_ENDED
        except OSError:
            return False

    @property
    def _arrival(self) -> Path:
        assert self._folder is not None
        return self._folder / "arrived"

    def _follow_daemon(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End because mpirun's daemon asks for it, or has died.

        If hvdrun is silent as well, the daemon has noticed before us that the network is lost.
        """
        if not self._hvdrun_gone and silence(self._connection) > SILENCE / 3:
            self._lose_hvdrun()
        self._stop(number)

    def _lose_hvdrun(self) -> None:
        if self._hvdrun_gone:
            return
        self._hvdrun_gone = True
        self._transport.abort()
        self._changed.set()
        self.resume_writing()  # to nobody, but the command must not wait
        self._stop()
        if not self._told_all:
            # mpirun's daemon may wait forever, and no other host may reach it. When it dies it
            # kills this process, so another one ends all that is left here.
            command = [sys.executable, "-I", "-S", str(SWEEP), str(GRACE), os.environ[JOB]]
            environment = {k: v for k, v in os.environ.items() if k not in (JOB, DAEMON, AGENT)}
            environment["TMPDIR"] = str(temporary_folder().parent)
            subprocess.Popen(command, env=environment, start_new_session=True)

    def _take_message(self, message: dict[str, Any]) -> None:
        if "start" in message:
            try:
                self._start(**message["start"])
            except OSError as error:  # a full /dev/shm or a TMPDIR that cannot be written
                self._fail_to_start(message["start"]["command"], error)
        elif "function" in message:
            self._function = [*(self._function or []), base64.b64decode(message["function"])]
        elif "input" in message:
            self._input += base64.b64decode(message["input"])
            self._feed_command()
        elif "input_ends" in message:
            self._input_ends = True
            self._feed_command()
        elif "stop" in message:
            self._stop(signal.Signals(message["stop"]))

    def _start(
        self,
        command: list[str],
        directory: str,
        environment: dict[str, str],
        folders: list[str],
        statistics: bool,
        own_temporary: bool,
        open_files: int | None,
    ) -> None:
        for folder in folders:
            Path(folder).mkdir(mode=0o700, exist_ok=True)
        own = {k: v for k, v in os.environ.items() if k not in (SECRET, ADDRESSES, DAEMON)}
        if own_temporary:
            own["TMPDIR"] = str(temporary_folder())
        self._folder = Path(tempfile.mkdtemp(prefix="rank-", dir=temporary_folder()))
        own[ARRIVAL] = str(self._arrival)
        if statistics:
            own["HVD_STATS_DIRECTORY"] = str(self._folder)
        if self._function is not None:
            own[CALL] = str(self._folder)
            (self._folder / FUNCTION).write_bytes(b"".join(self._function))
        own |= environment
        worker = os.getpid()

        def prepare() -> None:
            os.setpgid(0, 0)
            die_with_parent(worker)
            if open_files is not None:
                hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
                resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, hard))

        pipe = subprocess.PIPE
        try:
            self._child = subprocess.Popen(
                command,
                cwd=directory,
                env=own,
                stdin=pipe if self._rank == 0 else subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                close_fds=False,  # MPICH talks to its ranks through an inherited descriptor
                preexec_fn=prepare,
            )
        except OSError as error:
            self._fail_to_start(command, error)
            return
        for name, file in (("out", self._child.stdout), ("err", self._child.stderr)):
            assert file is not None
            os.set_blocking(file.fileno(), False)
            self._outputs[file.fileno()] = name
        self.resume_writing()
        if self._child.stdin is not None:
            os.set_blocking(self._child.stdin.fileno(), False)
        if self._stopped:
            self._signal(signal.SIGTERM)

    def _fail_to_start(self, command: list[str], error: OSError) -> None:
        text = f"hvdrun: cannot start {command[0]!r} on {socket.gethostname()}: {error}\n"
        self._send_output("err", text.encode())
        self._failure = 127 if isinstance(error, FileNotFoundError) else 126
        self._changed.set()

    def _take_output(self, descriptor: int, name: str) -> bool:
        """Pass on a piece of output; returns whether there was one."""
        try:
            data = os.read(descriptor, PIECE)
        except BlockingIOError:
            return False
        if data:
            self._send_output(name, data)
        else:
            self._loop.remove_reader(descriptor)
            del self._outputs[descriptor]
        return bool(data)

    def _send_output(self, name: str, data: bytes) -> None:
        self._send(output=name, data=base64.b64encode(data).decode())

    def _feed_command(self) -> None:
        """Write as much input as the command accepts, and report when that was all."""
        pipe = None if self._child is None else self._child.stdin
        if pipe is None:  # it does not read any more
            return
        had_input = bool(self._input)
        try:
            while self._input:
                del self._input[: os.write(pipe.fileno(), self._input[:PIECE])]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # it does not read any more
            self._input.clear()
            self._input_ends = True
        if self._input:
            self._loop.add_writer(pipe, self._feed_command)
            return
        self._loop.remove_writer(pipe)
        if had_input:
            self._send(input_was_read=True)
        if self._input_ends:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
            assert self._child is not None
            self._child.stdin = None

    def _stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask the command to end, unless it has ended by itself; later, kill it.

        If mpirun's daemon, our parent, was the first to go, hvdrun hears of it.
        """
        if self._child is not None and self._child.poll() is not None:
            return
        if not self._stopped:
            self._stopped = True
            self._changed.set()
            self._loop.call_later(GRACE, self._signal, signal.SIGKILL)
            if os.getppid() != self._parent and self._channel.open:
                self._send(orphan=True)
        self._signal(number)

    def _signal(self, number: int) -> None:
        if self._child is not None and self._child.poll() is None:
            os.killpg(self._child.pid, number)
            os.killpg(self._child.pid, signal.SIGCONT)  # a stopped command must hear of it, too

    async def _finish(self) -> int:
        """Pass on the last output and the report, and wait until hvdrun has them."""
        for descriptor, name in list(self._outputs.items()):
            while self._take_output(descriptor, name):
                pass
            self._loop.remove_reader(descriptor)  # what the command left may hold it open
        self._outputs.clear()
        status = self._failure if self._child is None else self._child.returncode
        assert status is not None
        if not self._hvdrun_gone:
            status = self._send_result(status)
            self._look_for_arrival()
            folder = self._folder
            report = {
                "status": status,
                "stopped": self._stopped,
                "ended": self._has_ended(),
                "marks": [m for m in MARKS if folder is not None and (folder / m).exists()],
            }
            self._send_statistics()
            self._send(report=report)
            self._reported = True
            # A full close with unread data would discard what is on its way.
            self._transport.write_eof()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        # hvdrun may have to wait for the reader of its output, for any time.
        while not self._hvdrun_gone:
            await self._turn()
        return status if status >= 0 else 128 - status

    def _send_result(self, status: int) -> int:
        """Send what the function of `hvd_keras.run` has returned; returns the command's status."""
        if self._function is None or self._folder is None or status != 0 or self._stopped:
            return status
        try:
            with (self._folder / RESULT).open("rb") as file:
                while piece := file.read(LARGE_PIECE):
                    self._send(result=base64.b64encode(piece).decode())
        except OSError:
            text = "hvdrun: the function ended its process; expected it to return\n"
            self._send_output("err", text.encode())
            return 1
        return 0

    def _send_statistics(self) -> None:
        """Pass on what the rank has written since the last time."""
        if self._folder is None:
            return
        path = self._folder / f"stats-{self._rank}.json"
        with contextlib.suppress(FileNotFoundError):
            time_written = path.stat().st_mtime_ns
            if time_written != self._statistics_time:
                self._statistics_time = time_written
                numbers = json.loads(path.read_text())
                numbers["late"] = numbers.pop("ranks")[self._rank]  # grows with the job otherwise
                self._send(statistics=numbers)


async def _run() -> int:
    connection = connect(os.environ[ADDRESSES])
    worker = Worker(find_rank(os.environ), os.environ[SECRET])
    await asyncio.get_running_loop().create_connection(lambda: worker, sock=connection)
    return await worker.run()


def main() -> int:
    """Run the worker of the rank that mpirun has started; returns the status to exit with."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    return asyncio.run(_run())
