"""hvdrun's end of the connections to the ranks' workers, on this host and on others."""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_keras.launch.follow.event_loop import Loop
from hvd_keras.launch.follow.outcome import Report
from hvd_keras.launch.follow.output import Output
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

# Connections that may be open without having proved that they belong to the job, while others wait
# to be accepted, and for how long.
STRANGERS = 64
PROOF_TIMEOUT = 10.0

TOO_MANY_FILES = "too many open files for so many ranks; raise the limit (`ulimit -n`)"

# The socket in the job's directory, for a job on this host.
SOCKET = "socket"

# Bytes of input that may be on the way to rank 0, unread by it.
INPUT_WINDOW = 1 << 16


@dataclass(frozen=True)
class Start:
    """What every rank is to run; each also gets its share of its host's cores."""

    command: Sequence[str]
    directory: str
    environment: Mapping[str, str]
    folders: Sequence[str]
    statistics: bool
    own_environment: Mapping[str, str]  # hvdrun's, which tells what the user has set
    own_temporary: bool = True  # whether the ranks' temporary files go with the job
    open_files: int | None = None  # how many files they may open; None: as their daemon
    call: Path | None = None  # the folder of a call of `hvd_keras.run`


def pieces(data: bytes) -> list[str]:
    """Split data into pieces for messages."""
    starts = range(0, len(data), LARGE_PIECE)
    return [base64.b64encode(data[i : i + LARGE_PIECE]).decode() for i in starts]


class _Peer:
    """A connection: of a worker, once it has proved to be one."""

    def __init__(self, connection: socket.socket, secret: str) -> None:
        self.connection = connection
        self.channel = Channel(secret, is_hvdrun=True)
        self.since = time.monotonic()
        self.rank: int | None = None
        self.host = ""
        self.cores = 1


def _listen_in(directory: Path) -> socket.socket:
    """Listen on a Unix socket in a folder, whose path may be longer than a socket's address."""
    listener = socket.socket(socket.AF_UNIX)
    with in_folder(directory) as folder:
        listener.bind(f"{folder}/{SOCKET}")
    listener.listen(socket.SOMAXCONN)
    return listener


