"""Describes variables, and compares the ranks' descriptions, on every backend of Keras."""

import dataclasses
import math
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from hvd_keras.gradients import buckets
from hvd_keras.runtime import agree, settings
from hvd_keras.runtime.process_sets import ProcessSet


@dataclasses.dataclass(frozen=True)
class VariableSpec:
    """What must be equal on all ranks about a variable: path, shape and dtype."""

    path: str  # common_path
    shape: tuple[int, ...]
    dtype: str  # such as "float32"

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * int(agree.numpy_dtype(self.dtype).itemsize)

    def __str__(self) -> str:
        return f"{self.path} {self.dtype}{list(self.shape)}"


def spec_of(variable: Any) -> VariableSpec:
    """Return the spec of a Keras variable, a ``tf.Variable`` or a tensor."""
    path = getattr(variable, "path", None) or getattr(variable, "name", None) or "tensor"
    # In TensorFlow 1, dimensions are objects and dtypes are reference types.
    sizes = (getattr(size, "value", size) for size in variable.shape)
    dtype = getattr(variable.dtype, "base_dtype", variable.dtype)
    return VariableSpec(common_path(path), tuple(sizes), getattr(dtype, "name", dtype))


def common_path(path: str) -> str:
    """Remove the suffixes by which Keras makes layer names unique from a variable's path."""
    # Keras counts the layers of a name per process, so the suffixes differ between ranks as soon as
    # one rank has created more models.
    return re.sub(r"(_\d+)?(:0)?(?=/|$)", "", path)


def in_buckets(variables: Iterable[Any]) -> list[list[Any]]:
    """Return variables by the requests in which their values travel (``HVD_BUCKET_BYTES``)."""
    variables = list(variables)
    sizes = [spec_of(variable).bytes for variable in variables]
    # As gradients are grouped: few requests, none so large that its copy matters.
    filled = buckets.fill(sizes, settings.read().bucket_bytes)
    return [[variables[i] for i in bucket] for bucket in filled]


def check_specs(
    name: str, specs: Sequence[VariableSpec], process_set: ProcessSet
) -> tuple[VariableSpec, ...]:
    """Compare the ranks' variables: their number, order, paths, shapes and dtypes.

    A path may begin later than another rank's: Keras puts the name of a model that was built in its
    first step into the paths of its variables, and leaves it out when the model is loaded from a
    file. Returns the specs with the longest path of each variable, the same on all ranks.

    Raises:
        ValueError: (on every rank) they differ.
    """
    mine = [[spec.path, spec.shape, spec.dtype] for spec in specs]
    differing = agree.gather_if_different(f"{name}.variables", mine, process_set)
    if differing is None:
        return tuple(specs)
    gathered = [
        [VariableSpec(path, tuple(shape), dtype) for path, shape, dtype in rank]
        for rank in differing
    ]
    # The specs of the k-th variables belong together.
    longest = tuple(
        max(of_ranks, key=lambda spec: len(spec.path)) for of_ranks in zip(*gathered, strict=False)
    )
    for rank in gathered:
        if len(rank) != len(longest) or not all(map(_fits, rank, longest)):
            views = (
                {f"variable {i}": str(spec) for i, spec in enumerate(rank)} for rank in gathered
            )
            raise_difference(
                dict(zip(process_set.ranks, views, strict=True)),
                "Every rank must build the same layers, with the same names, in the same order.",
            )
    return longest


def _fits(spec: VariableSpec, longest: VariableSpec) -> bool:
    is_end = f"/{longest.path}".endswith(f"/{spec.path}")
    return is_end and (spec.shape, spec.dtype) == (longest.shape, longest.dtype)


def raise_difference(views: dict[int, dict[str, str]], advice: str) -> None:
    """Raise the error about different models.

    Args:
        views: what each rank has, by rank and by name.
        advice: what to do.
    """
    lines = []
    different: tuple[str, ...] = ()
    for name in dict.fromkeys(name for view in views.values() for name in view):
        if name.startswith(different) and any(name not in view for view in views.values()):
            continue  # an argument of one of two classes, which are shown
        ranks: dict[str, list[int]] = {}  # by what they have
        for rank, view in views.items():
            ranks.setdefault(view.get(name, "none"), []).append(rank)
        if len(ranks) > 1:
            groups = (
                f"rank {own[0]} has {value}"
                if len(own) == 1
                else f"ranks {', '.join(map(str, own))} have {value}"
                for value, own in ranks.items()
            )
            lines.append(f"{name}: {', '.join(groups)}")
            different += (f"{name} ", f"{name}.")
    shown = "\n  ".join(lines[:5]) + (f"\n  and {len(lines) - 5} more" if len(lines) > 5 else "")
    if "keras_tuner" in sys.modules:
        advice += (
            " With KerasTuner, each rank draws hyperparameters separately: give "
            "the tuner the same seed on all ranks and a directory for each rank, such as "
            'directory=f"tuning/{hvd.rank()}".'
        )
    if "optuna" in sys.modules:
        advice += (
            " With Optuna, each rank draws hyperparameters separately: give the "
            "study's sampler the same seed on all ranks, as in TPESampler(seed=1)."
        )
    raise ValueError(f"The ranks train different models:\n  {shown}\n{advice}")
