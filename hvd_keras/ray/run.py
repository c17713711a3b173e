"""`hvd.ray.run`: a function on all ranks of a job whose places are Ray's actors."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_keras import agents
from hvd_keras.agents.stand_in import stand_in
from hvd_keras.runtime import settings

# Seconds in which Ray may notice that an actor has died.
LOOK = 1.0

# Seconds for the actors to start: Ray may have to make their environment first.
START = 300.0


def run(
    func: Callable[..., Any],
    num_workers: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    resources: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    runtime_env: Mapping[str, Any] | None = None,
    options: Sequence[str] = (),
    wait_seconds: float = 60.0,
) -> list[Any]:
    """Call a function on all ranks of a new job on a Ray cluster and wait for the results.

    Each rank has an actor that holds its resources; the rank itself is a process beside it, on the
    same host. Ranks on one host have consecutive numbers. The function calls ``hvd.init()``, by
    which a rank gets the GPU ``local_rank()`` of those that its host's actors hold. It and what
    it returns are pickled by cloudpickle. The ranks' output is the first actor's, which Ray prints
    in the driver. If ``ray.init()`` was not called, it is.

    Args:
        func: the function.
        num_workers: number of ranks.
        args: the function's positional arguments, equal on all ranks.
        kwargs: its keyword arguments, equal on all ranks.
        resources: of each rank, as Ray names them, such as ``{"CPU": 4, "GPU": 1}``. Default: one
            CPU.
        strategy: of the placement group: ``"PACK"``, ``"SPREAD"``, ``"STRICT_PACK"`` or
            ``"STRICT_SPREAD"``.
        runtime_env: Ray's environment for the actors and ranks.
        options: further options of hvdrun, such as ``["--strict"]``.
        wait_seconds: how long to wait for resources that others hold.

    Returns:
        The list of the results of all ranks, in rank order.

    Raises:
        ValueError: the cluster does not have the resources; or hvdrun refuses to start the job; or
            an argument is wrong.
        TypeError: the function or its arguments cannot be pickled.
        RuntimeError: Ray is missing; or the resources did not become free; or the workers have
            other versions than the driver; or the job failed: the text names the rank or the actor
            that failed first, with its traceback. Nothing of the job is left running then.

    Example:
        def train(rate):
            import hvd_keras as hvd
            hvd.init()
            return hvd.rank(), rate * hvd.size()

        assert hvd_keras.ray.run(train, 2, (0.1,)) == [(0, 0.2), (1, 0.2)]
    """
    import cloudpickle

    if not isinstance(num_workers, int) or num_workers < 1:
        raise ValueError(f"hvd.ray.run: num_workers is {num_workers!r}, expected at least 1")
    each = dict(resources or {"CPU": 1})
    if not any(each.values()):
        raise ValueError(f"hvd.ray.run: resources is {each}, expected more than 0 of one of them")
    try:
        import ray
    except ImportError as error:
        raise RuntimeError(
            f"hvd.ray needs Ray, and {sys.executable} has none. Run 'pip install \"ray[train]\"'."
        ) from error
    try:
        function = cloudpickle.dumps((func, tuple(args), dict(kwargs or {})))
    except Exception as error:
        raise TypeError(
            f"hvd.ray.run: the function or its arguments cannot be pickled: {error}. Create such "
            "objects inside the function"
        ) from error
    if not ray.is_initialized():
        ray.init()
    _check_resources(ray, each, num_workers)
    group = ray.util.placement_group([each] * num_workers, strategy=strategy)
    actors: list[Any] = []
    try:
        if not group.wait(wait_seconds):
            raise RuntimeError(
                f"hvd.ray.run: {num_workers} times {each} did not become free within "
                f"{wait_seconds:g} s; free now: {_amounts(ray.available_resources(), each)}. End "
                "other jobs, ask for less, or set wait_seconds"
            )
        actors = [_actor(ray, group, number, each, runtime_env) for number in range(num_workers)]
        call = agents.Call("hvd.ray.run", max(1, int(each.get("CPU", 1))), [*options])
        facts = _get(ray, [actor.open.remote(call) for actor in actors])
        order = _by_host([fact["address"] for fact in facts])
        actors = [actors[number] for number in order]
        places = [facts[number] for number in order]
        # Pickles need the same versions where they are written and read.
        if problem := call.problem(places):
            raise RuntimeError(f"hvd.ray.run: {problem}")
        # mpirun starts the ranks of a host together, so each sees the GPUs of all its actors.
        function = cloudpickle.dumps((_on_gpus, (_gpus(places), function), {}))
        results = _follow(ray, actors, places, actors[0].call.remote(call, function, places))
        return [cloudpickle.loads(result) for result in results]
    finally:
        _end(ray, actors, group)


def _amounts(found: Mapping[str, float], wanted: Mapping[str, float]) -> dict[str, float]:
    return {name: found.get(name, 0.0) for name in wanted}


def _check_resources(ray: Any, each: Mapping[str, float], count: int) -> None:
    """Raise if the cluster can never have these resources, as it is now."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    slots = sum(
        # 1.0 // 0.1 is 9.
        min(int(node.get(name, 0.0) / amount + 1e-6) for name, amount in each.items() if amount)
        for node in nodes
    )
    if slots < count:
        raise ValueError(
            f"hvd.ray.run: {count} ranks need {dict(each)} each, and the cluster has room for "
            f"{slots}: {'; '.join(str(_amounts(node, each)) for node in nodes)}. Ask for less, or "
            "add nodes"
        )