class Ranks:
    """The ranks of a job.

    Listens on the given addresses of this host, with a port of the system's choice, or without
    addresses in its directory, where only this user can connect, until all ranks are there. A
    connection that does not prove to know the secret is closed. `names` are what the user calls the
    hosts, by what they call themselves; `here` are those of this host.
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
        self._secret = secret
        self._start_timeout = start_timeout
        self._directory = directory
        self._names = names
        self._here = here
        self._listeners = [socket.create_server((address, 0)) for address in addresses]
        if not addresses:
            self._listeners.append(_listen_in(directory))
        self._strangers: list[_Peer] = []
        self._peers: dict[int, _Peer] = {}
        self._gone: set[int] = set()
        self._reports: dict[int, Report] = {}
        self._start: Start | None = None
        self._unread = 0  # bytes of input that rank 0 has not read
        self._input_over = False

    @property
    def addresses(self) -> str:
        """Where the workers reach us, in the form that `worker.connect` takes."""
        names = [listener.getsockname() for listener in self._listeners]
        if isinstance(names[0], str):
            return str(self._directory / SOCKET)
        return ",".join(f"{host}:{port}" for host, port in names)

    def open(self, loop: Loop, output: Output, start: Start) -> None:
        """Begin to wait for the workers."""
        self._loop, self._output, self._start = loop, output, start
        self._limit = time.monotonic() + self._start_timeout
        for listener in self._listeners:
            listener.setblocking(False)
        self._watch_listeners()
        self._input, self.input = os.pipe()

    def close(self) -> None:
        """Close everything; workers that still live end their commands then."""
        self._close_listeners()
        live = [peer for rank, peer in self._peers.items() if rank not in self._gone]
        for peer in [*self._strangers, *live]:
            self._loop.forget(peer.connection)
            peer.connection.close()
        self._loop.forget(self._input)
        os.close(self._input)

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            self._loop.forget(listener)
            listener.close()
        self._listeners.clear()

    def _watch_listeners(self) -> None:
        """Accept connections while there are places for strangers."""
        for listener in self._listeners:
            if len(self._strangers) < STRANGERS:
                self._loop.watch(listener, functools.partial(self._accept, listener))
            else:
                self._loop.forget(listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self.problem = TOO_MANY_FILES
                self._close_listeners()
            return  # else whoever it was has gone
        connection.setblocking(False)
        peer = _Peer(connection, self._secret)
        self._strangers.append(peer)
        self._watch_listeners()
        self._send(peer)

    def _send(self, peer: _Peer) -> None:
        try:
            peer.channel.send_to(peer.connection)
        except OSError as error:
            self._lose(peer, error_text(error))
            return
        waits = peer.channel.waiting > 0
        self._loop.watch(peer.connection, lambda: self._exchange(peer), write=waits)

    def _exchange(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(1 << 20)
        except BlockingIOError:
            self._send(peer)
            return
        except OSError as error:
            self._lose(peer, error_text(error))
            return
        if not data:
            self._lose(peer, "")
            return
        try:
            messages = peer.channel.feed(data)
            for message in messages:
                self._take(peer, message)
        except ProtocolError as error:
            self._lose(peer, str(error))
            return
        self._send(peer)

    def _lose(self, peer: _Peer, why: str) -> None:
        """The connection has ended; `why` is empty where the worker has ended."""
        self._loop.forget(peer.connection)
        peer.connection.close()
        if peer in self._strangers:
            self._strangers.remove(peer)
            self._watch_listeners()
        if peer.rank is not None and peer.rank not in self._gone:
            self._gone.add(peer.rank)
            report = self._reports[peer.rank]
            if report.status is None:
                report.time, report.gone = time.monotonic(), True
                # A killed worker here may have left something unread, which breaks it as well.
                report.lost = "" if peer.host in self._here else why

    def _take(self, peer: _Peer, message: dict[str, Any]) -> None:
        if "hello" in message:
            self._welcome(peer, **message["hello"])
            return
        assert peer.rank is not None
        report = self._reports[peer.rank]
        if "output" in message:
            stream = self._output.stream(peer.rank, message["output"])
            stream.feed(base64.b64decode(message["data"]))
        elif "took" in message:
            self._unread -= message["took"]
            if self._unread < INPUT_WINDOW and not self._input_over:
                self._loop.watch(self._input, self._pass_input)
        elif "arrived" in message:
            report.arrived = True
        elif "orphan" in message:
            if peer.host not in self._here:  # here the daemon is mpirun itself, which we watch
                report.orphaned = time.monotonic()
        elif "result" in message:
            assert self._start is not None
            assert self._start.call is not None
            with (self._start.call / f"{RESULT}-{peer.rank}").open("ab") as file:
                file.write(base64.b64decode(message["result"]))
        elif "report" in message:
            report.time = time.monotonic()
            report.status = message["report"]["status"]
            report.stopped = message["report"]["stopped"]
            report.ended = message["report"]["ended"]
            report.asked = message["report"]["asked"]
            if message["statistics"] is not None:
                path = self._directory / f"stats-{peer.rank}.json"
                path.write_text(json.dumps(message["statistics"]))
            with contextlib.suppress(OSError):  # it waits for this, to be sure that we have it all
                peer.connection.shutdown(socket.SHUT_WR)

    def _welcome(self, peer: _Peer, rank: int, host: str, cores: int) -> None:
        if rank in self._peers or not 0 <= rank < self.size:
            raise ProtocolError(f"rank {rank} of {self.size} is there twice, or does not exist")
        host = self._names.get(host, host)
        watch_liveness(peer.connection)
        self._strangers.remove(peer)
        self._watch_listeners()
        peer.rank, peer.host, peer.cores = rank, host, cores
        self._peers[rank] = peer
        self._reports[rank] = Report(None, time.monotonic(), False, host=host)
        if len(self._peers) == self.size:
            self._limit = float("inf")
            self._close_listeners()
            self._start_all()

    def _start_all(self) -> None:
        start = self._start
        assert start is not None
        ranks = Counter(peer.host for peer in self._peers.values())
        function = [] if start.call is None else pieces((start.call / FUNCTION).read_bytes())
        for peer in self._peers.values():
            threads = thread_settings(
                ranks[peer.host], start.own_environment, peer.cores, several_hosts=len(ranks) > 1
            )
            message = {
                "command": list(start.command),
                "directory": start.directory,
                "environment": {**threads, **start.environment},
                "folders": list(start.folders),
                "statistics": start.statistics,
                "own_temporary": start.own_temporary,
                "open_files": start.open_files,
            }
            for piece in function:
                peer.channel.put(function=piece)
            peer.channel.put(start=message)
            self._send(peer)
        self._loop.watch(self._input, self._pass_input)

    def _pass_input(self) -> None:
        data = os.read(self._input, INPUT_WINDOW - self._unread)
        self._input_over = not data or 0 in self._gone
        if 0 in self._gone:
            self._loop.forget(self._input)
            return
        peer = self._peers[0]
        self._unread += len(data)
        if not data or self._unread >= INPUT_WINDOW:
            self._loop.forget(self._input)
        if data:
            peer.channel.put(input=base64.b64encode(data).decode())
        else:
            peer.channel.put(input_ends=True)
        self._send(peer)

    def reports(self) -> dict[int, Report]:
        """What is known of each rank whose worker was there."""
        return self._reports

    def check(self) -> bool:
        """Look for lost hosts and time limits; returns whether the job cannot go on."""
        now = time.monotonic()
        for stranger in [*self._strangers]:
            if now > stranger.since + PROOF_TIMEOUT:
                self._lose(stranger, "")
        for rank, peer in self._peers.items():
            if rank not in self._gone and silence(peer.connection) > SILENCE:
                self._lose(peer, f"silent for {SILENCE:.0f} s")
        if now > self._limit:
            self._limit = float("inf")
            missing = [str(rank) for rank in range(self.size) if rank not in self._peers]
            self.problem = (
                f"rank {', '.join(missing)} did not connect within {self._start_timeout:.0f} s "
                "(--start-timeout)"
            )
        return bool(self.problem) or any(
            report.lost or report.orphaned < float("inf") for report in self._reports.values()
        )

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask all ranks to end."""
        for rank, peer in self._peers.items():
            if rank not in self._gone:
                peer.channel.put(stop=number)
                self._send(peer)

    def over(self) -> bool:
        """Whether no rank will send anything more."""
        return all(report.gone or report.status is not None for report in self._reports.values())

    def live(self) -> bool:
        """Whether a worker has not yet told all, and its host is there."""
        return any(
            rank not in self._gone and silence(peer.connection) < SILENCE / 3
            for rank, peer in self._peers.items()
        )

    def silent_hosts(self) -> set[str]:
        """Hosts that are silent, or whose connections have broken."""
        broken = {report.host for report in self._reports.values() if report.lost}
        silent = {
            peer.host
            for rank, peer in self._peers.items()
            if rank not in self._gone and silence(peer.connection) >= SILENCE / 3
        }
        return broken | silent
