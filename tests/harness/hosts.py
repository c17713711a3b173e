"""Several hosts in one machine: containers on a common switch, each with a name and an sshd.

Each host has a network, a name, processes, /dev/shm, /run, /etc/ssh and a folder for temporary
files of its own; the other files are common to all, as on a cluster with a network file system.
Nothing outside is touched or configured, and all is gone when the process that made it ends,
however it ends: namespaces have no names here and live as long as their processes.

    with Hosts(3) as hosts:
        hosts.throttle(megabits=100, delay=0.025)
        done = hosts[0].run(["ssh", "server2", "hostname"])
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import pathlib
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hvd_keras.launch.onhost.process import die_with_parent
from tests.harness.launcher import LIMIT, send_signal

NETWORK = "10.77.0"

# Seconds that a frame may wait for those before it until it is dropped.
QUEUE = 0.4
# Of Linux's if_packet.h; the header says which checksums and segments are still to be made.
_SOL_PACKET, _PACKET_VNET_HDR, _HEADER = 263, 15, 10

_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "bridge": "iproute2",
    "iptables": "iptables",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}

# The first process of a host: prepares it, starts the daemon, and takes in orphans.
_BOOT = """\
set -e
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
mount --bind "$2/hosts" /etc/hosts
mount --bind "$3/ssh" /etc/ssh
ip link set lo up
"$4" -D -e 2> "$3/sshd.log" &
while true; do wait || true; sleep 1000 & done
"""

_SSHD = """\
AuthorizedKeysFile /etc/ssh/authorized_keys
HostKey /etc/ssh/host_key
KbdInteractiveAuthentication no
MaxStartups 100
PasswordAuthentication no
PermitRootLogin yes
PidFile {folder}/sshd.pid
SetEnv TMPDIR={folder}/tmp
UsePAM no
"""

_SSH = """\
IdentityFile /etc/ssh/key
UserKnownHostsFile /dev/null
GlobalKnownHostsFile /etc/ssh/known_hosts
StrictHostKeyChecking yes
"""


def _path(environment: Mapping[str, str] = os.environ) -> str:
    """PATH with the folders of the system's administration, which a plain shell may lack."""
    return os.pathsep.join([environment.get("PATH", ""), "/usr/sbin", "/sbin"])


def _tool(name: str) -> str:
    path = shutil.which(name, path=_path())
    if path is None:
        raise RuntimeError(f"{name} is not installed")
    return path


def missing() -> str | None:
    """Why no hosts can be made here, or None."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    packages = {p for tool, p in _TOOLS.items() if shutil.which(tool, path=_path()) is None}
    if packages:
        return f"not installed: {', '.join(sorted(packages))}"
    switch = ["unshare", "--net", "ip", "link", "add", "switch", "type", "bridge"]
    tried = subprocess.run(switch, capture_output=True, text=True, timeout=LIMIT)
    if tried.returncode != 0:
        return f"no network namespace with a bridge can be made here: {tried.stderr.strip()}"
    return None


def _do(*command: str) -> None:
    """Run a tool that must succeed."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, env=os.environ | {"PATH": _path()}
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


def _first_child(process: subprocess.Popen[Any]) -> int:
    """The process that an `unshare --fork` or `nsenter` has started, by its number out here."""
    path = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    limit = time.monotonic() + LIMIT
    while not (children := path.read_text().split()):
        assert process.poll() is None, f"{process.args} ended with {process.returncode}"
        assert time.monotonic() < limit, f"{process.args} starts no process"
        time.sleep(0.01)
    return int(children[0])


