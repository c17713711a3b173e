"""An optimizer's state in shares: each rank has the slots of the variables that it owns.

Gradients go to their owners, the owners update, and the new values go to all ranks (ZeRO-1;
Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054). Owners have whole variables, so every
update is that of one process, bit for bit.
"""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvd_keras import ops
from hvd_keras.gradients import clipping, owners, shards
from hvd_keras.gradients.packed import Packed
from hvd_keras.ops.compression import Compression
from hvd_keras.runtime import settings
from hvd_keras.runtime.keras import keras

if TYPE_CHECKING:
    from hvd_keras.gradients import reducer

_UNSUITABLE = {
    "Adafactor": "its slots are rows and columns, which are small already",
    "MultiOptimizer": "it has no slots of its own",
    "ScheduleFreeAdamW": "its slots begin as copies of the weights",
}


def check_suitable(optimizer: Any) -> None:
    """Refuses optimizers whose state cannot be in shares.

    Raises:
        ValueError: it is one of those, or it is built already.
    """
    name = type(optimizer).__name__
    if name in _UNSUITABLE and hasattr(keras.optimizers, name):
        raise ValueError(
            f"hvd.DistributedOptimizer: shard_state=True is not possible for {name}, because "
            f"{_UNSUITABLE[name]}. Leave shard_state out."
        )
    if optimizer.built:
        raise ValueError(
            f"hvd.DistributedOptimizer: shard_state=True, but this {name} is built already, with "
            "all its slots. Call hvd.DistributedOptimizer before the optimizer is built, or "
            "hvd.load_model(path, shard_state=True) for a model in a file."
        )


