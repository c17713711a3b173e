"""hvdrun's end of the connections to the ranks' workers, on this host and on others."""

from __future__ import annotations

import asyncio
import base64
import errno
import functools
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_keras.launch.follow import stdin
from hvd_keras.launch.follow.outcome import Report
from hvd_keras.launch.follow.output import Output
from hvd_keras.launch.follow.statistics import Statistics
from hvd_keras.launch.onhost.channel import (
    LARGE_PIECE,
    SILENCE,
    Channel,
    ProtocolError,
    error_text,
    silence,
    watch_liveness,
)
from hvd_keras.launch.onhost.cores import thread_settings
from hvd_keras.launch.onhost.worker import FUNCTION, RESULT, in_folder

# How many connections may be open that have not proved to belong to the job, and for how many
# seconds; further ones wait to be accepted.
UNPROVEN = 64
PROOF_TIMEOUT = 10.0

TOO_MANY_FILES = "too many open files for so many ranks; raise the limit (`ulimit -n`)"

# The socket in the job's directory, for a job on this host.
SOCKET = "socket"


class _Peer(asyncio.Protocol):
    """A connection: of a worker, once it has proved to be one."""

    def __init__(self, ranks: Ranks, connection: socket.socket, secret: str) -> None:
        self._ranks = ranks
        self.connection = connection
        self.channel = Channel(secret, is_hvdrun=True)
        self.rank: int | None = None
        self.host = ""
        self.cores = 1
        self._why = ""  # why we have ended the connection
        self._told_all = False
        self._heard_all = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.send()
        self.proof_timer = asyncio.get_running_loop().call_later(PROOF_TIMEOUT, transport.abort)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self.channel.feed(data):
                self._ranks.take(self, message)
            self.send()
        except ProtocolError as error:
            self.end(str(error))
        except OSError as error:  # a full disk under $TMPDIR
            self._ranks.problem = f"cannot store what rank {self.rank} has sent: {error}"
            self.end(str(error))

    def eof_received(self) -> bool:
        """Return whether to keep the connection, as that of a worker that waits to end."""
        self._heard_all = True
        return self._ranks.holds(self)

    def connection_lost(self, error: Exception | None) -> None:
        told = error_text(error) if isinstance(error, OSError) else str(error or "")
        self.proof_timer.cancel()
        self._ranks.lose(self, self._why or told)

    def send(self, **message: Any) -> None:
        """Send a message, and whatever the channel holds; nothing after `finish`."""
        if message:
            self.channel.put(**message)
        data = self.channel.take()
        if data and not self._told_all and not self.transport.is_closing():
            self.transport.write(data)

    def finish(self) -> None:
        """Send no more; the worker waits for this, to be sure that we have all it has sent."""
        self._told_all = True
        if self._heard_all:  # asyncio would close it only if the other end were still to finish
            self.transport.close()
        else:
            self.transport.write_eof()

    def end(self, why: str) -> None:
        """Close the connection immediately, for this reason."""
        self._why = why
        self.transport.abort()


def _listen_in(directory: Path) -> socket.socket:
    """Listen on a Unix socket in a folder, whose path may be longer than a socket's address."""
    listener = socket.socket(socket.AF_UNIX)
    with in_folder(directory) as folder:
        listener.bind(f"{folder}/{SOCKET}")
    listener.listen(socket.SOMAXCONN)
    return listener


