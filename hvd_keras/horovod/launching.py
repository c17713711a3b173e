"""``horovod.run``, ``horovod.spark.run`` and ``horovod.ray.RayExecutor``, by hvd_keras's own."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import hvd_keras.ray
import hvd_keras.spark
from hvd_keras.launch import run_function

# Arguments of ``horovod.run`` that are options of hvdrun, under these names of horovodrun.
_OPTIONS = (
    *("min_num_proc", "min_np", "max_num_proc", "max_np", "reset_limit", "mpi_args"),
    *("hostfile", "host_discovery_script"),
    *("start_timeout", "ssh_port", "ssh_identity_file", "output_filename"),
    *("network_interface", "network_interfaces"),
)

# hvd_keras has one transport and no cache.
_WITHOUT_EFFECT = {"disable_cache", "use_gloo", "use_mpi"}


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
        others: what hvdrun has options for. Others raise TypeError.
    """
    given = {name: value for name, value in others.items() if value is not None}
    _refuse("horovod.run: hvdrun", given.keys() - {*_OPTIONS, *_WITHOUT_EFFECT}, given)
    # One word for each: its value may begin with "--".
    options = [f"--{name.replace('_', '-')}={given[name]}" for name in _OPTIONS if name in given]
    options.insert(0, "--horovod")
    if verbose:
        options.append("--verbose")
    return run_function.run(func, args, kwargs, num_proc or np, hosts, options)


def _refuse(what: str, names: Collection[str], given: Mapping[str, Any], more: str = "") -> None:
    """Raise TypeError if there are such arguments, which have no counterpart in hvd_keras."""
    for name in names:
        raise TypeError(f"{what} has nothing for {name}={given[name]!r}. Leave it out{more}")


# hvd_keras has one transport; lines have no timestamps; the driver prints rank 0's output.
_WITHOUT_EFFECT_ON_SPARK = {"use_mpi", "use_gloo", "verbose", "prefix_output_with_timestamp"}


def spark_run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    *,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    nics: Collection[str] | None = None,
    **others: Any,
) -> list[Any]:
    """``hvd.spark.run`` with the arguments of ``horovod.spark.run``.

    Args:
        fn, args, kwargs, num_proc, start_timeout, env: as in ``hvd.spark.run``.
        extra_mpi_args: arguments for mpirun.
        nics: the interface of the network between the executors' hosts; one.
        others: arguments of Horovod without effect here. Others raise TypeError.
    """
    given = [name for name, value in others.items() if value is not None]
    _refuse("horovod.spark.run: hvd.spark.run", {*given} - _WITHOUT_EFFECT_ON_SPARK, others)
    options = ["--horovod"]
    if extra_mpi_args:
        options.append(f"--mpi-args={extra_mpi_args}")
    options += _network("horovod.spark.run", nics)
    return hvd_keras.spark.run(fn, args, kwargs, num_proc, start_timeout, env=env, options=options)


def _network(who: str, nics: Collection[str] | None) -> list[str]:
    """The option of hvdrun for Horovod's set of network interfaces."""
    if nics and len(nics) > 1:
        raise TypeError(f"{who}: {nics=}, expected one interface")
    return [f"--network-interface={name}" for name in nics or ()]


class RayExecutor:
    """Runs functions on ranks of a Ray cluster; each call is a separate job.

    Args:
        settings: from ``create_settings``.
        num_workers: number of ranks.
        num_hosts: number of hosts with one rank each, instead of ``num_workers``.
        num_workers_per_host: 1; others raise TypeError.
        cpus_per_worker: CPUs of each rank.
        use_gpu: whether ranks have GPUs.
        gpus_per_worker: GPUs of each rank. Default with ``use_gpu``: 1.
        others: Horovod's defaults of arguments without a counterpart. Others raise TypeError.
    """

    _DEFAULTS: Mapping[str, Any] = {
        "num_workers_per_host": 1,
        "use_current_placement_group": True,
        "elastic_timeout": 600,
        "override_discovery": True,
    }

    def __init__(
        self,
        settings: Mapping[str, Any] | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        **others: Any,
    ) -> None:
        others["num_workers_per_host"] = num_workers_per_host
        odd = [name for name, value in others.items() if value != self._DEFAULTS.get(name)]
        instead = ", or call hvd_keras.ray.run, which has resources and strategies"
        _refuse("RayExecutor: hvd_keras.ray.run", odd, others, instead)
        if (num_workers is None) == (num_hosts is None):
            raise TypeError(
                f"RayExecutor: {num_workers=}, {num_hosts=}; expected exactly one of them"
            )
        self._count = num_workers or num_hosts or 0
        resources: dict[str, float] = {"CPU": cpus_per_worker}
        if use_gpu:
            resources["GPU"] = gpus_per_worker or 1
        self._options: dict[str, Any] = {
            "resources": resources,
            "strategy": "PACK" if num_hosts is None else "STRICT_SPREAD",
            **(settings or {}),
        }
        self._options["options"] = ["--horovod", *self._options.get("options", ())]
        self._started = False

    @staticmethod
    def create_settings(
        timeout_s: float = 30.0,
        placement_group_timeout_s: float = 100.0,
        nics: Collection[str] | None = None,
        **others: Any,
    ) -> dict[str, Any]:
        """Return settings: how long to wait for resources, and the network, one interface.

        The others are for Horovod's ssh.
        """
        options = _network("RayExecutor.create_settings", nics)
        return {"wait_seconds": placement_group_timeout_s, "options": options}

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Take the ranks' environment; the ranks start with each call."""
        if executable_cls is not None:
            raise TypeError(
                f"RayExecutor.start: {executable_cls=}, but ranks do not outlive a call; expected "
                "none. Create the object in the function"
            )
        if extra_env_vars:
            self._options["runtime_env"] = {"env_vars": dict(extra_env_vars)}
        self._started = True

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call the function on all ranks; return the results in rank order."""
        if not self._started:
            raise RuntimeError("RayExecutor.run: expected a call of start() before")
        return hvd_keras.ray.run(fn, self._count, args or (), kwargs, **self._options)

    def execute(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Call ``fn(None)`` on all ranks, as Horovod does without ``executable_cls``."""
        return self.run(fn, (None,))

    def shutdown(self) -> None:
        """Do nothing: no call leaves anything behind."""
        self._started = False
