"""hvdrun's end of the connections to the ranks' workers, on this host and on others."""

import asyncio
import base64
import concurrent.futures
import contextlib
import errno
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_keras.launch.errors import refusing, say
from hvd_keras.launch.follow.outcome import Report, names_and_hosts
from hvd_keras.launch.follow.output import Output
from hvd_keras.launch.follow.supervise import wait_for
from hvd_keras.launch.job_spec import JobSpec
from hvd_keras.launch.onhost import limits
from hvd_keras.launch.onhost.channel import PIECE, Connection, ProtocolError, silence
from hvd_keras.launch.onhost.cores import may_be_divided, thread_settings
from hvd_keras.launch.onhost.worker import FUNCTION, RESULT
from hvd_keras.launch.start.hosts import Placement, own_addresses
from hvd_keras.runtime.linux import in_folder

# How many connections may be open that have not proved to belong to the job; further ones wait to
# be accepted.
UNPROVEN = 64

SOCKET = "socket"  # in the job's directory, for a job on this host
# How Python and shells read a variable; and which belong to a host or a session.
_READS = re.compile(rb"(?:environ\W+(?:(?:get|pop)\W+)?|getenv\W+|\$\{?)([A-Za-z]\w+)")
_OF_HOSTS = re.compile("(SLURM|SSH|XDG)_|DISPLAY|HOSTNAME|TERM")


class _Peer(Connection):
    """The connection to a worker; or to a stranger, while it has no report."""

    report: Report
    cores = 0  # that it may use
    mask: Sequence[int] = ()  # their numbers, without a control group's quota
    variables: Sequence[str] = ()  # the names of those that its host has set
    is_here = False  # on our host
    why = ""  # we have ended the connection


