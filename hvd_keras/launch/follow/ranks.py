"""hvdrun's end of the connections to the ranks' workers, on this host and on others."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_keras.launch.errors import UsageError
from hvd_keras.launch.follow import stdin
from hvd_keras.launch.follow.outcome import Report, names
from hvd_keras.launch.follow.output import Output
from hvd_keras.launch.follow.statistics import Statistics
from hvd_keras.launch.onhost.channel import (
    LARGE_PIECE,
    PIECE,
    Channel,
    ProtocolError,
    error_text,
    silence,
    watch_liveness,
)
from hvd_keras.launch.onhost.connect import in_folder
from hvd_keras.launch.onhost.cores import thread_settings
from hvd_keras.launch.onhost.limits import MUTE, PROOF_TIMEOUT, SILENCE, WORKER_ALIVE
from hvd_keras.launch.onhost.worker import FUNCTION, RESULT

# How many connections may be open that have not proved to belong to the job; further ones wait to
# be accepted.
UNPROVEN = 64


TOO_MANY_FILES = "too many open files for so many ranks; raise the limit (`ulimit -n`)"

# The socket in the job's directory, for a job on this host.
SOCKET = "socket"


class _Peer:
    """A worker that has proved to be one."""

    def __init__(
        self,
        hello: Mapping[str, Any],
        host: str,
        channel: Channel,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.rank: int = hello["rank"]
        self.cores: int = hello["cores"]
        self.host = host
        self.heard = time.monotonic()
        self.connection: socket.socket = writer.get_extra_info("socket")
        self.why = ""  # why we have ended the connection
        self._channel, self._writer = channel, writer

    def send(self, **message: Any) -> None:
        """Send a message, unless the worker is gone."""
        if not self._writer.transport.is_closing():
            self._channel.put(**message)
            self._writer.write(self._channel.take())

    async def send_much(self, **message: Any) -> None:
        """Send a long message and wait until most of it has gone; raises OSError."""
        self.send(**message)
        await self._writer.drain()

    def end(self, why: str) -> None:
        """Close the connection immediately, for this reason."""
        self.why = why
        self._writer.transport.abort()


def _listen_in(directory: Path) -> socket.socket:
    """Listen on a Unix socket in a folder, whose path may be longer than a socket's address."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        with in_folder(directory) as folder:
            listener.bind(f"{folder}/{SOCKET}")
    except OSError as error:
        raise UsageError(
            f"cannot make a socket in {directory}: {error.strerror}; set TMPDIR to a folder on "
            "another file system"
        ) from error
    listener.listen(socket.SOMAXCONN)
    return listener


