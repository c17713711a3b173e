"""Runs the command of one rank and reports how it ended.

mpirun or srun starts a worker once per rank, on every host (see `__main__.py`). It connects to
hvdrun, learns the command, and passes the command's input, its output and the report of its end
through that connection: mpirun would join pieces of lines, mix in its messages, and its exit
status can be 0 for a job that was killed. A rank whose hvdrun or daemon is gone is ended. What
hvd_keras tells of a rank comes over a datagram socket (see `hvd_keras.runtime.settings`).
"""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from hvd_keras.runtime.linux import in_folder

from . import channel, fork_server, limits
from .channel import PIECE, Connection, ProtocolError, silence
from .cores import own_cores, usable_cores
from .process import FORWARDED, JOB, ask_to_end, prepare, private_folder, shell_status
from .sweep import OWNER

# Environment variables through which hvdrun reaches its workers.
SECRET = "HVDRUN_SECRET"
ADDRESSES = "HVDRUN_ADDRESSES"

# The rank as Open MPI 4 and 5, PMIx, MPICH and SLURM tell it; the surest first.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")

# Environment variables for the command: the socket to which `settings.tell_hvdrun` sends, and the
# folder that holds what `hvd_keras.run` calls.
TELL = "HVDRUN_TELL"
CALL = "HVDRUN_CALL"

# Files there: the pickled function with its arguments, what the function has returned, and that no
# UsageError comes any more, so that an exit status of 2 is the function's.
FUNCTION, RESULT, STARTED = "function", "result", "started"

NOTICE = 1 << 18  # bytes of one message of the rank at most
PIPE = 1 << 20  # bytes in a pipe at most
SWEEP = Path(__file__).with_name("sweep.py")  # the script that ends all that is left of a job here


def memory_folder(job: str) -> str:
    """Return the folder for the shared memory of MPI, which killed ranks cannot remove."""
    return f"/dev/shm/hvdrun-{job}"


def find_rank(environment: Mapping[str, str]) -> int:
    """Return this process's rank, which mpirun has put into the environment. Exits without one."""
    if found := [environment[name] for name in RANK_VARIABLES if name in environment]:
        return int(found[0])
    raise SystemExit(
        f"hvdrun: got no rank in the environment; expected one of {', '.join(RANK_VARIABLES)}, as "
        "mpirun and srun set them; leave out the wrapper (--mpirun, --mpi-args) that removes them"
    )


def _folder_path() -> Path:
    """Return the job's folder for temporary files on this host; mpirun's agent may have made it."""
    folder, name = Path(tempfile.gettempdir()), f"hvdrun-{os.environ[JOB]}"
    return folder if folder.name == name else folder / name