class State:
    """The state of a Keras optimizer, of which this rank has a share.

    ``hooks`` replace methods of the optimizer, on the object, so the class stays.

    Args:
        owner: has the optimizer, which is not built yet, and the ranks that train together.
    """

    def __init__(self, owner: "reducer.KerasReducer") -> None:
        self._reducer = owner
        self._optimizer: Any = owner.optimizer
        self._name, self._process_set = owner.name, owner.process_set
        self._owners: dict[int, int] = {}
        self._variables: list[Any] = []  # keeps the ids
        self._noted: set[int] = set()
        self._packed: dict[Any, Packed] = {}
        self._optimizer._hvd_state = self

    def hooks(self) -> dict[str, Callable[..., Any]]:
        """Return what Keras's methods become on the optimizer."""
        return {
            "build": self._build,
            "_apply_weight_decay": self._apply_weight_decay,
            "_backend_update_step": self._update,
            "_update_model_variables_moving_average": self._update_averages,
            "_overwrite_model_variables_with_average_value": self._use_averages,
            "save_own_variables": functools.partial(_save, self._optimizer),
            "load_own_variables": functools.partial(_load, self._optimizer),
        }

    # Owners and slots

    def _build(self, variables: Sequence[Any]) -> None:
        optimizer = self._optimizer
        name = type(optimizer).__name__
        if not optimizer.built:
            self._variables = [v for v in variables if self._has_owner(v)]
            sizes = [_bytes(variable) for variable in self._variables]
            # By size alone, so that all ranks choose alike without a message.
            owned_by = owners.owners(sizes, self._process_set.size())
            ids = map(_id, self._variables)
            self._owners = dict(zip(ids, owned_by, strict=True))
        before = {_id(variable) for variable in optimizer.variables}
        try:
            type(optimizer).build(optimizer, variables)
        except Exception as error:
            raise ValueError(
                f"shard_state=True: {name} fails when it is built with empty slots, which ranks "
                f"have for variables that they do not own: {error}. Leave shard_state out."
            ) from error
        for variable in optimizer.variables:
            if len(variable.shape) and _id(variable) not in before | self._noted:
                raise ValueError(
                    f"shard_state=True: {name} has a variable {variable.path} of shape "
                    f"{list(variable.shape)} that it did not make with "
                    "add_variable_from_reference, so its owner is unknown. Leave shard_state out."
                )

    def _has_owner(self, variable: Any) -> bool:
        # Keras overwrites variables such as the scales of float8 on each rank.
        is_overwritten = getattr(variable, "overwrite_with_gradient", False)
        is_part = shards.of(variable) is not None
        return not (is_overwritten or is_part or _id(variable) in self._reducer.local)

    def owner_of(self, variable: Any) -> int | None:
        """Return the rank of the process set that updates a variable; None if all do."""
        return self._owners.get(_id(variable))

    def holds(self, variable: Any) -> bool:
        """Whether this rank updates a variable."""
        return self.owner_of(variable) in (None, self._process_set.rank())

    def add_slot(
        self,
        add: Callable[..., Any],
        variable: Any,
        name: str | None = None,
        initializer: Any = "zeros",
    ) -> Any:
        """Make a slot of a variable that has an owner; on other ranks it has no values.

        The arguments are those of ``add_variable_from_reference``, which is ``add``.
        """
        is_accumulator = name == "gradient_accumulator"  # of gradients before their exchange
        if is_accumulator or self.holds(variable):
            slot = add(self._optimizer, variable, name, initializer)
        else:
            path = getattr(variable, "path", None) or variable.name.replace(":", "_")
            slot = self._optimizer.add_variable(
                (0,), initializer, variable.dtype, name=f"{path.replace('/', '_')}_{name or 'var'}"
            )
        if not is_accumulator:
            owner = self._owners[_id(variable)]
            shards.mark(slot, shards.owned(tuple(variable.shape), owner, self._process_set))
        self.note(slot)
        return slot

    def note(self, slot: Any) -> None:
        """Record that a variable of the optimizer is a slot."""
        self._noted.add(_id(slot))

    # A step

    def reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        allreduce: Callable[[list[Any], list[Any]], list[Any]],
    ) -> list[Any]:
        """Return the reduced gradients of the variables that this rank updates.

        Args:
            gradients: of this rank: dense, sparse or None; None and sparse alike on all ranks.
            variables: that they belong to.
            allreduce: reduces gradients on all ranks, after some tensors; keeps Nones.

        Returns:
            In the same order; of variables that others update, this rank's own gradients.
        """
        results = list(gradients)
        how = self._reducer.options.of_dense()
        rest = [i for i, gradient in enumerate(gradients) if gradient is not None]
        after: list[Any] = []
        if how["compression"] in (Compression.none, Compression.fp16, Compression.bf16):
            dense: dict[Any, list[int]] = collections.defaultdict(list)
            for i in reversed(rest):  # as backpropagation produces them
                if not isinstance(gradients[i], tf.IndexedSlices):
                    dense[gradients[i].dtype].append(i)
            for dtype, indices in dense.items():
                packed = self._pack([variables[i] for i in indices], dtype)
                found, after = packed.reduce([gradients[i] for i in indices], after, **how)
                for number, gradient in found.items():
                    results[indices[number]] = gradient
                moved = set(range(len(indices))) - set(packed.alone)
                rest = [i for i in rest if i not in {indices[number] for number in moved}]
        if rest:
            chosen = set(rest)
            some = [g if i in chosen else None for i, g in enumerate(gradients)]
            reduced = allreduce(some, after)
            for i in rest:
                results[i] = reduced[i]
        return results

    def clip(self, gradients: Sequence[Any], step: "reducer.Step") -> Any:
        """Clips the gradients of the variables that this rank updates, as one process does.

        Args:
            gradients: from ``reduce``, in the order of ``step.updated``.
            step: that they belong to.
        """
        optimizer, variables, local = self._optimizer, step.updated, step.local
        held = [i for i, variable in enumerate(variables) if self.holds(variable)]
        known: dict[int, Any] = {}
        indices = list(range(len(variables)))
        if clipping.clips_by_all(optimizer) and step.travels:
            known = self._squares(gradients, variables)
        else:
            indices, local = held, None
        cut = clipping.clip(
            optimizer,
            [gradients[i] for i in indices],
            {k for k, i in enumerate(indices) if i in step.divided},
            self._name,
            self._process_set,
            known,
            local,
        )
        results = list(gradients)
        for i, gradient in zip(indices, cut, strict=True):
            results[i] = gradient
        return results

    def _squares(self, gradients: Sequence[Any], variables: Sequence[Any]) -> dict[int, Any]:
        """Return the squared norms of the gradients of all variables that have owners, by place."""
        indices = [i for i, v in enumerate(variables) if self.owner_of(v) is not None]
        mine = [
            keras.ops.sum(keras.ops.square(gradients[i]))
            if self.holds(variables[i])
            else tf.zeros([], gradients[i].dtype)
            for i in indices
        ]
        # One allreduce of a number per variable. Adding zeros changes no bit of them.
        sums = ops.reduce_tensors(
            mine, op=ops.Sum, name=f"{self._name} norms", process_set=self._process_set
        )
        return dict(zip(indices, sums, strict=True))

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        held = [variable for variable in variables if self.holds(variable)]
        type(self._optimizer)._apply_weight_decay(self._optimizer, held)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _update(self, gradients: Sequence[Any], variables: Sequence[Any], rate: Any) -> None:
        held = [i for i, variable in enumerate(variables) if self.holds(variable)]
        type(self._optimizer)._backend_update_step(
            self._optimizer, [gradients[i] for i in held], [variables[i] for i in held], rate
        )
        if (step := self._reducer.step) and step.travels:
            self._share(variables)
            step.shared = True

    def _update_averages(self, variables: Sequence[Any]) -> None:
        update = type(self._optimizer)._update_model_variables_moving_average
        with self._held_averages(variables) as held:
            update(self._optimizer, held)

    def _use_averages(self, variables: Sequence[Any]) -> None:
        use = type(self._optimizer)._overwrite_model_variables_with_average_value
        with self._held_averages(variables) as held:
            use(self._optimizer, held)
        step = self._reducer.step
        exchanges = step is not None and step.travels
        if exchanges or not tf.inside_function():  # also Keras's call at the end of fit
            self._share(variables)

    @contextlib.contextmanager
    def _held_averages(self, variables: Sequence[Any]) -> Iterator[list[Any]]:
        """Lets Keras see the moving averages of the variables that this rank updates."""
        optimizer = self._optimizer
        averages = optimizer._model_variables_moving_average
        pairs = [
            (variable, average)
            for variable, average in zip(variables, averages, strict=True)
            if self.holds(variable)
        ]
        # Not by Keras's __setattr__, which tracks variables.
        name = "_model_variables_moving_average"
        object.__setattr__(optimizer, name, [average for _, average in pairs])
        try:
            yield [variable for variable, _ in pairs]
        finally:
            object.__setattr__(optimizer, name, averages)

    def _share(self, variables: Sequence[Any]) -> None:
        """Give all ranks the values of the variables that each updates, last variables first."""
        rank = self._process_set.rank()
        by_dtype: dict[Any, list[Any]] = collections.defaultdict(list)
        for variable in reversed(variables):
            if self.owner_of(variable) is not None:
                by_dtype[tf.as_dtype(variable.dtype).base_dtype].append(variable)
        after: list[Any] = []
        for dtype, of_dtype in by_dtype.items():
            packed = self._pack(of_dtype, dtype)
            mine = {
                i: tf.convert_to_tensor(variable)
                for i, variable in enumerate(of_dtype)
                if self.holds(variable) and i not in packed.alone
            }
            found, after = packed.share(mine, dtype, after)
            for i in packed.alone:
                owner = self._owners[_id(of_dtype[i])]
                with tf.control_dependencies(after):
                    found[i] = ops.broadcast(
                        tf.convert_to_tensor(of_dtype[i]),
                        self._process_set.ranks[owner],
                        name=f"{self._name} value of owner {i}, {dtype.name}",
                        process_set=self._process_set,
                    )
                after = [found[i]]
                if owner == rank:
                    del found[i]
            for i, value in found.items():
                shards.inner_variable(of_dtype[i]).assign(value)

    def _pack(self, variables: Sequence[Any], dtype: Any) -> Packed:
        key = dtype, *map(_id, variables)
        if key not in self._packed:
            limit = settings.read().bucket_bytes // dtype.size
            self._packed[key] = Packed(
                self._name,
                [tuple(variable.shape) for variable in variables],
                [self._owners[_id(variable)] for variable in variables],
                self._process_set,
                (min(limit, (1 << 20) // dtype.size), limit),
            )
        return self._packed[key]


def wrap_files(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap how a LossScaleOptimizer writes and read files, with the optimizer in it.

    On the class, because ``compile`` creates such optimizers by itself.
    """
    own = {"save_own_variables": _save, "load_own_variables": _load}[method.__name__]

    @functools.wraps(method)
    def of_inner(self: Any, store: Any) -> None:
        (own if hasattr(self.inner_optimizer, "_hvd_state") else method)(self, store)

    return of_inner


def _save(optimizer: Any, store: Any) -> None:
    """Replace ``save_own_variables``."""
    places = shards.saving_places.get()
    for i, variable in enumerate(optimizer.variables):
        if shards.of(variable) is None:
            store[str(i)] = variable.numpy()
        elif _id(variable) in places:
            store[str(i)] = places[_id(variable)]
        else:
            raise ValueError(
                f"this rank has a share of the state of {optimizer.name} only (shard_state=True). "
                "Use hvd.save_model(model, path), on all ranks, or hvd.callbacks.Checkpoint."
            )


def _load(optimizer: Any, store: Any) -> None:
    """Replace ``load_own_variables``: the file has the whole state."""
    for i, variable in enumerate(optimizer.variables):
        if shards.of(variable) is None:
            variable.assign(store[str(i)])
        else:
            set_share(variable, np.asarray(store[str(i)]))


def set_share(variable: Any, whole: Any) -> None:
    """Assign to a part what it has of the whole, an array."""
    shard = shards.of(variable)
    assert shard is not None
    rows = whole.reshape(shard.layout.input_dim, shard.layout.output_dim)
    variable.assign(shard.part.cut(rows, 0)[1].reshape(variable.shape))


def _id(variable: Any) -> int:
    return id(shards.inner_variable(variable))


def _bytes(variable: Any) -> int:
    elements: int = tf.TensorShape(variable.shape).num_elements()
    return elements * int(tf.as_dtype(variable.dtype).size)
