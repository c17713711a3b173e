"""Simulated hosts for the tests, which are skipped, with the reason, where none can be created."""

from collections.abc import Iterator

import pytest

from tests.harness.hosts import Hosts, missing


@pytest.fixture(scope="session")
def common_hosts() -> Iterator[Hosts]:
    """Three hosts shared by all tests, because the first ssh to a host is slow."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with Hosts(3) as hosts:
        yield hosts


@pytest.fixture
def hosts(common_hosts: Hosts) -> Iterator[Hosts]:
    """Three hosts into which a test may inject faults; no process or file may be left behind."""
    yield common_hosts
    for host in common_hosts:
        host.repair()
    left = {host.name: [*host.processes().values(), *host.leftovers()] for host in common_hosts}
    for host in common_hosts:
        host.clear()
    assert left == {host.name: [] for host in common_hosts}
