"""A Ray cluster of this machine: one or more raylets, each a node to Ray.

with raylets(2) as cluster:
    hvd_keras.ray.run(...)
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

# A loaded machine needs them. Without given ports a raylet gives up when its agents are slow.
_PATIENCE = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_process_registration_timeout_seconds": "300",
    "RAY_worker_register_timeout_seconds": "300",
}
_PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "runtime_env_agent_port",
    "dashboard_agent_listen_port",
)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [opened.getsockname()[1] for opened in sockets]


def _arguments() -> dict[str, Any]:
    return {"num_cpus": 1, **dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))}


@contextlib.contextmanager
def raylets(count: int) -> Iterator[Any]:
    """So many nodes with one CPU each, and this process connected to them."""
    before = dict(os.environ)
    os.environ.update(_PATIENCE)
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={**_arguments(), "include_dashboard": False}
    )
    try:
        for _ in range(count - 1):
            cluster.add_node(**_arguments())
        ray.init(address=cluster.address, log_to_driver=True)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)
