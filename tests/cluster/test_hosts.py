"""The simulated hosts are isolated from each other, and faults can be injected."""

import os
import signal
import subprocess
import sys

import pytest

from tests.harness.hosts import Host, Hosts, lives
from tests.harness.launcher import wait_until

SOON = ("-o", "ConnectTimeout=2")


def ssh(host: Host, to: Host, command: str, *options: str) -> subprocess.CompletedProcess[str]:
    return host.run(["ssh", *options, to.name, command])


def test_hosts_are_isolated(hosts: Hosts) -> None:
    for host in hosts:
        told = ssh(hosts[0], host, "hostname; echo $TMPDIR; touch /dev/shm/$(hostname) $TMPDIR/x")
        assert told.stdout.split() == [host.name, str(host.temporary)], told
    for host in hosts:
        memory = f"/proc/{host.pid}/root/dev/shm/{host.name}"
        assert sorted(host.leftovers()) == sorted([memory, str(host.temporary / "x")])
        host.clear()
    sleeper = hosts[1].start(["sleep", "1234"])
    try:
        wait_until(hosts[1].processes, "the start of a process")
        wait_until(lambda: list(hosts[1].processes().values()) == ["sleep 1234 "], "its program")
        assert hosts[0].processes() == {}
    finally:
        hosts[1].signal(sleeper, signal.SIGTERM)
        assert sleeper.wait(timeout=60) == -signal.SIGTERM


NONLOCAL = """
ip link set lo up
ip link add here type veth peer name there
ip link set here up
ip address add 10.1.2.3/24 dev here
ip address add 10.1.2.4/24 dev here
echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind
"""


def test_addresses_of_this_host_are_known_where_any_can_be_bound() -> None:
    names = ["127.0.1.1", "10.1.2.3", "10.1.2.4", "10.1.2.5"]
    code = f"from hvd_keras.launch.start.hosts import is_here; print(*map(is_here, {names}))"
    command = ["unshare", "--net", "sh", "-ec", f'{NONLOCAL} exec "$@"', "-", sys.executable]
    done = subprocess.run([*command, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True", "True", "False"], done


@pytest.mark.slow
def test_a_throttled_host_sends_no_faster_than_its_limit(hosts: Hosts) -> None:
    """2 MB would take 16 s at 1 Mbit/s: the queue must have been dropped."""
    hosts.throttle(1)
    send = "head -c 2000000 /dev/zero | timeout 2 ssh server2 'wc -c'"
    assert hosts[0].run(["sh", "-c", send]).stdout == ""
    hosts.throttle(None)
    assert hosts[0].run(["sh", "-c", send]).stdout == "2000000\n"
    wait_until(lambda: not hosts[1].processes(), "the end of what was cut off")


@pytest.mark.slow
def test_an_answer_takes_twice_the_delay(hosts: Hosts) -> None:
    connect = "import socket, time; began = time.monotonic(); "
    connect += "socket.create_connection(('server2', 22)); print(time.monotonic() - began)"

    def seconds() -> float:
        done = hosts[0].run([sys.executable, "-c", connect])
        return float(done.stdout)

    hosts.throttle(20, delay=0.2)
    try:
        assert seconds() >= 0.4
        assert ssh(hosts[0], hosts[1], "head -c 100000 /dev/zero | wc -c").stdout == "100000\n"
    finally:
        hosts.throttle(None)
    wait_until(lambda: seconds() < 0.4, "the end of the delay")


@pytest.mark.slow
def test_a_host_can_crash_and_come_back() -> None:
    with Hosts(2) as hosts:
        first, second = hosts
        sleeper = second.start(["sleep", "1234"])
        wait_until(second.processes, "the start of a process")
        (outside,) = second.processes()
        second.crash()
        sleeper.wait(timeout=60)
        assert not lives(outside)
        assert "timed out" in ssh(first, second, "true", *SOON).stderr
        second.boot()
        # The first host still has unanswered ARP requests.
        wait_until(lambda: ssh(first, second, "hostname").stdout == "server2\n", "its return")
        folder, pids = first.folder.parent, [host.pid for host in hosts]
    assert not any(lives(pid) for pid in pids)
    assert not os.path.exists(folder)
