"""The authenticated connection between hvdrun and its workers: what a stranger can do to it."""

import contextlib
import functools
import json
import os
import resource
import socket
import time
from pathlib import Path

import pytest

from hvd_keras.launch.follow.event_loop import Loop
from hvd_keras.launch.follow.output import Output
from hvd_keras.launch.follow.ranks import STRANGERS, Ranks, Start
from hvd_keras.launch.onhost.channel import FIRST_LIMIT, LIMIT, Channel, ProtocolError
from tests.harness import launcher


class Wire:
    """Two ends, and all that has gone over, which an eavesdropper knows."""

    def __init__(self, secrets: tuple[str, str] = ("s" * 64, "s" * 64)) -> None:
        self.hvdrun = Channel(secrets[0], is_hvdrun=True)
        self.worker = Channel(secrets[1], is_hvdrun=False)
        self.seen: list[bytes] = []

    def send(self, source: Channel, target: Channel) -> list[dict]:
        data = bytes(source._outgoing)
        source.drop()
        self.seen.append(data)
        return target.feed(data)

    def meet(self) -> None:
        for _ in range(2):
            self.send(self.hvdrun, self.worker)
            self.send(self.worker, self.hvdrun)
        self.send(self.hvdrun, self.worker)


def test_messages_pass_both_ways_in_pieces() -> None:
    wire = Wire()
    wire.meet()
    assert wire.hvdrun.open
    assert wire.worker.open
    wire.worker.put(output="out", data="ü\n")
    wire.worker.put(took=7)
    data = bytes(wire.worker._outgoing)
    got = [message for i in range(len(data)) for message in wire.hvdrun.feed(data[i : i + 1])]
    assert got == [{"output": "out", "data": "ü\n"}, {"took": 7}]
    wire.hvdrun.put(stop=15)
    assert wire.send(wire.hvdrun, wire.worker) == [{"stop": 15}]


def test_the_secret_is_never_sent() -> None:
    wire = Wire()
    wire.meet()
    wire.worker.put(took=1)
    wire.send(wire.worker, wire.hvdrun)
    assert b"s" * 64 not in b"".join(wire.seen)


@pytest.mark.parametrize("liar", ["worker", "hvdrun"])
def test_whoever_does_not_know_the_secret_is_refused(liar: str) -> None:
    wire = Wire(("s" * 64, "t" * 64))
    if liar == "worker":
        with pytest.raises(ProtocolError, match="does not know this job's secret"):
            wire.meet()
        assert not wire.hvdrun.open
        return
    wire.send(wire.hvdrun, wire.worker)
    with pytest.raises(ProtocolError, match="does not know this job's secret"):
        wire.worker.feed(b"0" * 64 + b"\n")
    assert not wire.worker.open


def test_an_old_conversation_cannot_be_played_again() -> None:
    first, second = Wire(), Wire()
    first.meet()
    with pytest.raises(ProtocolError):
        second.hvdrun.feed(b"".join(first.seen[1::2]))


def test_nothing_unproved_is_parsed_or_kept(monkeypatch) -> None:
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("parsed"))
    for data in (b'{"hello": 1}\n', b"\x80\x04pickle\n", b"x" * (FIRST_LIMIT + 1)):
        with pytest.raises(ProtocolError):
            Channel("s" * 64, is_hvdrun=True).feed(data)
    wire = Wire()
    wire.meet()
    with pytest.raises(ProtocolError, match="a message is too long"):
        wire.worker.feed(b"x" * (LIMIT + 1))


def test_more_workers_come_at_once_than_strangers_are_accepted(tmp_path: Path) -> None:
    """None is turned away."""
    size, secret = STRANGERS + 20, "s" * 64
    ranks = Ranks(size, ["127.0.0.1"], secret, launcher.LIMIT, tmp_path, {}, ())
    host, _, port = ranks.addresses.rpartition(":")
    workers = [socket.create_connection((host, int(port))) for _ in range(size)]
    channels = [Channel(secret, is_hvdrun=False) for _ in workers]
    loop, output = Loop(), Output(True, None, None, False)
    ranks.open(loop, output, Start(["true"], "/", {}, [], False, {}))
    os.close(ranks.input)
    while loop.turn(0.1):  # as many are accepted as may be, before any proves itself
        pass
    greeted, started = set(), set()
    limit = time.monotonic() + launcher.LIMIT
    while len(started) < size:
        assert time.monotonic() < limit
        loop.turn(0.01)
        for rank, (worker, channel) in enumerate(zip(workers, channels, strict=True)):
            worker.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                data = worker.recv(1 << 16)
                assert data, f"worker {rank} was turned away"
                started |= {rank for message in channel.feed(data) if "start" in message}
            if channel.open and rank not in greeted:
                greeted.add(rank)
                channel.put(hello={"rank": rank, "host": "here", "cores": 2})
            channel.send_to(worker)
    ranks.close()
    loop.close()
    for worker in workers:
        worker.close()


def test_an_event_of_what_was_closed_meanwhile_is_dropped() -> None:
    """Both are ready at once, and the first to be handled ends the other."""
    pairs = [socket.socketpair() for _ in range(2)]
    loop, handled = Loop(), []

    def handle(number: int) -> None:
        handled.append(number)
        other = pairs[1 - number][0]
        loop.forget(other)
        other.close()
        loop.forget(other)  # again, as when a connection is lost twice

    for number, (end, far) in enumerate(pairs):
        loop.watch(end, functools.partial(handle, number))
        far.sendall(b"x")
    assert loop.turn(1.0)
    assert len(handled) == 1
    loop.close()


def test_too_many_open_files_end_the_job(tmp_path: Path) -> None:
    ranks = Ranks(3, ["127.0.0.1"], "s" * 64, launcher.LIMIT, tmp_path, {}, ())
    host, _, port = ranks.addresses.rpartition(":")
    loop, output = Loop(), Output(True, None, None, False)
    ranks.open(loop, output, Start(["true"], "/", {}, [], False, {}))
    os.close(ranks.input)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_connection((host, int(port))) as worker:
        highest = os.dup(0)
        os.close(highest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, limits[1]))
        try:
            assert loop.turn(1.0)
            assert not loop.turn(0.1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert ranks.check()
        assert "too many open files" in ranks.problem
        assert worker.fileno() > 0
    ranks.close()
    loop.close()
