"""The authenticated connection between hvdrun and its workers: what a stranger can do to it."""

import asyncio
import base64
import contextlib
import functools
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hvd_keras.agents.link import Link
from hvd_keras.launch import job_spec
from hvd_keras.launch.follow.output import Destination, Output
from hvd_keras.launch.follow.supervise import Signals
from hvd_keras.launch.onhost import channel, limits
from hvd_keras.launch.onhost.cores import THREAD_VARIABLES
from hvd_keras.launch.onhost.process import ask_to_end, private_folder
from hvd_keras.launch.onhost.worker import FUNCTION
from hvd_keras.launch.options import parse
from hvd_keras.launch.ranks import UNPROVEN, Ranks
from hvd_keras.launch.start.hosts import Host, Placement
from hvd_keras.launch.start.remote_shell import RemoteShell
from tests.harness import launcher

SECRET = "s" * 64


def in_loop(test):
    """Run a test in an event loop."""

    @functools.wraps(test)
    def run(**fixtures):
        asyncio.run(test(**fixtures))

    return run


class Wire:
    """Two ends that prove themselves, and all that has gone over, which an eavesdropper knows."""

    def __init__(self, secrets: tuple[str, str] = ("s" * 64, "s" * 64)) -> None:
        self.ends = (
            channel.prove(secrets[0], is_hvdrun=True),
            channel.prove(secrets[1], is_hvdrun=False),
        )
        self.seen = [next(end)[0] for end in self.ends]

    def meet(self) -> None:
        for _ in range(2):
            arrived = reversed(self.seen[-2:])
            self.seen += [end.send(data)[0] for end, data in zip(self.ends, arrived, strict=True)]


async def pair(*listening: bool) -> list[channel.Connection]:
    """Two ends over a socket."""
    return [
        channel.Connection(SECRET, await asyncio.open_connection(sock=end), listens=listens)
        for end, listens in zip(socket.socketpair(), listening, strict=True)
    ]


@in_loop
async def test_messages_pass_both_ways_in_pieces() -> None:
    hvdrun, worker = await pair(True, False)
    sent = {"output": "out", "data": "ü\n" * 100_000}
    answers = hvdrun.messages()
    first = asyncio.create_task(answers.__anext__())

    async def work() -> dict:
        async for message in worker.messages():
            worker.send(took=message)
        return message

    end = asyncio.create_task(work())
    await until(lambda: hvdrun._is_open)
    hvdrun.send(**sent)
    assert await first == {"took": sent}
    hvdrun.send(stop=15)
    assert await answers.__anext__() == {"took": {"stop": 15}}
    hvdrun._writer.close()
    assert await end == {"stop": 15}
    worker.end()


def test_the_secret_is_never_sent() -> None:
    wire = Wire()
    wire.meet()
    assert len(b"".join(wire.seen)) == 2 * (len(channel.GREETING) + channel.NONCE + channel.PROOF)
    assert b"s" * 64 not in b"".join(wire.seen)


def test_whoever_does_not_know_the_secret_is_refused() -> None:
    with pytest.raises(channel.ProtocolError, match="does not know this job's secret"):
        Wire(("s" * 64, "t" * 64)).meet()
    wire = Wire()
    wire.ends[1].send(wire.seen[0])
    with pytest.raises(channel.ProtocolError, match="does not know this job's secret"):
        wire.ends[1].send(b"0" * channel.PROOF)  # of a false hvdrun


def test_an_old_conversation_cannot_be_played_again() -> None:
    first, second = Wire(), Wire()
    first.meet()
    second.ends[0].send(first.seen[1])
    with pytest.raises(channel.ProtocolError):
        second.ends[0].send(first.seen[3])


@in_loop
async def test_nothing_unproved_is_parsed_or_kept(monkeypatch) -> None:
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("parsed"))
    for data in (b'{"hello": 1}\n' * 10, b"\x80\x04pickle\n" * 20, b"x" * 1000):
        hvdrun, stranger = await pair(True, False)
        stranger._writer.write(data)
        with pytest.raises(channel.ProtocolError):
            await hvdrun.messages().__anext__()
        stranger.end()
        hvdrun.end()


@in_loop
async def test_a_message_that_is_too_long_is_refused() -> None:
    hvdrun, worker = await pair(True, False)
    hello = asyncio.create_task(hvdrun.messages().__anext__())
    end = asyncio.create_task(worker.messages().__anext__())
    await until(lambda: worker._is_open)
    worker._writer.write(channel.HEAD.pack(channel.LIMIT + 1))
    with pytest.raises(channel.ProtocolError, match="a message is too long"):
        await hello
    hvdrun.end()
    with contextlib.suppress(StopAsyncIteration, OSError):
        await end
    worker.end()