def lives(pid: int) -> bool:
    """Whether this process has not ended; it may not be collected yet."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def carry(cards: Mapping[str, str], megabits: float, delay: float) -> None:
    """Carry frames between ports of the switch, for ever, in place of its bridge.

    As `Host.throttle`, but without netem, which few kernels have: a frame that a host has sent, at
    so many Mbit/s, arrives `delay` seconds later. `cards` are the hosts' addresses, by port.
    """
    owners: dict[socket.socket, bytes] = {}
    for port, card in cards.items():
        one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))  # all protocols
        one.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        one.setsockopt(socket.SOL_SOCKET, 33, 1 << 23)  # SO_RCVBUFFORCE, in bytes
        one.bind((port, 0))
        owners[one] = bytes.fromhex(card.replace(":", ""))
    idle = dict.fromkeys(owners, 0.0)  # when a port has sent all that waits
    order, frames = itertools.count(), []  # by due time
    print("ready", flush=True)
    while True:
        wait = max(0.0, frames[0][0] - time.monotonic()) if frames else None
        for one in select.select(list(owners), (), (), wait)[0]:
            frame, (_, _, kind, *_) = one.recvfrom(1 << 17)
            now = time.monotonic()
            if kind != socket.PACKET_OUTGOING and idle[one] - now < QUEUE:
                seconds = (len(frame) - _HEADER) * 8e-6 / megabits
                idle[one] = max(now, idle[one]) + seconds
                heapq.heappush(frames, (idle[one] + delay, next(order), frame, one))
        while frames and frames[0][0] <= time.monotonic():
            _, _, frame, source = heapq.heappop(frames)
            to = frame[_HEADER : _HEADER + 6]
            for one, card in owners.items():
                if one is not source and (to == card or to[0] & 1):  # 1: to all
                    one.send(frame)


class Host:
    """One of the hosts.

    `address` is its IPv4 address, `card` its Ethernet address, `temporary` its $TMPDIR, `pid` its
    first process, as seen from here.
    """

    def __init__(self, number: int, name: str, shared: pathlib.Path, switch: int) -> None:
        self.name = name
        self.address = f"{NETWORK}.{number}"
        self.card = f"02:00:00:00:00:{number:02x}"
        self.folder = shared / self.name
        self.temporary = self.folder / "tmp"
        self._number = number
        self._port = f"port{number}"
        self._switch = switch
        self._shared = shared
        self._boot()

    def _boot(self) -> None:
        namespaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--mount-proc"]
        maker = os.getpid()
        first = ["bash", "-c", _BOOT, "boot", self.name]
        first += [str(self._shared), str(self.folder), _tool("sshd")]
        self._process = subprocess.Popen(
            ["unshare", *namespaces, "--fork", "--kill-child", *first],
            stdin=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": _path()},
            preexec_fn=lambda: die_with_parent(maker),
        )
        self.pid = _first_child(self._process)
        self._await(lambda: (self.folder / "sshd.pid").exists(), "sshd to listen")
        port = ["name", self._port, "netns", str(self._switch)]
        peer = ["eth0", "address", self.card, "netns", str(self.pid)]
        _do("ip", "link", "add", *port, "type", "veth", "peer", *peer)
        self._administer("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self._administer("ip", "link", "set", "eth0", "up")
        self._port_do("ip", "link", "set", self._port, "master", "switch", "up")

    def _await(self, condition: Any, what: str) -> None:
        limit = time.monotonic() + LIMIT
        while not condition():
            log = self.folder / "sshd.log"
            told = log.read_text() if log.exists() else ""
            assert self._process.poll() is None, f"{self.name} has ended: {told}"
            assert time.monotonic() < limit, f"{self.name}: no {what} within {LIMIT} s: {told}"
            time.sleep(0.02)

    def _administer(self, *command: str) -> None:
        _do("nsenter", "--net", "--target", str(self.pid), *command)

    def _port_do(self, *command: str) -> None:
        _do("nsenter", "--net", "--target", str(self._switch), *command)

    def start(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on this host, in the current folder.

        What comes back is `nsenter`, which passes no signals on: use `signal`.
        """
        environment = dict(os.environ if env is None else env)
        environment |= {"TMPDIR": str(self.temporary), "PATH": _path(environment)}
        here = self.enter(options.pop("cwd", None) or os.getcwd())
        return subprocess.Popen([*here, *command], env=environment, **options)

    def enter(self, folder: str) -> list[str]:
        """The start of a command that runs the rest of it on this host, in a folder."""
        enter = ["nsenter", "--mount", "--uts", "--ipc", "--net", "--pid"]
        return [*enter, "--target", str(self.pid), f"--wd={folder}"]

    def run(
        self, command: Sequence[str], timeout: float = LIMIT, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host to its end; one that outlives `timeout` seconds is killed."""
        options = {"stdin": subprocess.DEVNULL, **options}
        process = self.start(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.signal(process, signal.SIGKILL)
            out, err = process.communicate()
            text = f"{command} on {self.name} did not end within {timeout} s:\n{out}\n{err}"
            raise AssertionError(text) from None
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def signal(self, process: subprocess.Popen[Any], number: int) -> None:
        """Send a signal to a command that `start` has started."""
        send_signal(_first_child(process), number)

    def processes(self) -> dict[int, str]:
        """The command lines of this host's processes, without its first one, its sshd and theirs.

        The numbers are those out here.
        """
        own = ("sshd:", "sleep 1000", _tool("sshd"))
        return {pid: line for pid, line in self.all().items() if not line.startswith(own)}

    def all(self) -> dict[int, str]:
        """The same, with sshd's."""
        own = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(entry / "ns/pid") != own or int(entry.name) == self.pid:
                    continue
                line = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except OSError:  # it is gone
                continue
            if line:
                found[int(entry.name)] = line
        return found

    def leftovers(self) -> list[str]:
        """Files in this host's shared memory and temporary folder."""
        memory = pathlib.Path(f"/proc/{self.pid}/root/dev/shm")
        return [str(path) for folder in (memory, self.temporary) for path in folder.iterdir()]

    def clear(self) -> None:
        """Remove `leftovers` and kill `processes`."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):  # it has ended with another one
                os.kill(pid, signal.SIGKILL)
        for path in self.leftovers():
            subprocess.run(["rm", "-r", path], check=True, timeout=LIMIT)

    def repair(self) -> None:
        """Undo what `unplug`, `reset` and `throttle` have done."""
        self.plug()
        self.accept()
        self.throttle(None)

    def unplug(self) -> None:
        """Lose every packet from and to this host, as when its cable is pulled."""
        self._port_do("bridge", "link", "set", "dev", self._port, "state", "disabled")

    def plug(self) -> None:
        """Undo `unplug`."""
        self._port_do("bridge", "link", "set", "dev", self._port, "state", "forwarding")

    def reset(self) -> None:
        """Break every TCP connection of this host from now on, with a reset to its peers."""
        rule = ["INPUT", "-i", "eth0", "-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset"]
        self._administer("iptables", "-A", *rule)

    def refuse(self, port: int) -> None:
        """Refuse new TCP connections to this port."""
        rule = ["INPUT", "-i", "eth0", "-p", "tcp", "--syn", "--dport", str(port)]
        self._administer("iptables", "-A", *rule, "-j", "REJECT", "--reject-with", "tcp-reset")

    def accept(self) -> None:
        """Undo `reset` and `refuse`."""
        self._administer("iptables", "-F", "INPUT")

    def throttle(self, megabits: float | None) -> None:
        """Limit what this host sends to so many Mbit/s; None ends it."""
        if megabits is None:
            self._administer("tc", "qdisc", "replace", "dev", "eth0", "root", "pfifo")
        else:
            limit = ["rate", f"{megabits}mbit", "burst", "256kb", "latency", f"{QUEUE}s"]
            self._administer("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *limit)

    def crash(self) -> None:
        """End the host at once: its connections stay open at the other ends, without an answer."""
        self.unplug()
        self._end()
        with contextlib.suppress(RuntimeError):  # the kernel has removed it with the other end
            self._port_do("ip", "link", "delete", self._port)

    def boot(self) -> None:
        """Start the host again after `crash`."""
        (self.folder / "sshd.pid").unlink()
        shutil.rmtree(self.temporary)
        self.temporary.mkdir()
        self._boot()

    def _end(self) -> None:
        self._process.kill()  # and with it the host's first process, and with that one all of them
        self._process.wait(timeout=LIMIT)
        limit = time.monotonic() + LIMIT
        while lives(self.pid):
            assert time.monotonic() < limit, f"{self.name} does not end"
            time.sleep(0.01)


class Hosts(Sequence[Host]):
    """`count` hosts, named server1, server2 and so on, or those with the names given."""

    def __init__(self, count: int, names: Sequence[str] = ()) -> None:
        self._names = names or [f"server{number}" for number in range(1, count + 1)]
        self._hosts: list[Host] = []
        self._carrier: subprocess.Popen[str] | None = None

    def __enter__(self) -> Hosts:
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="hosts-"))
        self._switch: subprocess.Popen[bytes] | None = None
        try:
            self._configure()
            maker = os.getpid()
            self._switch = subprocess.Popen(
                ["unshare", "--net", "--fork", "--kill-child", "sleep", "infinity"],
                preexec_fn=lambda: die_with_parent(maker),
            )
            switch = _first_child(self._switch)
            self._inside = ("nsenter", "--net", "--target", str(switch))
            _do(*self._inside, "ip", "link", "add", "switch", "type", "bridge")
            _do(*self._inside, "ip", "link", "set", "switch", "up")
            for number, name in enumerate(self._names, 1):
                self._hosts.append(Host(number, name, self.folder, switch))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts:
            host._end()
        self._hosts.clear()
        for process in filter(None, (self._carrier, self._switch)):
            process.kill()
            process.wait(timeout=LIMIT)
        shutil.rmtree(self.folder)

    def _configure(self) -> None:
        """Write the hosts' files: names, one key for the user, a key for each host."""
        folder = self.folder
        names = [(f"{NETWORK}.{n}", name) for n, name in enumerate(self._names, 1)]
        table = "".join(f"{address} {name}\n" for address, name in names)
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + table)
        keygen = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f")
        _do(*keygen, str(folder / "key"))
        known = ""
        for address, name in names:
            etc = folder / name / "ssh"
            etc.mkdir(parents=True)
            (folder / name / "tmp").mkdir()
            _do(*keygen, str(etc / "host_key"))
            known += f"{name},{address} {(etc / 'host_key.pub').read_text()}"
            shutil.copy(folder / "key", etc / "key")
            shutil.copy(folder / "key.pub", etc / "authorized_keys")
            (etc / "sshd_config").write_text(_SSHD.format(folder=folder / name))
            (etc / "ssh_config").write_text(_SSH)
        for _, name in names:
            (folder / name / "ssh" / "known_hosts").write_text(known)

    def __getitem__(self, index: Any) -> Any:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def throttle(self, megabits: float | None, delay: float = 0.0) -> None:
        """Limit what each host sends; None ends it.

        With a delay, in seconds, `carry` limits it: hosts cannot be unplugged or crash then.
        """
        if self._carrier is not None:
            self._carrier.kill()
            self._carrier.wait(timeout=LIMIT)
            self._carrier = None
        for host in self._hosts:
            host.throttle(None if delay else megabits)
            host._port_do(
                "ip", "link", "set", host._port, *(["nomaster"] if delay else ["master", "switch"])
            )
        if delay:
            cards = {host._port: host.card for host in self._hosts}
            call = f"from {__name__} import carry; carry({cards!r}, {megabits!r}, {delay!r})"
            maker = os.getpid()
            self._carrier = subprocess.Popen(
                [*self._inside, sys.executable, "-c", call],
                stdout=subprocess.PIPE,
                text=True,
                cwd=pathlib.Path(__file__).parents[2],
                preexec_fn=lambda: die_with_parent(maker),
            )
            assert self._carrier.stdout is not None
            assert self._carrier.stdout.readline(), "nobody carries frames"

    def introduce(self) -> None:
        """Tell each host the others' Ethernet addresses, for ever.

        The kernel keeps about 1,024 that hosts have learnt, of all of them together.
        """
        file = self.folder / "neighbours"
        known = (f"{host.address} lladdr {host.card}" for host in self._hosts)
        file.write_text("".join(f"neigh replace {one} dev eth0 nud permanent\n" for one in known))
        for host in self._hosts:
            host._administer("ip", "-batch", str(file))