async def _ready(
    add: Callable[..., object], remove: Callable[[int], object], descriptor: int
) -> None:
    """Wait until a descriptor can be read, or written, as the loop's functions say."""
    ready = asyncio.get_running_loop().create_future()
    add(descriptor, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        remove(descriptor)


class Worker:
    """One rank's end of the connection to hvdrun, and its command."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()  # a child has ended, or hvdrun has told something
        self._parent = os.getppid()
        self._order: dict[str, Any] = {}  # what to start, when hvdrun has said it
        self._child: subprocess.Popen[bytes] | fork_server.Child | None = None
        self._environment: dict[str, str] = {}  # of the command
        self._pipes = (-1, -1, -1)  # our ends of its streams
        self._server: fork_server.Server | None = None  # of this host
        self._kept: socket.socket | None = None  # keeps it
        self._input: asyncio.Queue[bytes] = asyncio.Queue()  # for the command; empty: its end
        self._folder = _folder_path() / f"rank-{rank}"  # for files that the command reads or writes
        self._function = bytearray()
        self._stopped = False
        self._by_signal = False  # a signal to this process was the first to ask for the end
        self._hvdrun_gone = False
        self._end = ""  # "now" or "watch", while others go on: hvdrun has our report

    async def run(self) -> int:
        """Run the command to its end; returns the status to exit with."""
        self._loop.add_signal_handler(signal.SIGCHLD, self._changed.set)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._follow_daemon, number)
        for number in FORWARDED:
            self._loop.add_signal_handler(number, self._signal, number)
        tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]
        await self._until(lambda: self._order or self._stopped)
        if not self._order:
            return 128 + signal.SIGTERM
        status = await self._run_command(self._order)
        status = await self._send_result(status)
        shutil.rmtree(self._folder, ignore_errors=True)
        if not self._stopped:
            self._report_orphan()  # without the daemon, MPI ends a command before we have looked
        report = {"status": status, "stopped": self._stopped, "by_signal": self._by_signal}
        self._connection.send(report=report)
        # hvdrun may have to wait for the reader of its output, for any time.
        await self._until(lambda: self._end or self._hvdrun_gone)
        for task in tasks:
            task.cancel()
        if self._end == "watch" and os.fork() == 0:
            self._watch_alone()
        return shell_status(status)

    def _watch_alone(self) -> NoReturn:
        """Until hvdrun's clean-up ends this child: end what is left here if hvdrun is lost."""
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        connection = socket.socket(fileno=os.dup(self._connection.socket.fileno()))
        connection.settimeout(limits.WORKER_CHECK)
        with contextlib.suppress(OSError):
            while silence(connection) < limits.SILENCE:
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(PIECE):
                        break
        self._sweep()
        os._exit(0)

    async def _until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def _watch(self) -> None:
        """Check what must be polled: hvdrun's host, mpirun's daemon; and show hvdrun our life."""
        for turn in itertools.count():
            await asyncio.sleep(limits.WORKER_CHECK)
            self._changed.set()  # `Child.poll` continues a stopped server
            if not self._hvdrun_gone and silence(self._connection.socket) > limits.SILENCE:
                self._lose_hvdrun()
            if os.getppid() != self._parent and not self._stopped:
                self._report_orphan()
                self._follow_daemon()
            if turn % limits.ALIVE_CHECKS == 0:
                self._connection.send(alive=True)

    async def _listen(self) -> None:
        """Take hvdrun's messages until it releases us, or is lost."""
        with contextlib.suppress(ProtocolError, OSError):
            async for message in self._connection.messages():
                self._take_message(message)
        if not self._end:
            self._lose_hvdrun()

    def _take_message(self, message: dict[str, Any]) -> None:
        if "start" in message:
            self._order = message["start"]
        elif "function" in message:
            self._function += base64.b64decode(message["function"])
        elif "input" in message:
            self._input.put_nowait(base64.b64decode(message["input"]))
        elif "stop" in message:
            self._stop(signal.SIGTERM, message["stop"])
        elif "signal" in message:
            self._signal(message["signal"])
        elif "end" in message:
            self._end = message["end"]
        self._changed.set()

    async def _send_output(self, name: str, data: bytes) -> None:
        """Send what the command must wait for if hvdrun does not take it."""
        await self._connection.send_much(output=name, data=base64.b64encode(data).decode())

    async def _run_command(self, order: dict[str, Any]) -> int:
        """Run it, pass on what it writes and what hvd_keras tells in it; returns its status."""
        try:
            private_folder(_folder_path())
            private_folder(self._folder)
            ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            with in_folder(self._folder) as short:
                ear.bind(f"{short}/tell")
            ear.setblocking(False)
            child = self._child = await self._start(order)
        except OSError as error:  # such as a full /dev/shm or a TMPDIR that cannot be written
            what = f"{order['command'][0]!r} on {socket.gethostname()}"
            await self._send_output("err", f"hvdrun: cannot start {what}: {error}\n".encode())
            return 127 if isinstance(error, FileNotFoundError) else 126
        outputs = {"out": self._pipes[1], "err": self._pipes[2]}
        tasks = [asyncio.create_task(self._relay(outputs[name], name)) for name in outputs]
        tasks.append(asyncio.create_task(self._feed_command(self._pipes[0])))
        self._loop.add_reader(ear, self._hear, ear)
        if self._stopped:
            self._signal(signal.SIGTERM)
        await self._until(lambda: child.poll() is not None)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if isinstance(child, fork_server.Child):
            self._loop.remove_reader(child.connection)
            child.connection.close()
        self._loop.remove_reader(ear)
        while self._hear(ear):
            pass
        ear.close()
        for name, pipe in outputs.items():
            with contextlib.suppress(BlockingIOError):  # others may go on writing there
                await self._send_output(name, os.read(pipe, PIPE))
        assert child.returncode is not None
        return child.returncode

    async def _start(self, order: dict[str, Any]) -> subprocess.Popen[bytes] | fork_server.Child:
        """Start what `run_job` describes."""
        private_folder(Path(memory_folder(os.environ[JOB])))
        if part := order["part"]:
            index, count = part
            os.sched_setaffinity(0, own_cores(index, count, os.sched_getaffinity(0)))
        own = {k: v for k, v in os.environ.items() if k not in (SECRET, ADDRESSES)}
        # Not the job's folder itself, which holds our files.
        own["TMPDIR"] = str(private_folder(_folder_path() / "tmp"))
        own[TELL] = str(self._folder / "tell")
        if self._function:
            own[CALL] = str(self._folder)
            (self._folder / FUNCTION).write_bytes(self._function)
        self._environment = own | order["environment"]
        inputs, outputs, errors = os.pipe(), os.pipe(), os.pipe()
        streams = inputs[0], outputs[1], errors[1]
        self._pipes = inputs[1], outputs[0], errors[0]
        for pipe in self._pipes:
            os.set_blocking(pipe, False)
        try:
            with contextlib.suppress(OSError):  # in a thread, as we must answer hvdrun meanwhile
                found = await asyncio.to_thread(self._fork, order, streams)
                if found is not None:
                    self._loop.add_reader(found.connection, self._changed.set)
                    return found
            worker = os.getpid()
            return subprocess.Popen(
                order["command"],
                cwd=order["directory"],
                env=self._environment,
                stdin=streams[0],
                stdout=streams[1],
                stderr=streams[2],
                close_fds=False,  # MPICH talks to its ranks through an inherited descriptor
                preexec_fn=lambda: prepare(worker, order["open_files"]),
            )
        finally:
            for stream in streams:
                os.close(stream)

    def _fork(self, order: dict[str, Any], streams: tuple[int, ...]) -> fork_server.Child | None:
        """Have a server of this host start it; None without one."""
        environment = self._environment
        if float(environment.get(fork_server.KEEP) or 0):
            return fork_server.fork_kept(order, environment, streams)
        if not order["server"]:
            return None
        self._server = fork_server.Server(order["server"], order, environment)
        return self._server.fork(streams)

    def _hear(self, ear: socket.socket) -> bool:
        """Pass on what hvd_keras tells; returns whether there was something."""
        try:
            notice = ear.recv(NOTICE)
        except BlockingIOError:
            return False
        with contextlib.suppress(ValueError):  # not of hvd_keras
            message = json.loads(notice)
            if "modules" in message:
                self._start_server(message)
            else:
                self._connection.send(**message)
        return True

    def _start_server(self, told: dict[str, Any]) -> None:
        """Start what helps a restart, unless the command is a wrapper of the rank that has told."""
        order, start = self._order, str(_folder_path())
        if self._server is None or told["command"][1:] != order["command"][1:]:
            return
        shared = fork_server.early(self._environment) | told["changes"] | {JOB: order["server"]}
        # What is in this start's folder, as a library's cache may be, is not for later starts.
        shared = {k: v for k, v in shared.items() if v is not None and start not in v}
        times = {"delay": limits.SERVER_DELAY, "idle": limits.SERVER_IDLE}
        with contextlib.suppress(OSError):  # then ranks are started anew
            self._kept = self._kept or self._server.start(shared, told["modules"], **times)

    async def _relay(self, pipe: int, name: str) -> None:
        """Pass on the command's output, no faster than hvdrun takes it."""
        while True:
            await _ready(self._loop.add_reader, self._loop.remove_reader, pipe)
            data = os.read(pipe, PIECE)
            if not data:
                return
            await self._send_output(name, data)

    async def _feed_command(self, pipe: int) -> None:
        """Write the input to the command, and report when it has taken a piece."""
        try:
            while data := await self._input.get():
                while data:
                    await _ready(self._loop.add_writer, self._loop.remove_writer, pipe)
                    data = data[os.write(pipe, data) :]
                self._connection.send(input_was_read=True)
        except BrokenPipeError:  # it reads no more
            self._connection.send(input_was_read=False)
        os.close(pipe)

    def _follow_daemon(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End because mpirun's daemon asks for it, or has died."""
        # The daemon may have noticed before us that the network is lost.
        if not self._hvdrun_gone and silence(self._connection.socket) > limits.SUSPICION:
            self._lose_hvdrun()
        self._by_signal = self._by_signal or not self._stopped
        self._stop(number, self._order.get("stop_timeout", limits.GRACE))

    def _lose_hvdrun(self) -> None:
        if self._hvdrun_gone:
            return
        self._hvdrun_gone = True
        self._connection.end()
        self._changed.set()
        self._stop(signal.SIGTERM, limits.GRACE)
        self._sweep()

    def _sweep(self) -> None:
        """End all that is left of the job here, by a process that mpirun's daemon cannot kill."""
        command = [sys.executable, "-I", "-S", str(SWEEP), str(limits.GRACE), os.environ[JOB]]
        if server := self._order.get("server"):
            command.append(server)
        environment = {k: v for k, v in os.environ.items() if k not in (JOB, OWNER)}
        folder = _folder_path()
        environment["TMPDIR"] = str(folder.parent)
        try:
            (folder / f"sweep-{os.uname().nodename}").mkdir()  # hosts may share the folder
        except FileExistsError:  # another rank's is at work, and removes the folder at its end
            return
        except OSError:  # there is no folder yet, or the disk is full: several may be at work
            pass
        subprocess.Popen(command, env=environment, start_new_session=True)

    def _stop(self, number: signal.Signals, grace: float) -> None:
        """Ask the command to end, unless it has ended; later, kill it."""
        if self._child is not None and self._child.poll() is not None:
            return
        self._loop.call_later(grace, self._signal, signal.SIGKILL)
        if not self._stopped:
            self._stopped = True
            self._changed.set()
            self._report_orphan()
        self._signal(number)

    def _report_orphan(self) -> None:
        # A daemon that ends because of a rank, or of mpirun, asks us to end before.
        if os.getppid() != self._parent and not self._by_signal:
            self._connection.send(orphan=True)

    def _signal(self, number: int) -> None:
        if self._child is not None and self._child.poll() is None:
            if number in FORWARDED:
                os.killpg(self._child.pid, number)
            else:
                ask_to_end(self._child.pid, number)

    async def _send_result(self, status: int) -> int:
        """Send what the function of `hvd_keras.run` has returned; returns the command's status."""
        if not self._function or status != 0 or self._stopped:
            return status
        try:
            with (self._folder / RESULT).open("rb") as file:
                while piece := file.read(PIECE):
                    await self._connection.send_much(result=base64.b64encode(piece).decode())
        except OSError:
            text = "hvdrun: the function ended its process; expected it to return\n"
            await self._send_output("err", text.encode())
            return 1
        return 0


async def _run() -> int:
    rank, secret = find_rank(os.environ), os.environ[SECRET]
    streams = await asyncio.open_connection(sock=channel.connect(os.environ[ADDRESSES]))
    hello = {"rank": rank, "host": socket.gethostname(), "cores": usable_cores()}
    hello["mask"] = sorted(os.sched_getaffinity(0))
    hello["variables"] = list(os.environ)
    connection = Connection(secret, streams, listens=False, hello=hello)
    return await Worker(rank, connection).run()


def main() -> int:
    """Run the worker of the rank that mpirun has started; returns the status to exit with."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    return asyncio.run(_run())
