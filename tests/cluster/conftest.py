"""Hosts for the tests. If they cannot be created, the tests are skipped with the reason."""

from collections.abc import Iterator

import pytest

from tests.harness.hosts import Hosts, missing


@pytest.fixture(scope="session")
def common_hosts() -> Iterator[Hosts]:
    """Three hosts for all tests, because the first ssh to a host takes long."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with Hosts(3) as hosts:
        yield hosts


@pytest.fixture
def hosts(common_hosts: Hosts) -> Iterator[Hosts]:
    """Three hosts that a test may disturb; it must leave nothing behind."""
    yield common_hosts
    for host in common_hosts:
        host.repair()
    left = {host.name: [*host.processes().values(), *host.leftovers()] for host in common_hosts}
    for host in common_hosts:
        host.clear()
    assert left == {host.name: [] for host in common_hosts}
