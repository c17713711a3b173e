"""`hvd_keras.run`: a Python function on all ranks, and their results, also from a notebook.

The caller listens; each rank is a process of this module that hvdrun starts, which connects, gets
the function and sends its result. What is unpickled comes from an end that has proved to know the
secret of this call, see `channel.py`.
"""

from __future__ import annotations

import base64
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from hvd_keras.launch.errors import UsageError
from hvd_keras.launch.follow.remote_ranks import PROOF_TIMEOUT, STRANGERS
from hvd_keras.launch.onhost.channel import Channel, ProtocolError, new_secret, watch_liveness
from hvd_keras.launch.onhost.worker_local import find_rank
from hvd_keras.launch.onhost.worker_remote import connect
from hvd_keras.launch.start import hosts, network, slurm

# Environment variables through which the ranks reach the caller.
SECRET = "HVD_CALL_SECRET"
ADDRESSES = "HVD_CALL_ADDRESSES"

# Bytes of a pickle in one message.
PIECE = 1 << 20

# Lines of hvdrun's errors that an exception repeats.
LAST_LINES = 30


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    hosts: str | None = None,
    options: Sequence[str] = (),
) -> list[Any]:
    """Calls a function on all ranks of a job that hvdrun starts, and waits for its end.

    What the ranks print is printed here, with the rank before each line. The function calls
    ``hvd.init()`` itself. Function, arguments and results are pickled by cloudpickle, so functions
    of a notebook will do; what they import must be installed on all hosts.

    Args:
        func: the function.
        args: its positional arguments, equal on all ranks.
        kwargs: its keyword arguments, equal on all ranks.
        np: number of ranks. Default: all slots of ``hosts``; without hosts, 1.
        hosts: "server1:4,server2:4", as for ``hvdrun -H``. Default: this host.
        options: further options of hvdrun, such as ``["--ssh-port", "2222"]``.

    Returns:
        What the function has returned on each rank, in the order of the ranks.

    Raises:
        ValueError: hvdrun refuses to start this; its text says why.
        RuntimeError: the job has failed; the text is hvdrun's summary, with the traceback of the
            rank that failed first.

    Example:
        def train(rate):
            import hvd_keras as hvd
            hvd.init()
            return hvd.rank(), rate * hvd.size()

        assert hvd_keras.run(train, (0.1,), np=2) == [(0, 0.2), (1, 0.2)]
    """
    import cloudpickle

    if np is None and hosts is None:
        np = 1
    payload = cloudpickle.dumps((func, tuple(args), dict(kwargs or {})))
    server = _Server(payload, _addresses(hosts))
    command = [sys.executable, "-m", "hvd_keras.launch", "--end-with", str(os.getpid()), *options]
    command += [] if np is None else ["-np", str(np)]
    command += [] if hosts is None else ["-H", hosts]
    command += [sys.executable, "-m", "hvd_keras.launch.run_function"]
    environment = os.environ | {SECRET: server.secret, ADDRESSES: server.addresses}
    with server:
        status, told = _follow(command, environment)
    if status != 0:
        raise (ValueError if status == 2 else RuntimeError)(f"hvd_keras.run: {told.strip()}")
    return [cloudpickle.loads(server.results[rank]) for rank in sorted(server.results)]


def _addresses(wanted: str | None) -> list[str]:
    """Where the ranks can reach us: on this host only, or on the ways to the others."""
    try:
        names = [] if wanted is None else [host.name for host in hosts.parse(wanted)]
        if wanted is None and slurm.find(os.environ) is not None:
            names = [node.name for node in slurm.nodes(os.environ)]
        return network.addresses_towards(names) or ["127.0.0.1"]
    except UsageError as error:
        raise ValueError(f"hvd_keras.run: {error}") from error


