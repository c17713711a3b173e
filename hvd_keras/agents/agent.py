"""Runs hvdrun's commands on a host where something else than ssh has started a process.

That process, a task of Spark for example, starts an agent and holds its stdin. The agent takes
commands from clients that prove to know its secret (see `client.py`). When its stdin ends,
because its owner has ended or was killed, it ends all that its commands have started.

Its first line of input is JSON: the secret, the address to listen on, and the run's name. It prints
its port when nothing of an earlier agent of this run is left.
"""

import base64
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from hvd_keras.agents.link import Link, listening
from hvd_keras.launch.onhost.channel import PIECE
from hvd_keras.launch.onhost.limits import DRAIN, GRACE
from hvd_keras.launch.onhost.process import JOB, shell_status
from hvd_keras.launch.onhost.sweep import OWNER, STEP, processes, sweep

# With this after the run's name in their mark, processes are hvdrun and what it has started on its
# own host. hvdrun ends these within HVDRUN_END when its owner is killed.
OF_HVDRUN = "-hvdrun"
HVDRUN_END = 4 * GRACE


def _relay(link: Link, name: int, pipe: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # the client has gone
        while data := os.read(pipe.fileno(), PIECE):
            link.send(output=name, data=base64.b64encode(data).decode())


def _report(link: Link, process: subprocess.Popen[bytes], relays: list[threading.Thread]) -> None:
    """Wait for the command's end and tell it."""
    status = process.wait()
    for relay in relays:
        relay.join(DRAIN)
    with contextlib.suppress(OSError):  # the client has gone
        link.send(status=shell_status(status))


def _thread(function: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def _serve(run: str, jobs: set[str], link: Link, first: dict[str, Any]) -> None:
    """Run one command for a client; it ends with the connection. Notes the number of its job."""
    jobs.update(re.findall(f"{JOB}=([0-9a-f]+)", first["run"]))
    process: Any = subprocess.Popen(
        ["/bin/sh", "-c", first["run"]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, OWNER: run},
        start_new_session=True,
    )
    pipes = {1: process.stdout, 2: process.stderr}
    relays = [_thread(_relay, link, number, pipe) for number, pipe in pipes.items()]
    report = _thread(_report, link, process, relays)
    while message := link.receive():
        with contextlib.suppress(OSError):  # it does not read any more
            if message["input"]:
                process.stdin.write(base64.b64decode(message["input"]))
                process.stdin.flush()
            else:
                process.stdin.close()
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    report.join()


def _sweep(run: str, jobs: set[str], grace: float) -> None:
    """End what this run has left here, after hvdrun had time to do it."""
    limit = time.monotonic() + HVDRUN_END
    while processes([run + OF_HVDRUN]) and time.monotonic() < limit:
        time.sleep(STEP)
    sweep([run, run + OF_HVDRUN, *jobs], grace)


def main() -> int:
    """Serve until stdin ends."""
    if os.fork():
        os._exit(0)  # a worker of Ray kills its children when it ends; they are not asked first
    config = json.loads(sys.stdin.readline())
    run, jobs = config["run"], set[str]()
    _sweep(run, jobs, 0.0)
    talk = functools.partial(_serve, run, jobs)
    with listening(config["address"], config["secret"], talk) as port:
        print(port, flush=True)
        sys.stdin.read()
        _sweep(run, jobs, GRACE)
    return 0
