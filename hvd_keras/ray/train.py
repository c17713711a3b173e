"""Ray Train: `hvd.ray.TrainConfig` makes the workers of a `DataParallelTrainer` one job.

Each worker is a rank: see `agents/stand_in.py`. Ray Train starts the workers again after a failure.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from hvd_keras import agents
from hvd_keras.agents.stand_in import Joining
from hvd_keras.launch.onhost.worker import CALL
from hvd_keras.ray.run import address, stand_in_for_worker

# Seconds for hvdrun to start the stand-ins.
START = 120.0

# Seconds for the workers to end what they have started; their agents do it if they cannot.
END = 60.0

# Seconds for which a worker that failed waits until the others have its error.
ERROR_SECONDS = 2.0

# What a worker needs of its stand-in's environment.
PREFIXES = ("OMPI_", "PMIX_", "PRTE_", "HVD_", "HVDRUN_")


@dataclass
class TrainConfig(BackendConfig):  # type: ignore[misc]
    """Makes the workers of Ray Train's ``DataParallelTrainer`` ranks of one job.

    The training function calls ``hvd.init()``; ``hvd.rank()`` is Ray's world rank. Ray Train
    places the workers, starts them again after a failure (``FailureConfig``) and keeps what
    ``ray.train.report`` gets. Needs Open MPI.

    Args:
        options: further options of hvdrun, such as ``["--network-interface", "eth1"]``.

    Example:
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        def train():
            import hvd_keras as hvd
            hvd.init()
            ...
            ray.train.report({"loss": loss})

        trainer = DataParallelTrainer(
            train, backend_config=hvd_keras.ray.TrainConfig(),
            scaling_config=ray.train.ScalingConfig(num_workers=4),
        )
        trainer.fit()
    """

    options: Sequence[str] = field(default_factory=list)

    @property
    def backend_cls(self) -> Any:
        return _Backend

    @property
    def train_func_context(self) -> Any:
        return _telling


@dataclass
class _State:
    """What a worker holds."""

    agent: agents.Agent
    joining: Joining
    job: threading.Thread | None = None  # in the first worker: hvdrun with the stand-ins
    error: str = ""  # why that has ended


_state: _State | None = None


def _open(call: agents.Call) -> dict[str, Any]:
    global _state
    rank = ray.train.get_context().get_world_rank()
    agent = agents.Agent(call, str(ray.util.get_node_ip_address()))
    _state = _State(agent, Joining(address(call.run, rank)))
    return _state.agent.facts()


def _start(call: agents.Call, places: Sequence[Any]) -> None:
    """In the first worker: start hvdrun with the stand-ins."""
    import cloudpickle

    assert _state is not None
    state, function = _state, cloudpickle.dumps((stand_in_for_worker, (call.run,), {}))

    def start() -> None:
        if isinstance(result := call.start(function, places), Exception):
            state.error = str(result) or type(result).__name__

    state.job = threading.Thread(target=start, daemon=True)
    state.job.start()


def _join() -> str:
    """Become a rank; returns why it is impossible."""
    assert _state is not None
    limit = time.monotonic() + START
    while time.monotonic() < limit:
        if _state.error:
            return _state.error
        with contextlib.suppress(TimeoutError):
            _state.joining.join(1.0, lambda name: name.startswith(PREFIXES) and name != CALL)
            return ""
    return f"hvdrun has not started all ranks within {START:g} s"


def _end() -> None:
    """Leave the job, after training or its failure."""
    global _state
    if _state is None:
        return
    state, _state = _state, None
    state.joining.end("")
    if state.job is not None:
        state.job.join(END)
    state.agent.close()


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    """Around the training function: others learn why this worker ends."""
    from hvd_keras import lifecycle

    try:
        yield
    except BaseException as error:
        if _state is not None:
            lifecycle.end(f"{type(error).__name__}: {error}".splitlines()[0], ERROR_SECONDS)
            _state.joining.end(traceback.format_exc())
        raise
    else:
        lifecycle.end("", -1.0)


class _Backend(Backend):  # type: ignore[misc]
    """Ray's hooks, which run in Ray Train's controller."""

    share_cuda_visible_devices = True  # hvd.init() takes the GPU local_rank()

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        # Before training.
        call = agents.Call("hvd.ray", options=[*backend_config.options])
        places = worker_group.execute(_open, call)
        if problem := call.problem(places):
            raise RuntimeError(f"hvd.ray: {problem}")
        worker_group.execute_single(0, _start, call, places)
        if problem := next(filter(None, worker_group.execute(_join)), ""):
            raise RuntimeError(f"hvd.ray: {problem}")

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        # All of it, before Ray Train starts others. Waits no time for workers that have died.
        ended = worker_group.execute_async(_end)
        ray.wait(ended, num_returns=len(ended), timeout=END)