def _follow(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run hvdrun and print its output as Python does, which a notebook shows."""
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as hvdrun:
        last: list[str] = []
        threads = [
            threading.Thread(target=_relay, args=(hvdrun.stdout, sys.stdout, [])),
            threading.Thread(target=_relay, args=(hvdrun.stderr, sys.stderr, last)),
        ]
        for thread in threads:
            thread.start()
        try:
            status = hvdrun.wait()
        except BaseException:
            hvdrun.send_signal(signal.SIGINT)
            hvdrun.wait()
            raise
        finally:
            for thread in threads:
                thread.join()
    return status, "".join(last)


def _relay(source: IO[str], target: Any, last: list[str]) -> None:
    for line in source:
        target.write(line)
        target.flush()
        last.append(line)
        del last[:-LAST_LINES]


def _pieces(data: bytes) -> Iterator[tuple[str, bool]]:
    for start in range(0, len(data), PIECE):
        piece = base64.b64encode(data[start : start + PIECE]).decode()
        yield piece, start + PIECE >= len(data)


class _Link:
    """A connection that waits: what both ends of a call use."""

    def __init__(self, connection: socket.socket, secret: str, is_caller: bool) -> None:
        self._connection = connection
        self._channel = Channel(secret, is_hvdrun=is_caller)
        self._messages: list[dict[str, Any]] = []
        watch_liveness(connection)
        self._flush()

    def _flush(self) -> None:
        self._channel.send_to(self._connection)

    def _take(self) -> None:
        data = self._connection.recv(PIECE)
        if not data:
            raise EOFError("the other end has gone")
        self._messages += self._channel.feed(data)
        self._flush()

    def wait_until_open(self) -> None:
        """Wait until both ends have proved that they know the secret."""
        while not self._channel.open:
            self._take()

    def receive(self) -> dict[str, Any]:
        """The next message. Raises EOFError at the end of the connection."""
        while not self._messages:
            self._take()
        return self._messages.pop(0)

    def send(self, **message: Any) -> None:
        """Send a message."""
        self._channel.put(**message)
        self._flush()

    def send_bytes(self, data: bytes) -> None:
        """Send bytes of any length."""
        for piece, last in _pieces(data):
            self.send(piece=piece, last=last)

    def receive_bytes(self) -> bytes:
        """What `send_bytes` has sent."""
        data = bytearray()
        while True:
            message = self.receive()
            data += base64.b64decode(message["piece"])
            if message["last"]:
                return bytes(data)


class _Server:
    """Gives the ranks the call and takes their results, each in a thread."""

    def __init__(self, payload: bytes, addresses: Sequence[str]) -> None:
        self.secret = new_secret()
        self.results: dict[int, bytes] = {}
        self._payload = payload
        self._places = threading.Semaphore(STRANGERS)
        self._listeners = [socket.create_server((address, 0)) for address in addresses]

    @property
    def addresses(self) -> str:
        """As `remote.connect` wants it."""
        names = [listener.getsockname() for listener in self._listeners]
        return ",".join(f"{host}:{port}" for host, port in names)

    def __enter__(self) -> None:
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            self._places.acquire()
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _prove(self, connection: socket.socket) -> _Link:
        """Wait until the other end has proved that it knows the secret."""
        try:
            connection.settimeout(PROOF_TIMEOUT)
            link = _Link(connection, self.secret, is_caller=True)
            link.wait_until_open()
            connection.settimeout(None)
            return link
        finally:
            self._places.release()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                link = self._prove(connection)
                rank = link.receive()["rank"]
                link.send_bytes(self._payload)
                self.results[rank] = link.receive_bytes()
                link.send(got=rank)
            except (OSError, EOFError, ProtocolError):  # hvdrun tells how the rank has ended
                return


def main() -> None:
    """A rank: get the call, make it, send its result."""
    import cloudpickle

    secret, addresses = os.environ.pop(SECRET), os.environ.pop(ADDRESSES)
    with connect(addresses) as connection:
        connection.settimeout(None)
        link = _Link(connection, secret, is_caller=False)
        link.wait_until_open()
        link.send(rank=find_rank(os.environ))
        func, args, kwargs = cloudpickle.loads(link.receive_bytes())
        try:
            result = func(*args, **kwargs)
        except SystemExit as error:
            if error.code:
                raise
            raise RuntimeError("the function called sys.exit(); expected that it returns") from None
        link.send_bytes(cloudpickle.dumps(result))
        link.receive()


if __name__ == "__main__":
    main()
