"""One start of a job on several hosts."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import secrets
import shlex
import socket
import struct
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_keras.launch import UsageError, hosts, remote, statistics, sweep, tensorflow_log
from hvd_keras.launch.channel import new_secret
from hvd_keras.launch.hosts import Host
from hvd_keras.launch.loop import Loop
from hvd_keras.launch.mpirun import Mpirun, Remote
from hvd_keras.launch.network import Network, Start
from hvd_keras.launch.output import Output
from hvd_keras.launch.reach import Reach, run_on_all
from hvd_keras.launch.request import Request
from hvd_keras.launch.slurm import Srun
from hvd_keras.launch.supervise import Job, Signals, job_directory
from hvd_keras.launch.verdict import Verdict
from hvd_keras.launch.worker import GRACE

PROGRAM = [sys.executable, "-I", "-m", "hvd_keras.launch.remote"]

# What stands for the secret where the settings are shown.
HIDDEN = "SECRET"

# Seconds that what mpirun and the workers have left running gets to end by itself.
SWEEP_GRACE = 1.0

# ioctl requests of Linux: an interface's address and netmask.
_SIOCGIFADDR = 0x8915
_SIOCGIFNETMASK = 0x891B


@dataclass(frozen=True)
class Placement:
    """The hosts of one start, with the ranks of each, and the names that they have for MPI.

    `hosts` is None where SLURM places the ranks, on any of those that `names` holds.
    """

    size: int
    hosts: Sequence[Host] | None
    names: Mapping[str, str]


@dataclass(frozen=True)
class Plan:
    """The settings and the command of mpirun or srun, and the files that they need."""

    settings: Mapping[str, str]
    command: Sequence[str]
    files: Mapping[Path, str]

    def describe(self) -> str:
        """The same in words, without the secret."""
        shown = dict(self.settings)
        if remote.SECRET in shown:
            shown[remote.SECRET] = HIDDEN
        lines = [f"{name}={shlex.quote(value)}" for name, value in shown.items()]
        for path, text in self.files.items():
            lines += [f"{path}: {line}" for line in text.splitlines() if line != "#!/bin/sh"]
        return "\n".join([*lines, shlex.join(self.command)])


def plan(
    request: Request,
    placement: Placement,
    *,
    directory: Path,
    job: str,
    secret: str,
    addresses: str,
) -> Plan:
    """How to start the ranks' workers."""
    variables = {remote.JOB: job, remote.ADDRESSES: addresses, remote.SECRET: secret}
    machines = directory / "machines"
    agent = directory / "ssh"
    network = request.options.network_interface or _common_network(placement.hosts or ())
    if isinstance(request.engine, Srun):
        files = {}
        if placement.hosts is not None:
            lines = [host.name for host in placement.hosts for _ in range(host.slots or 0)]
            files[machines] = "\n".join(lines) + "\n"
        command = request.engine.command(
            placement.size,
            oversubscribe=request.options.oversubscribe,
            extra=request.extra,
            program=PROGRAM,
            hosts=placement.hosts,
        )
        return Plan(variables | request.engine.settings(placement.hosts, machines), command, files)
    assert placement.hosts is not None
    files = {agent: request.ssh.agent(job)}
    if request.engine.kind == "Intel MPI":
        files[machines] = "".join(f"{host.name}:{host.slots}\n" for host in placement.hosts)
    command = request.engine.command(
        placement.size,
        oversubscribe=request.options.oversubscribe,
        variables=variables,
        extra=request.extra,
        program=PROGRAM,
        remote=Remote(placement.hosts, agent, machines, network),
    )
    return Plan(variables | request.engine.settings(directory), command, files)


def run(request: Request, placement: Placement, signals: Signals, *, first: bool) -> Verdict:
    """Start the job once and follow it to its end."""
    job, secret = secrets.token_hex(8), new_secret()
    request.jobs.append(job)
    options = request.options
    with job_directory() as directory:
        output = Output(
            options.prefix,
            tensorflow_log.hidden_lines(os.environ),
            options.output_dir,
            append=not first,
        )
        network = Network(
            placement.size,
            _own_addresses(request, placement),
            secret,
            request.start_timeout,
            directory,
            placement.names,
        )
        planned = plan(
            request,
            placement,
            directory=directory,
            job=job,
            secret=secret,
            addresses=network.addresses,
        )
        for path, text in planned.files.items():
            path.write_text(text)
            path.chmod(0o700)
        if options.verbose:
            print(planned.describe(), file=sys.stderr, flush=True)
        memory = f"/dev/shm/hvdrun-{job}"
        engine = request.engine
        environment = request.environment() | request.observers()
        environment |= {remote.JOB: job}
        if isinstance(engine, Mpirun):
            environment |= engine.memory_settings(memory)
        else:
            environment |= engine.rank_settings()
        loop = Loop()
        start = Start(
            request.command, os.getcwd(), environment, [memory], options.stats, os.environ
        )
        network.open(loop, output, start)

        def clean(running: Job) -> Collection[str]:
            return _clean(running, network, placement, request, job)

        try:
            mpirun_environment = os.environ | planned.settings
            if isinstance(engine, Mpirun) and engine.kind != "Open MPI":
                # hydra would put it before the one that the agent has set on each host.
                mpirun_environment.pop("TMPDIR", None)
            return Job(
                planned.command,
                mpirun_environment,
                ranks=network,
                loop=loop,
                output=output,
                signals=signals,
                verbose=options.verbose,
                first=first,
                sweep=clean,
            ).run()
        finally:
            network.close()
            loop.close()
            if options.stats:
                print(statistics.table(directory, placement.size), file=sys.stderr, flush=True)