class Place:
    """An actor, which holds one rank's resources and its host's agent."""

    def __init__(self) -> None:
        self._released = threading.Event()
        self._agent: agents.Agent | None = None

    def open(self, call: agents.Call) -> dict[str, Any]:
        """Start the agent; returns where this actor is."""
        import ray

        self._agent = agents.Agent(call, str(ray.util.get_node_ip_address()))
        gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
        return {**self._agent.facts(), "pid": os.getpid(), "gpus": gpus}

    def hold(self) -> None:
        """Return when the job has ended; Ray raises in those that wait, if this actor dies."""
        self._released.wait()

    def call(
        self, call: agents.Call, function: bytes, places: Sequence[Any]
    ) -> list[bytes] | Exception:
        """Run the job; this is its first place."""
        return call.start(function, places)

    def close(self) -> None:
        """End the agent, and all that it has started."""
        self._released.set()
        if self._agent is not None:
            self._agent.close()


def _actor(ray: Any, group: Any, number: int, each: Mapping[str, float], runtime_env: Any) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    others = {name: each[name] for name in each if name not in ("CPU", "GPU", "memory")}
    return (
        ray.remote(Place)
        .options(
            num_cpus=each.get("CPU", 0),
            num_gpus=each.get("GPU", 0),
            memory=each.get("memory"),
            resources=others,
            runtime_env=None if runtime_env is None else dict(runtime_env),
            max_concurrency=4,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=number
            ),
        )
        .remote()
    )


def _get(ray: Any, answers: list[Any]) -> list[Any]:
    try:
        return list(ray.get(answers, timeout=START))
    except ray.exceptions.RayError as error:
        is_late = isinstance(error, ray.exceptions.GetTimeoutError)
        why = f"no answer within {START:g} s" if is_late else getattr(error, "cause", None) or error
        raise RuntimeError(f"hvd.ray.run: an actor could not start: {why}") from error


def _by_host(addresses: Sequence[str]) -> list[int]:
    """Return the numbers of the actors, those on one host together, the first host first."""
    return sorted(range(len(addresses)), key=lambda number: addresses.index(addresses[number]))


def _gpus(facts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the GPUs that each host's actors hold, by the host's name; none if they hold none."""
    found: dict[str, list[str]] = {}
    for fact in facts:
        if fact["gpus"]:
            found.setdefault(fact["host"], []).extend(fact["gpus"])
    # Actors with less than a whole GPU may share one.
    return {host: ",".join(dict.fromkeys(held)) for host, held in found.items()}


def _on_gpus(gpus: Mapping[str, str], function: bytes) -> Any:
    """What a rank calls: the pickled function, with its host's GPUs visible."""
    import cloudpickle

    if held := gpus.get(socket.gethostname()):
        settings.show_gpus(held)
    func, args, kwargs = cloudpickle.loads(function)
    return func(*args, **kwargs)


def address(name: str, rank: int) -> str:
    """Where a worker of Ray Train and its stand-in meet: an abstract Unix socket."""
    return f"\0hvd-ray-{name}-{rank}"


def stand_in_for_worker(name: str) -> None:
    """What a rank calls that stands in for a worker. Raises RuntimeError with its traceback."""
    rank = settings.launched_rank()
    error = stand_in(address(name, rank))
    if error is None:
        os.kill(os.getpid(), signal.SIGKILL)  # as the worker
    if error:
        raise RuntimeError(f"the worker of rank {rank} failed:\n{error}")


def _follow(
    ray: Any, actors: Sequence[Any], facts: Sequence[Mapping[str, Any]], call: Any
) -> list[bytes]:
    """Wait for the results. Raises RuntimeError with the first failure."""
    holds = [actor.hold.remote() for actor in actors]
    ray.wait([call, *holds], num_returns=1)
    if dead := _dead(ray, holds, facts):
        raise RuntimeError(f"hvd.ray.run: {dead}")
    result = ray.get(call)
    if not isinstance(result, Exception):
        return list(result)
    # When an actor dies, its ranks do, too, and hvdrun may be the first to say so.
    time.sleep(LOOK)
    dead = _dead(ray, holds, facts)
    raise RuntimeError(f"hvd.ray.run: {dead}. {result}") if dead else result


def _dead(ray: Any, holds: Sequence[Any], facts: Sequence[Mapping[str, Any]]) -> str:
    """Which actors have died, and why; empty if all live."""
    over, _ = ray.wait([*holds], num_returns=len(holds), timeout=0)
    for rank, (hold, fact) in enumerate(zip(holds, facts, strict=True)):
        if hold in over:
            try:
                ray.get(hold)
            except ray.exceptions.RayActorError as error:
                reason = " ".join(str(error).split())
                return (
                    f"the actor of rank {rank} (process {fact['pid']} on {fact['host']}) died, "
                    f"and the job was ended: {reason}"
                )
    return ""


def _end(ray: Any, actors: Sequence[Any], group: Any) -> None:
    """End the actors and all that they have started, and give back the resources."""
    closed = [actor.close.remote() for actor in actors]
    if closed:
        ray.wait(closed, num_returns=len(closed), timeout=30.0)
    for actor in actors:
        ray.kill(actor)
    ray.util.remove_placement_group(group)
