"""A call of a function on the hosts of a system that starts processes by itself (Spark, Ray).

Such a system starts one process per rank, called a place. In each of them an `Agent` lives, by
which hvdrun, started in the first place by `call`, reaches that host:

    with Agent(secret, run, address) as agent:
        places = [...]  # each place's `agent.facts`, exchanged by the system's own means
        if first:
            results = call(function, places, secret, run, ...)
        ...  # all wait here for the first

Ranks do not run in the places but beside them, as children of mpirun's daemons; places on one host
are one host with several slots. When a place ends or is killed, its agent ends what it has started,
and hvdrun, if it was the first place, ends the job.
"""

import json
import os
import platform
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hvd_keras.launch import onhost, run_function
from hvd_keras.launch.onhost.agent import OF_HVDRUN
from hvd_keras.launch.onhost.cores import thread_settings
from hvd_keras.launch.onhost.host_facts import version
from hvd_keras.launch.onhost.sweep import AGENT

# What must be equal where the function is pickled and where it runs, if both have it.
PACKAGES = ("hvd_keras", "tensorflow", "keras", "cloudpickle")


def versions() -> dict[str, str]:
    """The versions here of Python and of the packages that must agree; those that are there."""
    python = ".".join(platform.python_version_tuple()[:2])
    found = {name: own for name in PACKAGES if (own := version(name)) is not None}
    return {"Python": python, **found}


class Agent:
    """The agent of the place that this process is, while the context lasts.

    `secret` is equal in all places; it must have come by a channel of the system. `run` names the
    call and its restarts by 16 hexadecimal digits: what earlier starts have left here is ended
    first. Others reach this place at `address`, a name or an IPv4 address; raises OSError if it is
    not one of this host's.
    """

    def __init__(self, secret: str, run: str, address: str) -> None:
        self._address = socket.gethostbyname(address)
        pipe = subprocess.PIPE
        agent = subprocess.Popen(
            onhost.program("agent"), stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )
        self._process = cast(Any, agent)  # its pipes are there
        told = {"secret": secret, "run": run, "address": self._address}
        print(json.dumps(told), file=self._process.stdin, flush=True)
        self._port = self._process.stdout.readline().strip()
        if not self._port:
            self.__exit__()
            raise OSError(f"no agent can listen on {self._address} of {socket.gethostname()}")

    def facts(self, directory: str) -> dict[str, Any]:
        """What `call` must know of this place: JSON. `directory` is where ranks are to start."""
        return {
            "address": self._address,
            "port": int(self._port),
            "host": [socket.gethostname(), os.readlink("/proc/self/ns/mnt")],
            "versions": versions(),
            "has_directory": Path(directory).is_dir(),
        }

    def __enter__(self) -> "Agent":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.stdout.read()  # to its end, which is that of the agent
        self._process.stdout.close()
        self._process.wait()


def difference(places: Sequence[Mapping[str, Any]], expected: Mapping[str, str]) -> str:
    """Why these places cannot run what was pickled where these versions are; empty if they can."""
    for number, place in enumerate(places):
        for name, wanted in expected.items():
            got = place["versions"].get(name)
            if got != wanted:
                has = f"has {name} {got}" if got else f"has no {name}"
                return f"{place['host'][0]} (task {number}) {has}; expected {wanted}, as here"
    by_address: dict[str, Any] = {}
    for place in places:
        other = by_address.setdefault(place["address"], place["host"])
        if other != place["host"]:
            return (
                f"{other[0]} and {place['host'][0]} are containers with the one address "
                f"{place['address']}; expected one per address, with an address of its own"
            )
    return ""


def call(
    function: bytes,
    places: Sequence[Mapping[str, Any]],
    secret: str,
    run: str,
    *,
    directory: str,
    cores: int,
    environment: Mapping[str, str],
    options: Sequence[str] = (),
    **how: Any,
) -> list[bytes]:
    """Call a pickled function on as many ranks as there are places; this is the first of them.

    `secret` and `run` are those of the agents, `cores` those of each rank, `environment` has the
    ranks' further variables; they start in `directory` if all places have it. `how`, and what is
    returned or raised, is as for ``run_function.call``.
    """
    slots = Counter(place["address"] for place in places)
    ports = {place["address"]: place["port"] for place in reversed(places)}
    folder = Path(tempfile.gettempdir(), f"hvdrun-{run}")  # which agents remove, however we end
    folder.mkdir(0o700)
    try:
        table = folder / "table"
        table.write_text(json.dumps({"secret": secret, "ports": ports}))
        shell = shlex.join([*onhost.program("agent_client"), str(table)])
        own = {**os.environ, **environment, AGENT: run + OF_HVDRUN}
        own |= thread_settings(1, environment, cores)
        hosts = ",".join(f"{address}:{count}" for address, count in slots.items())
        command = ["-H", hosts, "--remote-shell", shell, *options]
        command += [word for variable in environment for word in ("--env", variable)]
        everywhere = all(place["has_directory"] for place in places)
        cwd = directory if everywhere else tempfile.gettempdir()
        return run_function.call(function, command, env=own, cwd=cwd, **how)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