class Ranks:
    """The ranks of a job.

    Until all ranks have connected, listens on the given addresses of this host, on a port that the
    system chooses; without addresses, on a Unix socket in the directory, where only this user can
    connect. A connection that does not prove knowledge of the secret is closed. `names` maps host
    names to the names that the user gave; `here` are the names of this host.
    """

    def __init__(
        self,
        size: int,
        addresses: Sequence[str],
        secret: str,
        start_timeout: float,
        directory: Path,
        names: Mapping[str, str],
        here: Collection[str],
    ) -> None:
        self.size = size
        self.problem = ""  # why the job cannot go on, if the reports do not tell
        self.reports: dict[int, Report] = {}  # what is known of each rank whose worker was there
        self._secret = secret
        self._start_timeout = start_timeout
        self._directory = directory
        self._names = names
        self._here = here
        self._listeners = [socket.create_server((address, 0)) for address in addresses]
        if not addresses:
            self._listeners.append(_listen_in(directory))
        self._open: set[_Peer] = set()
        self._peers: dict[int, _Peer] = {}
        self._gone: set[int] = set()
        self._paused: set[_Peer] = set()
        self._reported: set[_Peer] = set()  # whose workers wait to end
        self._accepting: list[asyncio.Task[None]] = []

    @property
    def addresses(self) -> str:
        """Where the workers reach us, in the form that `worker.connect` takes."""
        names = [listener.getsockname() for listener in self._listeners]
        if isinstance(names[0], str):
            return str(self._directory / SOCKET)
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
        self._limit = time.monotonic() + self._start_timeout
        self._input_was_read = asyncio.Event()
        self._places = asyncio.Semaphore(UNPROVEN)
        for listener in self._listeners:
            listener.setblocking(False)
            self._accepting.append(asyncio.create_task(self._accept(listener)))

    async def close(self) -> None:
        """Close everything; workers that still live end their commands then."""
        self._stop_accepting()
        for peer in [*self._open]:
            peer.transport.abort()
        await asyncio.gather(*self._accepting, return_exceptions=True)
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
                make = functools.partial(_Peer, self, connection, self._secret)
                _, peer = await loop.connect_accepted_socket(make, connection)
                self._open.add(peer)
        finally:
            listener.close()

    def lose(self, peer: _Peer, why: str) -> None:
        """Note that a connection has ended; `why` is empty where the worker has ended."""
        self._open.discard(peer)
        if peer.rank is None:
            self._places.release()
        elif peer.rank not in self._gone:
            self._gone.add(peer.rank)
            report = self.reports[peer.rank]
            if report.status is None:
                report.time, report.gone = time.monotonic(), True
                # A killed worker here may have left something unread, which breaks it as well.
                report.lost = "" if peer.host in self._here else why
            if peer.rank == 0:
                self._input_was_read.set()
            self._release()
        self._changed()

    def take(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Handle a message."""
        if "hello" in message:
            self._welcome(peer, **message["hello"])
            return
        assert peer.rank is not None
        report = self.reports[peer.rank]
        if "output" in message:
            stream = self._output.stream(peer.rank, message["output"])
            stream.feed(base64.b64decode(message["data"]))
            if self._output.full:
                self._paused.add(peer)
                peer.transport.pause_reading()
        elif "input_was_read" in message:
            self._input_was_read.set()
        elif "arrived" in message:
            report.arrived = True
        elif "orphan" in message:
            if peer.host not in self._here:  # here the daemon is mpirun itself, which we watch
                report.orphaned = time.monotonic()
        elif "result" in message:
            assert self._call is not None
            with (self._call / f"{RESULT}-{peer.rank}").open("ab") as file:
                file.write(base64.b64decode(message["result"]))
        elif "report" in message:
            report.time = time.monotonic()
            report.status = message["report"]["status"]
            report.stopped = message["report"]["stopped"]
            report.ended = message["report"]["ended"]
            report.marks = message["report"]["marks"]
            self._reported.add(peer)
            self._release()
        elif "statistics" in message:
            host = peer.host or socket.gethostname()
            self._statistics.take(peer.rank, host, message["statistics"])

    def holds(self, peer: _Peer) -> bool:
        """Whether a worker has reported but may not end yet."""
        return peer in self._reported

    def _release(self, now: bool = False) -> None:
        """Let the workers end that have reported.

        When one fails, mpirun ends all ranks. So if ranks waited for one that left, their workers
        stay, unless they must end ``now``, until that one's status is known: it is the cause.
        """
        reports = self.reports.values()
        causes = [r for r in reports if r.status is not None and not r.is_deserted]
        if now or causes or self._gone or all(r.status is not None for r in reports):
            for peer in self._reported:
                peer.finish()
            self._reported.clear()

    def _welcome(self, peer: _Peer, rank: int, host: str, cores: int) -> None:
        if rank in self._peers or not 0 <= rank < self.size:
            raise ProtocolError(f"rank {rank} of {self.size} is there twice, or does not exist")
        watch_liveness(peer.connection)
        peer.rank, peer.host, peer.cores = rank, self._names.get(host, host), cores
        self._peers[rank] = peer
        peer.proof_timer.cancel()
        self._places.release()
        self.reports[rank] = Report(None, time.monotonic(), False, host=peer.host)
        if len(self._peers) == self.size:
            self._limit = float("inf")
            self._stop_accepting()
            self._start_all()

    def _start_all(self) -> None:
        ranks = Counter(peer.host for peer in self._peers.values())
        function = b"" if self._call is None else (self._call / FUNCTION).read_bytes()
        for peer in self._peers.values():
            for first in range(0, len(function), LARGE_PIECE):
                piece = function[first : first + LARGE_PIECE]
                peer.send(function=base64.b64encode(piece).decode())
            threads = thread_settings(
                ranks[peer.host], os.environ, peer.cores, several_hosts=len(ranks) > 1
            )
            environment = {**threads, **self._start["environment"]}
            peer.send(start={**self._start, "environment": environment})
        if self._has_input:
            stdin.forward(self._send_input)
        else:
            self._peers[0].send(input_ends=True)

    async def _send_input(self, data: bytes) -> bool:
        """Send rank 0 a piece of its input, and wait until it has read it; or the end of its input.

        Returns whether it may read more.
        """
        if 0 in self._gone:
            return False
        if not data:
            self._peers[0].send(input_ends=True)
            return False
        self._input_was_read.clear()
        self._peers[0].send(input=base64.b64encode(data).decode())
        await self._input_was_read.wait()
        return 0 not in self._gone

    def check(self) -> bool:
        """Look for lost hosts and time limits; returns whether the job cannot go on."""
        for rank, peer in self._peers.items():
            if rank not in self._gone and silence(peer.connection) > SILENCE:
                peer.end(f"silent for {SILENCE:.0f} s")
        for peer in self._paused:  # the worker must hear from us while it cannot send
            peer.send(waiting=True)
        if time.monotonic() > self._limit:
            self._limit = float("inf")
            missing = [str(rank) for rank in range(self.size) if rank not in self._peers]
            self.problem = (
                f"rank {', '.join(missing)} did not connect within {self._start_timeout:.0f} s "
                "(--start-timeout)"
            )
        return bool(self.problem) or any(
            report.lost or report.orphaned < float("inf") for report in self.reports.values()
        )

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask all ranks to end."""
        self._release(now=True)
        for rank, peer in self._peers.items():
            if rank not in self._gone:
                peer.send(stop=number)

    def over(self) -> bool:
        """Whether no rank will send anything more."""
        return all(report.gone or report.status is not None for report in self.reports.values())

    def live(self) -> bool:
        """Whether a worker on a host that answers may still send something."""
        return any(
            rank not in self._gone and silence(peer.connection) < SILENCE / 3
            for rank, peer in self._peers.items()
        )

    def resume(self) -> None:
        """Read again from the ranks whose output had to wait."""
        for peer in self._paused:
            peer.transport.resume_reading()
        self._paused.clear()

    def note_silence(self) -> None:
        """Note at the end which hosts are silent; the clean-up shows whether they are lost."""
        for rank, peer in self._peers.items():
            if rank not in self._gone and silence(peer.connection) >= SILENCE / 3:
                self.reports[rank].lost = "silent"