@dataclass
class Ranks:
    """The ranks of a job.

    Until all ranks have connected, listens on addresses of this host, on a port that the system
    chooses; without addresses, on a Unix socket in the directory, where only this user can connect.
    A connection that does not prove knowledge of the secret is closed.
    """

    size: int
    listen_at: Sequence[str]
    secret: str
    start_timeout: float  # seconds
    directory: Path
    names: Mapping[str, str]  # the user's names of the hosts, by their own
    here: Collection[str]  # names of this host
    problem: str = ""  # why the job cannot go on, if the reports do not tell
    reports: dict[int, Report] = field(default_factory=dict)  # of each rank whose worker was there

    def __post_init__(self) -> None:
        self._listeners = [socket.create_server((address, 0)) for address in self.listen_at]
        if not self.listen_at:
            self._listeners.append(_listen_in(self.directory))
        self._peers: dict[int, _Peer] = {}
        self._gone: set[int] = set()
        self._accepting: list[asyncio.Task[None]] = []
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def addresses(self) -> str:
        """Where the workers reach us, in the form that `worker.connect` takes."""
        names = [listener.getsockname() for listener in self._listeners]
        if isinstance(names[0], str):
            return str(self.directory / SOCKET)
        return ",".join(f"{host}:{port}" for host, port in names)

    def open(
        self,
        output: Output,
        start: Mapping[str, Any],
        *,
        has_input: bool,
        call: Path | None,
        statistics: Statistics,
        changed: Callable[[], None],
    ) -> None:
        """Begin to wait for the workers.

        `start` is what all of them are to run, as `Worker` takes it; each rank gets its share of
        its host's cores besides. `has_input` tells that standard input goes to rank 0, `call` is
        the folder of a call of `hvd_keras.run`, `statistics` takes what the ranks tell of
        themselves, and `changed` is called when a connection ends.
        """
        self._output, self._start, self._has_input = output, start, has_input
        self._call, self._statistics, self._changed = call, statistics, changed
        self._function = b""
        if call is not None:
            self._function = (call / FUNCTION).read_bytes()
            for path in call.glob(f"{RESULT}-*"):  # of an earlier start
                path.unlink()
        self._checked = time.monotonic()
        self._limit = self._checked + self.start_timeout
        self._input_was_read: asyncio.Queue[bool] = asyncio.Queue()
        self._places = asyncio.Semaphore(UNPROVEN)
        for listener in self._listeners:
            listener.setblocking(False)
            self._accepting.append(asyncio.create_task(self._accept(listener)))

    async def close(self) -> None:
        """Close everything; workers that still live end their commands then."""
        self._stop_accepting()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._accepting, *self._serving, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    def _stop_accepting(self) -> None:
        for task in self._accepting:
            task.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        """Accept connections, unless too many have not yet proved anything."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._places.acquire()
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:
                    if error.errno in (errno.EMFILE, errno.ENFILE):
                        self.problem = TOO_MANY_FILES
                        return
                    self._places.release()  # whoever it was has gone
                    continue
                self._do(self._serve(connection))
        finally:
            listener.close()

    def _do(self, what: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(what)
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        """Talk with a worker, as long as it lives; or with a stranger, for a moment."""
        peer, why = None, ""
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            channel = Channel(self.secret, is_hvdrun=True)
            try:
                proof = self._prove(channel, reader, writer)
                messages = await asyncio.wait_for(proof, PROOF_TIMEOUT)
            finally:
                self._places.release()
            peer = self._welcome(messages.pop(0)["hello"], channel, writer)
            while True:
                for message in messages:
                    await self._take(peer, message)
                if not (data := await reader.read(PIECE)):
                    break
                peer.heard = time.monotonic()
                messages = channel.feed(data)
        except (ProtocolError, asyncio.TimeoutError) as error:
            why = str(error)
        except OSError as error:
            why = error_text(error)
        finally:
            writer.transport.abort()
            if peer is not None:
                self._lose(peer, peer.why or why)
            self._changed()

    async def _prove(
        self, channel: Channel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> list[dict[str, Any]]:
        """Prove the knowledge of the secret to each other; returns the worker's first messages."""
        messages: list[dict[str, Any]] = []
        while not messages:
            writer.write(channel.take())
            if not (data := await reader.read(PIECE)):
                raise ProtocolError("the other end has closed the connection")
            messages = channel.feed(data)
        return messages

    def _lose(self, peer: _Peer, why: str) -> None:
        """Note that a worker has gone; `why` is empty where it has ended."""
        self._gone.add(peer.rank)
        report = self.reports[peer.rank]
        if report.status is None:
            report.time, report.gone = time.monotonic(), True
            # A killed worker here may have left something unread, which breaks it as well.
            report.lost = "" if peer.host in self.here else why
        if peer.rank == 0:
            self._input_was_read.put_nowait(False)

    async def _take(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Handle a message."""
        report = self.reports[peer.rank]
        if "output" in message:
            stream = self._output.stream(peer.rank, message["output"])
            stream.feed(base64.b64decode(message["data"]))
            while self._output.full:
                await self._output.wait_for_room(1.0)
                peer.heard = time.monotonic()
                peer.send(waiting=True)  # it must hear from us while it cannot send
        elif "told" in message:
            told = message["told"]
            if "mark" in told:
                report.note(told["mark"])
                self._changed()
            elif "statistics" in told:
                host = peer.host or socket.gethostname()
                self._statistics.take(peer.rank, host, told["statistics"])
        elif "input_was_read" in message:
            self._input_was_read.put_nowait(message["input_was_read"])
        elif "orphan" in message:
            if peer.host not in self.here:  # here the daemon is mpirun itself, which we watch
                report.orphaned = time.monotonic()
        elif "result" in message:
            assert self._call is not None
            try:
                with (self._call / f"{RESULT}-{peer.rank}").open("ab") as file:
                    file.write(base64.b64decode(message["result"]))
            except OSError as error:  # a full disk under $TMPDIR
                self.problem = f"cannot store what rank {peer.rank} has sent: {error}"
                raise ProtocolError(str(error)) from error
        elif "report" in message:
            report.time = time.monotonic()
            report.status = message["report"]["status"]
            report.stopped = message["report"]["stopped"]
            report.by_signal = message["report"]["by_signal"]
            if report.status == 0 and not report.phase:
                # mpirun may know that it has left MPI without a word.
                peer.send(end="watch" if self.listen_at else "now")
            self._changed()

    def release(self) -> None:
        """Let the workers end that have reported.

        Until then they stay: mpirun would end all ranks because of one, with less patience and
        without words, and on a host that is cut off a worker cleans up.
        """
        for peer in self._peers.values():
            if self.reports[peer.rank].status is not None:
                peer.send(end="now")

    def _welcome(
        self, hello: Mapping[str, Any], channel: Channel, writer: asyncio.StreamWriter
    ) -> _Peer:
        rank, host = hello["rank"], hello["host"]
        if rank in self._peers or not 0 <= rank < self.size:
            raise ProtocolError(f"rank {rank} is not expected")
        peer = _Peer(hello, self.names.get(host, host), channel, writer)
        watch_liveness(peer.connection)
        writer.write(channel.take())
        self._peers[rank] = peer
        self.reports[rank] = Report(None, time.monotonic(), False, host=peer.host)
        if len(self._peers) == self.size:
            self._limit = float("inf")
            self._stop_accepting()
            self._start_all()
        return peer

    def _start_all(self) -> None:
        ranks = Counter(peer.host for peer in self._peers.values())
        for peer in self._peers.values():
            threads = thread_settings(
                ranks[peer.host], os.environ, peer.cores, several_hosts=len(ranks) > 1
            )
            environment = {**threads, **self._start["environment"]}
            self._do(self._start_one(peer, {**self._start, "environment": environment}))
        if self._has_input:
            stdin.forward(self._send_input)
        else:
            self._peers[0].send(input="")

    async def _start_one(self, peer: _Peer, start: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the worker has gone
            for first in range(0, len(self._function), LARGE_PIECE):
                piece = self._function[first : first + LARGE_PIECE]
                await peer.send_much(function=base64.b64encode(piece).decode())
            peer.send(start=start)

    async def _send_input(self, data: bytes) -> bool:
        """Send rank 0 a piece of its input, and wait until it has read it; or the end of its input.

        Returns whether it may read more.
        """
        if 0 in self._gone:
            return False
        self._peers[0].send(input=base64.b64encode(data).decode())
        return bool(data) and await self._input_was_read.get()

    def check(self) -> bool:
        """Look for lost hosts and time limits; returns whether the job cannot go on."""
        now = time.monotonic()
        left = [peer for rank, peer in self._peers.items() if not self._is_over(rank)]
        for peer in left:
            if silence(peer.connection) > SILENCE:
                peer.end(f"silent for {SILENCE:.0f} s")
            if now > self._checked + WORKER_ALIVE:  # we were stopped ourselves
                peer.heard = now
        self._checked = now
        patience = MUTE if len(left) < self.size else 10 * MUTE
        if left and now > max(peer.heard for peer in left) + patience:
            hosts = sorted({peer.host for peer in left} - {""})
            place = f" on {' and '.join(hosts)}" * bool(hosts)
            self.problem = (
                f"hvdrun's processes of {names([peer.rank for peer in left])}{place} have not "
                f"answered for {patience:.0f} s; they may be stopped"
            )
        if now > self._limit:
            self._limit = float("inf")
            missing = [str(rank) for rank in range(self.size) if rank not in self._peers]
            self.problem = (
                f"rank {', '.join(missing)} did not connect within {self.start_timeout:.0f} s "
                "(--start-timeout)"
            )
        return bool(self.problem) or any(
            report.lost or report.orphaned < float("inf") for report in self.reports.values()
        )

    def _is_over(self, rank: int) -> bool:
        return rank in self._gone or self.reports[rank].status is not None

    def stop(self, grace: float) -> None:
        """Ask all ranks to end; kill them if they have not after so many seconds."""
        for peer in self._peers.values():
            peer.send(stop=grace)

    def signal(self, number: int) -> None:
        """Pass a signal on to all ranks."""
        for peer in self._peers.values():
            peer.send(signal=number)

    def over(self) -> bool:
        """Whether no rank will send anything more."""
        return all(self._is_over(rank) for rank in self.reports)

    def live(self) -> bool:
        """Whether a worker on a host that answers may still send something."""
        return any(
            not self._is_over(rank) and silence(peer.connection) < SILENCE / 3
            for rank, peer in self._peers.items()
        )

    def note_silence(self) -> None:
        """Note at the end which hosts are silent; the clean-up shows whether they are lost."""
        for rank, peer in self._peers.items():
            if rank not in self._gone and silence(peer.connection) >= SILENCE / 3:
                self.reports[rank].lost = "silent"