@dataclass
class Ranks:
    """The ranks of a job.

    Until all ranks have connected, listens on addresses of this host, on a port that the system
    chooses; in a job on this host, on a Unix socket in the directory, where only this user can
    connect. A connection that does not prove knowledge of the secret is closed.
    """

    spec: JobSpec
    placement: Placement
    directory: Path
    secret: str
    output: Output
    changed: Callable[[], None]  # is called when something happens that may end the job
    problem: str = ""  # why the job cannot go on, if the reports do not tell

    def __post_init__(self) -> None:
        given, self.size = self.spec.options, self.placement.size
        self.reports = [Report(rank, started=False) for rank in range(self.size)]
        if self.spec.is_local:
            self._listeners = [socket.socket(socket.AF_UNIX)]
            message = f"cannot make a socket in {self.directory}"
            advice = "; set TMPDIR to one on another file system"
            with refusing(message, advice), in_folder(self.directory) as folder:
                self._listeners[0].bind(f"{folder}/{SOCKET}")
            self._listeners[0].listen(socket.SOMAXCONN)
        else:
            names = [host.name for host in self.placement.hosts]
            own = own_addresses(given.network_interface, names)
            self._listeners = [socket.create_server((address, 0)) for address in own]
        self._peers: dict[int, _Peer] = {}  # by rank
        self._accepting: list[asyncio.Task[None]] = []
        self._serving: set[asyncio.Task[None]] = set()
        self.call = None if given.call is None else Path(given.call[1])  # of `hvd_keras.run`
        self._function = b""
        if self.call is not None:
            self._function = (self.call / FUNCTION).read_bytes()
            for path in self.call.glob(f"{RESULT}-*"):  # of an earlier start
                path.unlink()
        self._input_was_read: asyncio.Queue[bool] = asyncio.Queue()
        self._places = asyncio.Semaphore(UNPROVEN)

    @property
    def addresses(self) -> str:
        """Where the workers reach us, in the form that `connect` takes."""
        if self.spec.is_local:
            return str(self.directory / SOCKET)
        names = [listener.getsockname() for listener in self._listeners]
        return ",".join(f"{host}:{port}" for host, port in names)

    def open(self, start: Mapping[str, Any]) -> None:
        """Wait for the workers, and let all of them start this, as `Worker` takes it."""
        self._start = start
        self._checked = time.monotonic()
        patience = float("inf") if self.spec.is_local else self.spec.options.start_timeout
        self._limit = self._checked + patience
        for listener in self._listeners:
            listener.setblocking(False)
            self._accepting.append(asyncio.create_task(self._accept(listener)))

    async def close(self) -> None:
        """Close everything; workers that still live end their commands then."""
        self._stop_accepting()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._accepting, *self._serving, return_exceptions=True)

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
                        self.problem = (
                            "too many open files for this many ranks; raise the limit (`ulimit -n`)"
                        )
                        return
                    self._places.release()  # the other end has gone
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
        streams = await asyncio.open_connection(sock=connection)
        peer, why = _Peer(self.secret, streams, listens=True), ""
        messages = peer.messages()
        try:
            try:
                first = await asyncio.wait_for(messages.__anext__(), limits.PROOF_TIMEOUT)
            finally:
                self._places.release()
            self._welcome(peer, **first["hello"])
            async for message in messages:
                await self._take(peer, message)
        except (ProtocolError, StopAsyncIteration, asyncio.TimeoutError) as error:
            why = str(error)
        except OSError as error:
            why = error.strerror or str(error)
        finally:
            why = peer.why or why  # empty where the worker has ended
            peer.end()
            if peer in self._peers.values():
                peer.report.gone = True
                if peer.report.status is None:
                    peer.report.time = time.monotonic()
                    # A killed worker here may have left something unread, which breaks it as well.
                    peer.report.lost = "" if peer.is_here else why
                if peer.report.rank == 0:
                    self._input_was_read.put_nowait(False)
            self.changed()

    async def _take(self, peer: _Peer, message: dict[str, Any]) -> None:
        report = peer.report
        if "output" in message:
            stream = self.output.stream(report.rank, message["output"])
            stream.feed(base64.b64decode(message["data"]))
            while self.output.full:
                await wait_for(self.output.room, limits.CHECK)
                peer.heard = time.monotonic()
                peer.send(waiting=True)  # it must hear from us while it cannot send
        elif "mark" in message:
            report.note(message["mark"])
            self.changed()
        elif "statistics" in message:
            host = report.host or socket.gethostname()
            self.spec.statistics.take(report.rank, host, message["statistics"])
        elif "input_was_read" in message:
            self._input_was_read.put_nowait(message["input_was_read"])
        elif "orphan" in message:
            if not peer.is_here:  # here the daemon is mpirun itself, which we watch
                report.orphaned = time.monotonic()
        elif "result" in message:
            assert self.call is not None
            try:
                with (self.call / f"{RESULT}-{report.rank}").open("ab") as file:
                    file.write(base64.b64decode(message["result"]))
            except OSError as error:  # a full disk under $TMPDIR
                self.problem = f"cannot store what rank {report.rank} has sent: {error}"
        elif "report" in message:
            vars(report).update(message["report"], time=time.monotonic())
            if report.status == 0 and not report.phase:
                # mpirun may know that it has left MPI without a word.
                peer.send(end="now" if self.spec.is_local else "watch")
            self.changed()

    def release(self) -> None:
        """Let the workers end that have reported."""
        # Before, mpirun would end all ranks because of one, with less patience and without words;
        # and on a host that is cut off a worker cleans up.
        for peer in self._peers.values():
            if peer.report.status is not None:
                peer.send(end="now")

    def _welcome(self, peer: _Peer, rank: int, host: str, **facts: Any) -> None:
        if rank in self._peers or not 0 <= rank < self.size:
            raise ProtocolError(f"rank {rank} is not expected")
        vars(peer).update(facts, is_here=host == socket.gethostname())
        self._peers[rank] = peer
        peer.report = self.reports[rank] = Report(rank, host=self.placement.names.get(host, host))
        if len(self._peers) == self.size:
            self._limit = float("inf")
            self._stop_accepting()
            self._start_all()

    def _start_all(self) -> None:
        hosts: dict[str, list[_Peer]] = {}  # with their ranks in order
        for _, peer in sorted(self._peers.items()):
            hosts.setdefault(peer.report.host, []).append(peer)
        chosen = os.environ | self._start["environment"]
        is_restart = self.spec.statistics.starts > 1  # an earlier start has consumed the input
        for peers in hosts.values():
            usable = min(peer.cores for peer in peers)
            masks = [peer.mask for peer in peers]
            is_divided = self.spec.options.bind and may_be_divided(masks, usable, chosen)
            for index, peer in enumerate(peers):
                # Those that the user has bound elsewhere need no part of this one's cores.
                sharing, several = masks.count(peer.mask), len(hosts) > 1
                threads = thread_settings(sharing, os.environ, peer.cores, several_hosts=several)
                environment = threads | self._start["environment"]
                part = [index, len(peers)] if is_divided else None
                start = {**self._start, "environment": environment, "part": part}
                self._do(self._start_one(peer, start))
                if peer.report.rank > 0 or is_restart:
                    peer.send(input="")
        if not is_restart:
            self._forward_input()
            first = {name: peers[0] for name, peers in hosts.items()}
            if away := {name: peer for name, peer in first.items() if not peer.is_here}:
                self._tell_missing(away)

    def _tell_missing(self, peers: Mapping[str, _Peer]) -> None:
        """Name the variables set here that the script reads and ranks elsewhere do not have.

        They may be secrets, which only the user lets leave this host.
        """
        text = b""
        for word in self.spec.command:
            with contextlib.suppress(OSError):
                text += Path(word).read_bytes() if word.endswith((".py", ".sh")) else b""
        read = {name.decode() for name in _READS.findall(text)}
        read = {name for name in read if not _OF_HOSTS.match(name)}
        read &= os.environ.keys() - self._start["environment"].keys()
        missing = {host: read.difference(peer.variables) for host, peer in peers.items()}
        if names := sorted(set().union(*missing.values())):
            where = ", ".join(host for host, lacking in missing.items() if lacking)
            say(
                f"ranks on {where} do not get {', '.join(names)}, set here and read by the script; "
                f"to pass on: {' '.join(f'--env {name}' for name in names)}"
            )

    async def _start_one(self, peer: _Peer, start: Mapping[str, Any]) -> None:
        for first in range(0, len(self._function), PIECE):
            piece = self._function[first : first + PIECE]
            await peer.send_much(function=base64.b64encode(piece).decode())
        peer.send(start=start)

    def _forward_input(self) -> None:
        """Pass standard input on to rank 0, and an empty piece at its end, while it reads.

        Open MPI 5's mpirun never forwards the end of a file.
        """
        # If ignored, a read in the background fails instead of stopping hvdrun.
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)
        loop = asyncio.get_running_loop()

        async def send(data: bytes) -> bool:
            if self.reports[0].gone:
                return False
            self._peers[0].send(input=base64.b64encode(data).decode())
            return bool(data) and await self._input_was_read.get()

        def pump() -> None:
            # When the job has ended, the loop ends and cancels the call.
            with contextlib.suppress(RuntimeError, concurrent.futures.CancelledError):
                more = True
                while more:
                    try:
                        data = os.read(0, PIECE)
                    except OSError as error:
                        if error.errno == errno.EIO and os.isatty(0):  # another job has it, for now
                            time.sleep(limits.CHECK)
                            continue
                        data = b""  # nothing can be read, as from a folder
                    more = asyncio.run_coroutine_threadsafe(send(data), loop).result()

        threading.Thread(target=pump, daemon=True).start()

    def check(self) -> bool:
        """Look for lost hosts and time limits; returns whether the job cannot go on."""
        now = time.monotonic()
        left = [peer for peer in self._peers.values() if not peer.report.over]
        for peer in left:
            if silence(peer.socket) > limits.SILENCE:
                peer.why = f"silent for {limits.SILENCE:.0f} s"
                peer.end()
            if now > self._checked + limits.WORKER_ALIVE:  # we were stopped ourselves
                peer.heard = now
        self._checked = now
        patience = limits.MUTE if len(left) < self.size else 10 * limits.MUTE
        if left and now > max(peer.heard for peer in left) + patience:
            whose = names_and_hosts([peer.report for peer in left])
            self.problem = (
                f"hvdrun's processes of {whose} have not answered for {patience:.0f} s; they may "
                "be stopped"
            )
        if now > self._limit:
            self._limit = float("inf")
            missing = [str(report.rank) for report in self.reports if not report.started]
            within = f"within {self.spec.options.start_timeout} s (--start-timeout)"
            self.problem = f"rank {', '.join(missing)} did not connect {within}"
        return bool(self.problem) or any(
            report.lost or report.orphaned < float("inf") for report in self.reports
        )

    def tell(self, **message: Any) -> None:
        for peer in self._peers.values():
            peer.send(**message)

    def over(self) -> bool:
        """Whether no rank will send anything more."""
        return all(report.over for report in self.reports if report.started)

    def live(self) -> bool:
        """Whether a worker on a host that answers may still send something."""
        return any(
            not peer.report.over and silence(peer.socket) < limits.SUSPICION
            for peer in self._peers.values()
        )

    def note_silence(self) -> None:
        """Note at the end which hosts are silent; the clean-up shows whether they are lost."""
        for peer in self._peers.values():
            if not peer.report.gone and silence(peer.socket) >= limits.SUSPICION:
                peer.report.lost = "silent"
