"""Hosts to run on. Where they cannot be made, the tests are skipped with the reason."""

from collections.abc import Iterator

import pytest

from tests.harness.hosts import Hosts, missing


@pytest.fixture(scope="session")
def common_hosts() -> Iterator[Hosts]:
    """Three hosts for all tests: making them takes less than a second, ssh's first start more."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with Hosts(3) as hosts:
        yield hosts


@pytest.fixture
def hosts(common_hosts: Hosts) -> Iterator[Hosts]:
    """Three hosts that a test may disturb; nothing of it may be left on any of them."""
    yield common_hosts
    for host in common_hosts:
        host.repair()
    left = {host.name: [*host.processes().values(), *host.leftovers()] for host in common_hosts}
    for host in common_hosts:
        host.clear()
    assert left == {host.name: [] for host in common_hosts}
