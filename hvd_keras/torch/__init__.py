"""Keras on PyTorch: eager collectives on torch's tensors, by the core's C API."""

from hvd_keras.runtime import gpu, libraries, settings

# The modules here of names whose own module is for TensorFlow.
_HERE = {
    "allgather allreduce alltoall barrier broadcast Compression reducescatter": "collectives",
    "grouped_allgather grouped_allreduce grouped_reducescatter": "collectives",
    "broadcast_variables": "collectives",
    "DistributedOptimizer": "optimizer",
}

# Modules that need no backend.
_NEUTRAL = (
    *("hvd_keras.runtime.", "hvd_keras.launch.", "hvd_keras.lifecycle", "hvd_keras.observe"),
    *("hvd_keras.gradients.missing_calls", "hvd_keras.training.preprocessing"),
)
_OF_TENSORFLOW = ("cuda_built", "rocm_built")


def home(module: str, name: str) -> tuple[str, str]:
    """Return the module of a public name, and its name there, by those that TensorFlow has.

    Raises:
        NotImplementedError: there is none on PyTorch.
    """
    if not module and name in ("callbacks", "data"):
        return "", name
    if module.startswith(_NEUTRAL) and name not in _OF_TENSORFLOW:
        return module, name
    for names, there in _HERE.items():
        if module and name in names.split():
            return f"{__name__}.{there}", name
    raise NotImplementedError(
        f"hvd.{name} needs Keras on TensorFlow, and KERAS_BACKEND is torch. docs/using/torch.md "
        "lists what there is on PyTorch."
    )


class CollectiveError(RuntimeError):
    """A collective has failed, on this rank or on all."""


class AbortedError(CollectiveError):
    """Another rank has left the job."""


class DeadlineExceededError(CollectiveError):
    """A rank has waited for too long."""


class FailedPreconditionError(CollectiveError):
    """The ranks ask for different things."""


class InvalidArgumentError(CollectiveError):
    """A rank cannot run its request."""


_KINDS = {kind.__name__: kind for kind in CollectiveError.__subclasses__()}


def load() -> None:
    """Before the job is joined: errors become these, with the names that TensorFlow's have."""
    libraries.make_error = lambda name, text: _KINDS.get(name, CollectiveError)(text)


def facts() -> tuple[dict[str, str], list[str]]:
    """Return what ``hvd_keras.check`` prints of it, and the names of the GPUs."""
    import torch

    gpus = range(torch.cuda.device_count())
    return {"PyTorch": torch.__version__}, list(map(torch.cuda.get_device_name, gpus))


def pin(local_rank: int, local_size: int) -> None:
    """Make the GPU of this process's local rank torch's current one.

    Raises:
        RuntimeError: the host has fewer GPUs than processes.
    """
    import torch

    if gpus := torch.cuda.device_count():
        torch.cuda.set_device(gpu.choose(gpus, local_rank, local_size, settings.read()))


def install() -> None:
    """Change Keras for several ranks."""
    import torch

    from hvd_keras.saving import per_rank
    from hvd_keras.torch import fitting
    from hvd_keras.training import variables

    fitting.install(fitting)
    variables.own_generators[:] = [fitting.Seed()]
    per_rank.generators["torch"] = (
        lambda: torch.get_rng_state().tolist(),
        lambda state: torch.set_rng_state(torch.tensor(state, dtype=torch.uint8)),
    )
    if torch.cuda.is_available():
        per_rank.generators["torch.cuda"] = (
            lambda: torch.cuda.get_rng_state().tolist(),
            lambda state: torch.cuda.set_rng_state(torch.tensor(state, dtype=torch.uint8)),
        )
