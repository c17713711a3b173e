"""``horovod.ray.RayExecutor``, over ``hvd_keras.ray.run``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hvd_keras.ray


class RayExecutor:
    """Runs functions on ranks of a Ray cluster; each call is a job of its own.

    Args:
        settings: from ``create_settings``.
        num_workers: number of ranks.
        num_hosts: number of hosts with one rank each, in place of ``num_workers``.
        cpus_per_worker: CPUs of each rank.
        use_gpu: whether ranks have GPUs.
        gpus_per_worker: GPUs of each rank. Default with ``use_gpu``: 1.
        others: arguments of Horovod that have no counterpart, unless they have its default.

    Raises:
        TypeError: an argument has no counterpart.
    """

    _DEFAULTS: Mapping[str, Any] = {"num_workers_per_host": 1, "use_current_placement_group": True}

    def __init__(
        self,
        settings: Mapping[str, float] | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        **others: Any,
    ) -> None:
        for name, value in others.items():
            if value != self._DEFAULTS.get(name):
                raise TypeError(
                    f"RayExecutor: hvd_keras.ray.run has nothing for {name}={value!r}. Leave it "
                    "out, or call hvd_keras.ray.run, which has resources and strategies"
                )
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
        self._started = False

    @staticmethod
    def create_settings(
        timeout_s: float = 30.0, placement_group_timeout_s: float = 100.0, **others: Any
    ) -> dict[str, float]:
        """Return settings: how long to wait for resources. The others are for Horovod's ssh."""
        return {"wait_seconds": placement_group_timeout_s}

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Take the ranks' environment; the ranks start with each call.

        Raises:
            TypeError: there is an ``executable_cls``, whose objects would not outlive a call.
        """
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
        """Call the function on all ranks; return the results in rank order.

        Raises:
            RuntimeError: ``start`` was not called.
            As ``hvd_keras.ray.run`` besides.
        """
        if not self._started:
            raise RuntimeError("RayExecutor.run: expected a call of start() before")
        return hvd_keras.ray.run(fn, self._count, args or (), kwargs, **self._options)

    def execute(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Call ``fn(None)`` on all ranks, as Horovod does where there is no ``executable_cls``."""
        return self.run(fn, (None,))

    def shutdown(self) -> None:
        """Do nothing: no call leaves anything behind."""
        self._started = False