async def listen(folder: Path, size: int, *call: Path) -> tuple[Ranks, tuple[str, int]]:
    """A job of so many ranks that waits for its workers, and its address."""
    options = ["-H", f"here:{size}", "--network-interface", "lo", "--start-timeout", "900"]
    options += [word for path in call for word in ("--call", str(os.getpid()), str(path))]
    spec = job_spec.build(parse([*options, "true"], ()))
    placement = Placement([Host("here", size)], {})
    output = Output(True, None, False, Signals())
    ranks = Ranks(spec, placement, folder, SECRET, output, lambda: None)
    host, _, port = ranks.addresses.rpartition(":")
    ranks.open({"command": ["true"], "environment": {}})
    return ranks, (host, int(port))


@in_loop
async def test_more_workers_come_at_once_than_strangers_are_accepted(tmp_path: Path) -> None:
    """None is turned away."""
    size = UNPROVEN + 20
    ranks, address = await listen(tmp_path, size)
    streams = [await asyncio.open_connection(*address) for _ in range(size)]
    await until(lambda: len(ranks._serving) >= UNPROVEN)  # none has proved itself yet
    await asyncio.sleep(0.1)
    assert len(ranks._serving) == UNPROVEN

    async def work(rank: int) -> bool:
        hello = {"rank": rank, "host": "here", "cores": 2, "mask": [0, 1]}
        connection = channel.Connection(SECRET, streams[rank], listens=False, hello=hello)
        async for message in connection.messages():
            if "start" in message:
                return True
        return False

    works = [asyncio.wait_for(work(rank), launcher.LIMIT) for rank in range(size)]
    assert await asyncio.gather(*works) == [True] * size
    await ranks.close()


@in_loop
async def test_connections_without_a_proof_are_closed(tmp_path: Path, monkeypatch) -> None:
    """And leaves a place for another."""
    monkeypatch.setattr(limits, "PROOF_TIMEOUT", 0.5)
    ranks, address = await listen(tmp_path, 1)
    for _ in range(UNPROVEN + 1):
        reader, _ = await asyncio.open_connection(*address)
    data = await asyncio.wait_for(reader.read(), launcher.LIMIT)
    assert data.startswith(channel.GREETING)
    assert len(data) == len(channel.GREETING) + channel.NONCE
    await ranks.close()


@in_loop
async def test_too_many_open_files_end_the_job(tmp_path: Path) -> None:
    ranks, address = await listen(tmp_path, 3)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_connection(address):
        highest = os.dup(0)
        os.close(highest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, limits[1]))
        try:
            await until(lambda: ranks.problem)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert ranks.check()
        assert "too many open files" in ranks.problem
        assert all(task.done() for task in ranks._accepting)
    await ranks.close()


async def join(
    address: tuple[str, int], rank: int = 0, mask: Sequence[int] = (0, 1)
) -> tuple[socket.socket, Link]:
    """A worker that hvdrun has accepted."""
    worker = socket.create_connection(address)
    link = await asyncio.to_thread(Link, worker, SECRET, listens=False)
    link.send(hello={"rank": rank, "host": "here", "cores": len(mask), "mask": mask})
    return worker, link


async def until(condition: Callable[[], object]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), launcher.LIMIT)


@in_loop
async def test_ranks_share_the_cores_to_which_the_user_has_bound_them(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.delenv(THREAD_VARIABLES[0], raising=False)
    ranks, address = await listen(tmp_path, 3)
    masks = [range(4), range(4, 8), range(4, 8)]
    workers = [await join(address, rank, [*mask]) for rank, mask in enumerate(masks)]
    for (worker, link), threads in zip(workers, (4, 2, 2), strict=True):
        message = await asyncio.to_thread(link.receive)
        while "start" not in message:
            message = await asyncio.to_thread(link.receive)
        assert message["start"]["environment"][THREAD_VARIABLES[0]] == str(threads)
        worker.close()
    await ranks.close()


@in_loop
async def test_hvdrun_sends_to_a_worker_whose_output_has_to_wait(tmp_path: Path) -> None:
    """Otherwise it would take hvdrun's host for lost: acknowledgements become rare."""
    ranks, address = await listen(tmp_path, 1)
    worker, link = await join(address)
    reader, writer = os.pipe()
    ranks.output._out = Destination(writer, lambda: None)
    data = base64.b64encode(bytes(1 << 21)).decode()
    await asyncio.to_thread(link.send, output="out", data=data)
    worker.setblocking(False)
    await until(lambda: ranks.output.full)

    def is_quiet() -> bool:
        with contextlib.suppress(BlockingIOError):
            while True:
                worker.send(bytes(1 << 16))
        return channel.silence(worker) > 3.0

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(until(is_quiet), 6.0)
        pytest.fail("nothing came for 3 s")
    assert ranks.output.full
    await ranks.close()
    os.close(reader)


@in_loop
async def test_what_hvdrun_cannot_keep_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / FUNCTION).write_bytes(b"pickle")
    ranks, address = await listen(tmp_path, 1, tmp_path)
    _, link = await join(address)
    shutil.rmtree(tmp_path)  # stands for a full disk
    link.send(result=base64.b64encode(b"pickle").decode())
    await until(lambda: ranks.reports[0].gone | bool(ranks.problem))
    assert ranks.check()
    assert ranks.problem.startswith("cannot store what rank 0 has sent: [Errno 2] No such file")
    await ranks.close()


