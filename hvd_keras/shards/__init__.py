"""Variables of which each rank holds a part, such as the tables of ``hvd.layers.Embedding``.

An optimizer's slots of such a variable are parts, too. Nothing of them is broadcast or averaged.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from hvd_keras._keras import Variable, keras
from hvd_keras.process_sets import ProcessSet
from hvd_keras.shards.layout import Layout, Part

__all__ = ["Layout", "Part", "Shard", "mark", "of", "without", "wrap_add_slot"]


@dataclasses.dataclass(frozen=True)
class Shard:
    """What is known about a variable that is a part of a table.

    Attributes:
        layout: how the table is divided.
        process_set: the ranks that hold the parts.
    """

    layout: Layout
    process_set: ProcessSet

    @property
    def part(self) -> Part:
        """The rows and columns of this rank."""
        return self.layout.part(self.process_set.rank())


# By the id of the tf.Variable, which cannot be hashed.
_known: dict[int, tuple[Any, Shard]] = {}


def mark(variable: Any, shard: Shard) -> None:
    """Records that a variable is this rank's part of a table."""
    inner = _inner(variable)
    number = id(inner)
    _known[number] = weakref.ref(inner, functools.partial(_forget, number)), shard


def of(variable: Any) -> Shard | None:
    """What ``mark`` recorded for a Keras variable or the ``tf.Variable`` in it."""
    found = _known.get(id(_inner(variable)))
    return found[1] if found else None


def without(variables: Iterable[Any]) -> list[Any]:
    """The variables that are not parts of tables."""
    return [variable for variable in variables if of(variable) is None]


def wrap_add_slot(add: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``Optimizer.add_variable_from_reference``: a slot of a part is a part.

    Raises:
        ValueError: the optimizer computes norms or means of a whole table.
    """

    @functools.wraps(add)
    def add_slot(self: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        shard = of(reference_variable)
        if shard is not None and type(self).__name__ in _WHOLE_VARIABLES:
            raise ValueError(
                f"optimizer {type(self).__name__} computes with whole variables, but each rank "
                f"holds a part of {reference_variable.path}. Use an optimizer that updates each "
                "element by itself, such as Adam or Adagrad, or hvd.layers.Embedding(shard=None)."
            )
        slot = add(self, reference_variable, *args, **kwargs)
        if shard is not None:
            mark(slot, shard)
        return slot

    return add_slot


_WHOLE_VARIABLES = {
    name for name in ("Adafactor", "Lamb", "Muon") if hasattr(keras.optimizers, name)
}


def _inner(variable: Any) -> Any:
    return variable.value if isinstance(variable, Variable) else variable


def _forget(number: int, _: Any) -> None:
    _known.pop(number, None)
