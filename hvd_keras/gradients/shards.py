"""Variables of which each rank holds a part.

They are the tables of ``hvd.layers.Embedding``, an optimizer's slots of them, and all slots of an
optimizer whose state is in shares (``zero``). Nothing of them is broadcast or averaged.
"""

import bisect
import contextvars
import dataclasses
import math
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import Variable
from hvd_keras.runtime.process_sets import ProcessSet
from hvd_keras.runtime.reductions import Adasum, ReduceOp

Kind = Literal["rows", "columns", "whole"]

BLOCK = 1 << 20  # values of a table that are read, drawn or sent at once


@dataclasses.dataclass(frozen=True)
class Part:
    """The rows and columns of a table that one rank holds; columns are neighbours."""

    rows: range  # of the table; may have a step
    columns: range

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.columns)

    def read(self, rows: Callable[[int, int], Any], columns: int, dtype: Any) -> Any:
        """Return what this part has of a table, of which no rank need hold the whole.

        Args:
            rows: returns the rows [first, last) of the table; ``first`` is a multiple of 4.
            columns: their length.
        """
        values = np.empty(self.shape, dtype)
        step = max(4, BLOCK // columns // 4 * 4)
        for first in range(0, self.rows.stop, step):
            block = rows(first, min(first + step, self.rows.stop))
            place = self.between(first, first + len(block))
            if mine := self.rows[place]:
                # By rows, a part has every N-th row of the table.
                whole_rows = block[mine.start - first : mine.stop - first : mine.step]
                values[place] = whole_rows[:, self.columns.start : self.columns.stop]
        return values

    def between(self, first: int, last: int) -> slice:
        """Which of this part's rows are in [first, last) of the table."""
        return slice(bisect.bisect_left(self.rows, first), bisect.bisect_left(self.rows, last))

    def put(self, values: Any, block: Any, first: int) -> None:
        """Put this part's values into a block of the table's rows, from ``first`` on."""
        found = self.rows[self.between(first, first + len(block))]
        if found and self.columns:
            rows = slice(found.start - first, found.stop - first, found.step)
            columns = slice(self.columns.start, self.columns.stop)
            block[rows, columns] = values.reshape(len(found), len(self.columns))


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a table is divided between ranks.

    "rows": row i belongs to rank i modulo ``ranks``, because ids of many vocabularies are sorted
    by frequency, so that the first rows are looked up most; "columns": each rank has some
    neighbouring columns of all rows; "whole": the rank ``owner`` has the whole table.
    """

    kind: Kind
    input_dim: int
    output_dim: int
    ranks: int
    owner: int = 0

    def part(self, rank: int) -> Part:
        """Return what a rank holds; its number counts in the process set."""
        rows, columns = range(self.input_dim), range(self.output_dim)
        if self.kind == "rows":
            return Part(rows[rank :: self.ranks], columns)
        if self.kind == "columns":
            # Their numbers differ by 1 at most.
            first, last = (self.output_dim * r // self.ranks for r in (rank, rank + 1))
            return Part(rows, columns[first:last])
        return Part(rows if rank == self.owner else range(0), columns)

    def size(self, rank: int) -> int:
        return math.prod(self.part(rank).shape)


@dataclasses.dataclass(frozen=True)
class Shard:
    """What is known about a variable that is a part of a table."""

    layout: Layout
    process_set: ProcessSet
    # The shape of a slot of any number of dimensions, which one rank has; ``layout`` is that of a
    # table with as many rows. None for tables and their slots.
    owned: tuple[int, ...] | None = None
    is_regularized: bool = False  # by its layer, which reads it

    @property
    def part(self) -> Part:
        """The rows and columns of this rank."""
        return self.layout.part(self.process_set.rank())

    @property
    def shape(self) -> tuple[int, ...]:
        if self.owned is not None:
            return self.owned
        return self.layout.input_dim, self.layout.output_dim


def owned(shape: tuple[int, ...], owner: int, process_set: ProcessSet) -> Shard:
    """Return a slot of this shape that one rank of the process set has."""
    rows = shape[0] if shape else 1
    layout = Layout("whole", rows, math.prod(shape[1:]), process_set.size(), owner)
    return Shard(layout, process_set, tuple(shape))


#: What is written in the places of variables in a file of ``save_model``, by ``variable_id``.
saving_places: contextvars.ContextVar[dict[int, Any]] = contextvars.ContextVar("places", default={})  # noqa: B039


def variable_id(variable: Any) -> int:
    """Identify a variable; a Keras variable and the ``tf.Variable`` in it have the same id."""
    return id(inner_variable(variable))


class VariableSet:
    """A set of variables, which cannot be hashed, for as long as they live."""

    def __init__(self) -> None:
        self._variables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def add(self, *variables: Any) -> None:
        self._variables.update((variable_id(v), inner_variable(v)) for v in variables)

    def discard(self, *variables: Any) -> None:
        for variable in variables:
            self._variables.pop(variable_id(variable), None)

    def __contains__(self, variable: Any) -> bool:
        return variable_id(variable) in self._variables


#: While losses count by rows: how many times this rank's rows all ranks have, a variable.
parts: contextvars.ContextVar[Any] = contextvars.ContextVar("parts of rows", default=None)


def mark(variable: Any, shard: Shard) -> None:
    """Record that a variable is this rank's part of a table."""
    variable._hvd_shard = shard
    inner = inner_variable(variable)
    if hasattr(inner, "assign"):  # otherwise its initial value, while Keras builds a graph
        inner._hvd_shard = shard


def of(variable: Any) -> Shard | None:
    """Return what ``mark`` recorded for a Keras variable or the ``tf.Variable`` in it."""
    # An attribute, not a table by id: it lives as long as the variable.
    shard: Shard | None = getattr(variable, "_hvd_shard", None)
    if shard is not None:
        mark(variable, shard)  # a Keras variable may have got its tf.Variable since
    return shard


_SAVE = (
    "Use hvd.save_model(model, path), on all ranks, or hvd.callbacks.Checkpoint to continue "
    "training."
)


def refuse_parts(variables: Iterable[Any], advice: str = _SAVE) -> None:
    """Raise ValueError if a file that one rank writes would have parts of these variables."""
    for variable in variables:
        shard = of(variable)
        if shard is not None and shard.layout.ranks > 1:
            raise ValueError(f"this rank has a part of {path_of(variable)} only. {advice}")


def stored(variable: Any) -> Any:
    """Return what a file has of a variable at first. Raises as ``refuse_parts``."""
    place = saving_places.get().get(variable_id(variable))
    if place is None:
        refuse_parts([variable])
    return variable if place is None else place


def sharded_indices(
    variables: Sequence[Any], name: str, op: ReduceOp, process_set: ProcessSet
) -> set[int]:
    """Return the indices of the parts of tables among the variables of the optimizer ``name``.

    Raises:
        ValueError: the options of the optimizer do not fit them.
    """
    indices = set()
    for i, variable in enumerate(variables):
        shard = of(variable)
        if shard is None:
            continue
        path = path_of(variable)
        if shard.process_set.id() != process_set.id():
            raise ValueError(
                f"{name}: {path} is divided between {shard.process_set}, but {process_set} trains "
                "it. Give both the same process_set."
            )
        if op is Adasum:
            raise ValueError(
                f"{name}: {path} is divided between ranks, so op=hvd.Adasum is not possible. Use "
                "hvd.Average or hvd.Sum, or hvd.layers.Embedding(shard=None)."
            )
        indices.add(i)
    return indices


def without(variables: Iterable[Any]) -> list[Any]:
    """Return the variables that are not parts of tables."""
    return [variable for variable in variables if of(variable) is None]


def whole(variable: Any) -> Any:
    """Return the array of which the ranks' variables are parts; all ranks must call it."""
    shard = of(variable)
    if shard is None:
        return np.asarray(variable)
    return np.concatenate(list(blocks(variable, to_leader=False))).reshape(shard.shape)


def blocks(variable: Any, to_leader: bool) -> Iterator[Any]:
    """Yield the rows of which a variable is a part, block by block; all ranks must iterate.

    With ``to_leader`` on the first rank only; others send theirs there.
    """
    shard: Any = of(variable)
    layout, part = shard.layout, shard.part
    mine = np.asarray(variable).reshape(part.shape)
    name = f"table {layout.input_dim} x {layout.output_dim}"
    step = max(1, BLOCK // layout.output_dim)
    for first in range(0, layout.input_dim, step):
        last = min(first + step, layout.input_dim)
        sent = mine[part.between(first, last)].tobytes()
        gathered = agree.gather_bytes(name, sent, shard.process_set, to_leader)
        block = np.empty((last - first, layout.output_dim), mine.dtype)
        for rank, piece in enumerate(gathered):
            layout.part(rank).put(np.frombuffer(piece, mine.dtype), block, first)
        if gathered:
            yield block.reshape(-1, *shard.shape[1:])


def assign(variable: Any, whole: Any) -> None:
    """Assign to a part what it has of the whole: an array, or a dataset of h5py of two axes.

    Other variables get the whole.
    """
    shard = of(variable)
    if shard is None:
        variable.assign(np.asarray(whole))
        return
    rows, columns = shard.layout.input_dim, shard.layout.output_dim
    if isinstance(whole, np.ndarray):
        whole = whole.reshape(rows, columns)
    dtype = agree.numpy_dtype(variable.dtype)
    values = shard.part.read(lambda first, last: np.asarray(whole[first:last]), columns, dtype)
    variable.assign(values.reshape(variable.shape))


def add_slot(add: Any, self: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``Optimizer.add_variable_from_reference``: a slot of a part is a part.

    Raises:
        ValueError: the optimizer computes norms or means of a whole table.
    """
    shard = of(reference_variable)
    if shard is not None and _WHOLE_VARIABLES & {cls.__name__ for cls in type(self).__mro__}:
        self.built = False  # a step that is only traced may have asked: the first step raises, too
        raise ValueError(
            f"optimizer {type(self).__name__} computes with whole variables, but each rank "
            f"holds a part of {reference_variable.path}. Use an optimizer that updates each "
            "element alone, such as Adam or Adagrad, or hvd.layers.Embedding(shard=None)."
        )
    slot = add(self, reference_variable, *args, **kwargs)
    if shard is not None:
        mark(slot, shard)
    return slot


_WHOLE_VARIABLES = {"Adafactor", "Lamb", "Muon"}


def inner_variable(variable: Any) -> Any:
    """Return the ``tf.Variable`` in a Keras variable; other objects unchanged."""
    return variable.value if isinstance(variable, Variable) else variable


def path_of(variable: Any) -> str:
    """Return the name of a variable of any Keras or TensorFlow, for errors."""
    return str(getattr(variable, "path", variable.name))


_ADVICE = (
    "hvd.DistributedOptimizer computes norms over all ranks, for its clipnorm or global_clipnorm: "
    "use it instead of a tape, and not around a MultiOptimizer. Or leave clipping out."
)


def check_clipping(
    optimizer: Any, variables: Iterable[Any], local: Container[Any], advice: str = _ADVICE
) -> None:
    """Refuse an optimizer, not distributed, that would clip by norms which this rank does not know.

    Raises:
        ValueError: it clips by norms and updates a part of a table, or clips by the norm of all
            gradients and updates a variable of ``local``.
    """
    by_all = getattr(optimizer, "global_clipnorm", None)
    if not (getattr(optimizer, "clipnorm", None) or by_all):
        return
    for variable in variables:
        if by_all and variable in local:
            raise ValueError(
                f"{type(optimizer).__name__} clips by the norm of all gradients (global_clipnorm), "
                f"but {path_of(variable)} belongs to this rank alone, so each rank would scale the "
                f"shared gradients differently. {advice}"
            )
        name = f"{type(optimizer).__name__} (clipnorm, global_clipnorm)"
        refuse_norms(name, variable, advice)


def note_gradient(gradient: Any, variable: Any) -> None:
    """Note whose a gradient is, and the values of a sparse one, of which this rank has a part."""
    for one in (gradient, getattr(gradient, "values", None)):
        if one is not None:
            one._hvd_part = variable


def refuse_norms(name: str, variable: Any, advice: str = _ADVICE) -> None:
    """Raise ValueError if what clips a variable's gradient by its norm knows a part of it only."""
    shard = of(variable)
    if shard is not None and shard.process_set.size() > 1:
        raise ValueError(
            f"{name} clips by norms, but each rank has a part of {path_of(variable)} only. {advice}"
        )
