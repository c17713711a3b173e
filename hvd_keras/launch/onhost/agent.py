"""Runs hvdrun's commands on a host where something else than ssh has started a process.

That process, a task of Spark for example, starts an agent and holds its stdin. The agent takes
commands from whoever proves that they know its secret (see `agent_client.py`). When its stdin ends,
because its owner has ended or was killed, it ends all that its commands have started.

Its first line of input is JSON: the secret, the address to listen on, and the run's name. It prints
its port when nothing of an earlier agent of this run is left.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO

from .channel import PIECE, ProtocolError
from .limits import DRAIN, GRACE, HVDRUN_END
from .link import Link
from .rsh_agent import DAEMON
from .sweep import AGENT, STEP, processes, sweep

# With this after the run's name in their mark, processes are hvdrun and what it has started on its
# own host. It ends that by itself when its owner is killed, within HVDRUN_END.
OF_HVDRUN = "-hvdrun"


def _relay(link: Link, name: str, pipe: IO[bytes]) -> None:
    try:
        while data := os.read(pipe.fileno(), PIECE):
            link.send(output=name, data=base64.b64encode(data).decode())
    except OSError:  # the client has gone
        return


def _report(link: Link, process: subprocess.Popen[bytes], relays: list[threading.Thread]) -> None:
    """Wait for the command's end and tell it."""
    status = process.wait()
    for relay in relays:
        relay.join(DRAIN)
    try:
        link.send(status=status if status >= 0 else 128 - status)
    except OSError:  # the client has gone
        return


def _serve(connection: socket.socket, secret: str, run: str, jobs: set[str]) -> None:
    """Run one command for a client; it ends with the connection. Notes the number of its job."""
    with connection:
        try:
            link = Link(connection, secret, listens=True)
        except (ProtocolError, OSError):
            return
        message = link.receive()
        if message is None:
            return
        jobs.update(re.findall(f"{DAEMON}=([0-9a-f]+)", message["run"]))
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            ["/bin/sh", "-c", message["run"]],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env={**os.environ, AGENT: run},
            start_new_session=True,
        )
        assert process.stdin is not None
        relays = [
            threading.Thread(target=_relay, args=(link, name, file), daemon=True)
            for name, file in (("out", process.stdout), ("err", process.stderr))
        ]
        report = threading.Thread(target=_report, args=(link, process, relays), daemon=True)
        for thread in (*relays, report):
            thread.start()
        while message := link.receive():
            try:
                if "input" in message:
                    process.stdin.write(base64.b64decode(message["input"]))
                    process.stdin.flush()
                else:
                    process.stdin.close()
            except OSError:  # it does not read any more
                continue
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        report.join()


def _accept(listener: socket.socket, *arguments: object) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve, args=(connection, *arguments), daemon=True).start()


def _sweep(run: str, jobs: set[str], grace: float) -> None:
    """End what this run has left here, after hvdrun had time to do it."""
    limit = time.monotonic() + HVDRUN_END
    while processes(run + OF_HVDRUN) and time.monotonic() < limit:
        time.sleep(STEP)
    sweep([run, run + OF_HVDRUN, *jobs], grace)


def main() -> int:
    """Serve until stdin ends."""
    if os.fork():
        os._exit(0)  # a worker of Ray kills its children when it ends; they are not asked first
    told = json.loads(sys.stdin.readline())
    run, jobs = told["run"], set[str]()
    _sweep(run, jobs, 0.0)
    listener = socket.create_server((told["address"], 0))
    arguments = (listener, told["secret"], run, jobs)
    threading.Thread(target=_accept, args=arguments, daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()
    _sweep(run, jobs, GRACE)
    return 0
