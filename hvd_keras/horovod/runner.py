"""``horovod.run``: Horovod's arguments, turned into options of hvdrun."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_keras.launch import run_function

#: The option of hvdrun for an argument of ``horovod.run``.
_OPTIONS = {
    "min_num_proc": "--min-np",
    "min_np": "--min-np",
    "reset_limit": "--max-restarts",
    "hostfile": "--hostfile",
    "host_discovery_script": "--host-discovery-script",
    "start_timeout": "--start-timeout",
    "ssh_port": "--ssh-port",
    "ssh_identity_file": "--ssh-identity-file",
    "output_filename": "--output-dir",
    "network_interface": "--network-interface",
    "network_interfaces": "--network-interface",
    "mpi_args": "--mpi-args",
}

# There is one transport, no cache, and a restart takes the ranks that there are.
_WITHOUT_EFFECT = {"disable_cache", "use_gloo", "use_mpi", "max_num_proc", "max_np"}


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    np: int | None = None,
    hosts: str | None = None,
    verbose: int | bool | None = None,
    **others: Any,
) -> list[Any]:
    """``hvd_keras.run`` with the arguments of ``horovod.run``.

    Args:
        func, args, kwargs, hosts: as in ``hvd_keras.run``.
        num_proc, np: number of ranks.
        verbose: whether hvdrun prints the command of mpirun.
        others: what hvdrun has options for.

    Returns:
        The results of all ranks, in rank order.

    Raises:
        TypeError: an argument has no counterpart.
        As ``hvd_keras.run`` besides.
    """
    options = ["--horovod"]
    for name, value in others.items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if name not in _OPTIONS:
            raise TypeError(
                f"horovod.run: hvdrun has no option for {name}={value!r}. Leave it out; see "
                "hvdrun --help."
            )
        options.append(f"{_OPTIONS[name]}={value}")  # one word: the value may begin with "--"
    if verbose:
        options.append("--verbose")
    return run_function.run(func, args, kwargs, num_proc or np, hosts, options)