def _clean(
    running: Job, network: Network, placement: Placement, request: Request, job: str
) -> Collection[str]:
    """Hear the workers' last words, and leave nothing on any host; returns the lost hosts."""
    limit = time.monotonic() + GRACE
    while network.live() and time.monotonic() < limit and not running.hurry:
        running.turn(0.1)
    lost = network.silent_hosts()
    grace = 0.0 if running.hurry else SWEEP_GRACE
    names = {host.name for host in placement.hosts or ()} or set(placement.names.values())
    lost = lost | sweep_hosts(names - lost, request.reach, [job], grace)
    request.lost.update(lost)
    return lost


def sweep_hosts(names: Iterable[str], reach: Reach, jobs: Sequence[str], grace: float) -> set[str]:
    """End and remove what jobs have left on these hosts; returns those that cannot be reached."""
    command = [sys.executable, "-I", "-S", "-", str(grace), *jobs]
    text = Path(sweep.__file__).read_text()
    lost = set()
    limit = grace + sweep.GONE + GRACE
    for name, done in run_on_all(names, reach, command, text, limit).items():
        if done is None or reach.failure(done.returncode, done.stderr) is not None:
            lost.add(name)
        elif done.stdout.strip():
            print(f"hvdrun: {name}: {done.stdout.strip()}", file=sys.stderr, flush=True)
    return lost


def _own_addresses(request: Request, placement: Placement) -> list[str]:
    """Where the hosts can reach us: our addresses on the ways to them, and no other."""
    interface = request.options.network_interface
    if interface is not None:
        return [str(_interface(interface).ip)]
    names = [host.name for host in placement.hosts or ()] or list(placement.names.values())
    return addresses_towards(names) or [hosts.address_towards(socket.gethostname())]


def addresses_towards(names: Sequence[str]) -> list[str]:
    """Our addresses on the ways to those of these hosts that are others. Raises UsageError."""
    try:
        return sorted({hosts.address_towards(name) for name in names if not hosts.is_here(name)})
    except OSError as error:
        raise UsageError(f"no way to one of {', '.join(names)}: {error}") from error


def _common_network(wanted: Iterable[Host]) -> str | None:
    """The network of ours in which all hosts are, if it is one: others may exist on every host.

    A container's bridge has the same address on each of them, for example, and leads nowhere.
    """
    found = set()
    try:
        for host in wanted:
            address = ipaddress.ip_address(socket.gethostbyname(host.name))
            if not hosts.is_here(host.name):
                near = [own for own in _interfaces() if address in own.network]
                found.add(str(near[0].network) if near else None)
    except OSError:
        return None
    return found.pop() if len(found) == 1 else None


def _interfaces() -> list[ipaddress.IPv4Interface]:
    found = []
    for _, name in socket.if_nameindex():
        try:
            found.append(_interface(name))
        except UsageError:
            continue
    return found


def _interface(text: str) -> ipaddress.IPv4Interface:
    """Our address on an interface, given by name, or in a range of addresses."""
    if "/" in text:
        try:
            network = ipaddress.IPv4Network(text)
        except ValueError as error:
            raise UsageError(f"--network-interface got {text!r}: {error}") from error
        near = [own for own in _interfaces() if own.ip in network]
        if not near:
            raise UsageError(f"--network-interface got {text!r}, in which this host has no address")
        return near[0]
    request = struct.pack("256s", text.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            parts: list[Any] = [
                socket.inet_ntoa(fcntl.ioctl(probe, number, request)[20:24])
                for number in (_SIOCGIFADDR, _SIOCGIFNETMASK)
            ]
        except OSError as error:
            there = ", ".join(name for _, name in socket.if_nameindex())
            raise UsageError(
                f"--network-interface got {text!r}: {error.strerror}; expected an interface with "
                f"an address, of {there}"
            ) from error
    return ipaddress.IPv4Interface("/".join(parts))