def test_a_folder_that_another_user_could_use_is_refused(tmp_path: Path) -> None:
    """The job's number is no secret on its hosts."""
    folder = private_folder(tmp_path / "job")
    assert private_folder(folder).stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="expected a folder of user"):
        private_folder(folder)
    (tmp_path / "link").symlink_to(private_folder(tmp_path / "other"))
    with pytest.raises(PermissionError, match="mode lrwx"):
        private_folder(tmp_path / "link")
    if os.geteuid() == 0:
        os.chown(tmp_path / "other", 65534, 65534)
        with pytest.raises(PermissionError, match="owner 65534"):
            private_folder(tmp_path / "other")


def test_the_options_of_ssh_are_not_taken_for_the_host(tmp_path: Path) -> None:
    """And words that mpirun has quoted for a shell arrive as they are."""
    show = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))", "-x", "a b"]
    (tmp_path / "ssh").write_text(RemoteShell(show).agent("7", False))
    given = ["-x", "-o", "ConnectionAttempts=10", "-p2222", "server2"]
    words = ["printf", "'%s|'", "-x", "it\\'s", "'a  b'", '"$HVDRUN_JOB\n"']
    script = ["/bin/sh", str(tmp_path / "ssh"), *given, *words]
    shown = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    *ssh, host, text = json.loads(shown)
    assert (ssh, host) == (["-x", "a b"], "server2")
    environment = {**os.environ, "TMPDIR": str(tmp_path), "SHELL": "/bin/sh"}
    there = subprocess.run(["sh", "-c", text], env=environment, capture_output=True, text=True)
    assert there.stdout == "-x|it's|a  b|7\n|", there


def test_mpiruns_daemon_takes_no_folder_that_another_user_has_made(tmp_path: Path) -> None:
    """The text that ssh would run on the other host, run here."""
    agent = RemoteShell(["printf", "%s\\n"]).agent("7", False)
    script = ["sh", "-c", agent, "ssh", "server2", 'stat -c %a "$TMPDIR"']
    shown = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    text = shown.partition("\n")[2]

    def answer() -> str:
        environment = {**os.environ, "TMPDIR": str(tmp_path), "SHELL": "/bin/sh"}
        job = ["sh", "-c", text]
        return subprocess.run(job, env=environment, capture_output=True, text=True).stdout

    assert [answer(), answer()] == ["700\n"] * 2  # the daemons of a second start use it again
    folder = tmp_path / "hvdrun-7"
    folder.rename(tmp_path / "other")
    folder.symlink_to(tmp_path / "other")
    assert answer() == ""
    if os.geteuid() == 0:
        folder.unlink()
        folder.mkdir()
        os.chown(folder, 65534, 65534)
        assert answer() == ""


@in_loop
async def test_a_function_waits_for_slow_workers_where_it_is(tmp_path: Path) -> None:
    """hvdrun does not keep a copy for each rank."""
    (tmp_path / FUNCTION).write_bytes(bytes(64 << 20))
    ranks, address = await listen(tmp_path, 1, tmp_path)
    worker, _ = await join(address)
    await until(lambda: ranks.reports[0].started)
    await asyncio.sleep(0.5)
    assert ranks._peers[0]._writer.transport.get_write_buffer_size() < 8 << 20
    worker.close()
    await ranks.close()


@in_loop
async def test_a_worker_that_is_stopped_ends_the_job(tmp_path: Path, monkeypatch) -> None:
    """The kernel answers for it."""
    monkeypatch.setattr(limits, "MUTE", 0.2)
    ranks, address = await listen(tmp_path, 2)
    stopped, _ = await join(address, 0)
    _, link = await join(address, 1)
    await until(lambda: all(report.started for report in ranks.reports))
    await asyncio.sleep(0.5)
    assert not ranks.check()  # the other rank may still need it
    link.send(report={"status": 0, "stopped": False, "by_signal": False})
    await until(ranks.check)
    assert ranks.problem.startswith("hvdrun's processes of rank 0 on here have not answered")
    stopped.close()
    await ranks.close()


STOPPED = """
import faulthandler, os, signal, sys, threading
faulthandler.register(signal.SIGTERM, open(sys.argv[1], "wb", buffering=0), chain=True)

def spin():
    while True:
        threading.Event().wait(0.001)

def go_on():
    while True:
        pass

for _ in range(12):
    threading.Thread(target=spin, daemon=True).start()
os.kill(os.getpid(), signal.SIGSTOP)
go_on()
"""


def test_a_stopped_process_is_asked_where_it_stands(tmp_path: Path) -> None:
    """Its script gets nowhere before its stack is written, whichever thread might do that."""
    for number in range(12):
        path = tmp_path / f"stack-{number}"
        command = [sys.executable, "-c", STOPPED, str(path)]
        process = subprocess.Popen(command, start_new_session=True)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        ask_to_end(process.pid, signal.SIGTERM)
        assert process.wait(launcher.LIMIT) == -signal.SIGTERM
        assert "in go_on" not in path.read_text()
