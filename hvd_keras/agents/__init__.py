"""A call of a function on the hosts of a system that starts processes (Spark, Ray).

Such a system starts one process per rank, called a place. In each of them an `Agent` lives, by
which hvdrun, started in the first place, reaches that host:

    with contextlib.closing(Agent(call, address)) as agent:
        places = [...]  # each place's `agent.facts`, exchanged by the system's own means
        if first:
            results = call.start(function, places)
        ...  # all wait here for the first

Ranks do not run in the places but beside them, as children of mpirun's daemons; places on one host
are one host with several slots. When a place ends or is killed, its agent ends what it has started,
and hvdrun, if it was the first place, ends the job.
"""

import json
import os
import platform
import secrets
import shlex
import socket
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_keras.agents.agent import OF_HVDRUN
from hvd_keras.launch import onhost, run_function
from hvd_keras.launch.follow.supervise import job_directory
from hvd_keras.launch.onhost.channel import new_secret
from hvd_keras.launch.onhost.cores import thread_settings
from hvd_keras.launch.onhost.host_facts import version
from hvd_keras.launch.onhost.sweep import OWNER

# What must be equal where the function is pickled and where it runs, if both have it; by its names.
PACKAGES = (("hvd_keras",), ("tensorflow", "tensorflow-cpu"), ("keras",), ("cloudpickle",))


def versions() -> dict[str, str]:
    """The versions here of Python and of the packages that must agree; those that are there."""
    python = ".".join(platform.python_version_tuple()[:2])
    found = {names[0]: own for names in PACKAGES if (own := version(*names)) is not None}
    return {"Python": python, **found}


@dataclass(frozen=True)
class Call:
    """A call of a function. Its driver makes it; places get it by a channel of the system."""

    name: str  # of what the user has called, for the texts of errors
    cores: int = 1  # of each rank
    options: Sequence[str] = ()  # of hvdrun
    environment: Mapping[str, str] = field(default_factory=dict)  # further variables of the ranks
    directory: str = field(default_factory=os.getcwd)  # where ranks start, if all places have it
    versions: Mapping[str, str] = field(default_factory=lambda: versions())  # in the driver
    # Of this call and its restarts: what earlier starts have left in a place is ended first.
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    secret: str = field(default_factory=new_secret, repr=False)  # of the agents

    def problem(self, places: Sequence[Mapping[str, Any]]) -> str:
        """Why these places cannot run what the driver has pickled; empty if they can."""
        for number, place in enumerate(places):
            for name, wanted in self.versions.items():
                got = place["versions"].get(name)
                if got != wanted:
                    has = f"has {name} {got}" if got else f"has no {name}"
                    return f"{place['host']} (task {number}) {has}; expected {wanted}, as here"
        by_address: dict[str, Mapping[str, Any]] = {}
        for place in places:
            other = by_address.setdefault(place["address"], place)
            if other["container"] != place["container"]:  # all ranks would run in the first one
                return (
                    f"the containers {other['host']} and {place['host']} share the address "
                    f"{place['address']}; give each container a separate one"
                )
        return ""

    def start(
        self, function: bytes, places: Sequence[Mapping[str, Any]], **how: Any
    ) -> list[bytes] | Exception:
        """Call a pickled function on one rank per place; this is the first of them.

        `how`, and what is returned, is as for ``run_function.call``. What that raises is returned,
        too: the systems repeat or wrap what a place raises.
        """
        slots = Counter(place["address"] for place in places)
        ports = {place["address"]: place["port"] for place in reversed(places)}
        own = {**os.environ, **self.environment, OWNER: self.run + OF_HVDRUN}
        own |= thread_settings(1, self.environment, self.cores)
        hosts = ",".join(f"{address}:{count}" for address, count in slots.items())
        everywhere = all(place["has_directory"] for place in places)
        cwd = self.directory if everywhere else tempfile.gettempdir()
        how |= {"name": self.name, "env": own, "cwd": cwd}
        try:
            with job_directory(self.run) as folder:  # agents remove it, however we end
                table = folder / "table"
                table.write_text(json.dumps({"secret": self.secret, "ports": ports}))
                shell = shlex.join([*onhost.program("agents.client"), str(table)])
                command = ["-H", hosts, "--remote-shell", shell, *self.options]
                command += [word for variable in self.environment for word in ("--env", variable)]
                return run_function.call(function, command, **how)
        except Exception as error:
            return error


class Agent:
    """The agent of the place that this process is, until it is closed.

    Others reach this place at `address`, a name or an IPv4 address; raises OSError if it is not one
    of this host's.
    """

    def __init__(self, call: Call, address: str) -> None:
        self._call, self._address = call, socket.gethostbyname(address)
        command, pipe = onhost.program("agents.agent"), subprocess.PIPE
        agent: Any = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )
        self._process = agent
        config = {"secret": call.secret, "run": call.run, "address": self._address}
        print(json.dumps(config), file=self._process.stdin, flush=True)
        self._port = self._process.stdout.readline().strip()
        if not self._port:
            self.close()
            raise OSError(f"no agent can listen on {self._address} of {socket.gethostname()}")

    def facts(self) -> dict[str, Any]:
        """What `Call` must know of this place: JSON."""
        return {
            "address": self._address,
            "port": int(self._port),
            "host": socket.gethostname(),
            "container": [socket.gethostname(), os.readlink("/proc/self/ns/mnt")],
            "versions": versions(),
            "has_directory": Path(self._call.directory).is_dir(),
        }

    def close(self) -> None:
        """End the agent, and all that it has started."""
        self._process.stdin.close()
        self._process.stdout.read()  # to its end, which is that of the agent
        self._process.stdout.close()
        self._process.wait()
