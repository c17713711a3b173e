"""An optimizer's state in shares: each rank has the slots of the variables that it owns.

Gradients go to their owners, the owners update, and the new values go to all ranks (ZeRO-1;
Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054). Owners have whole variables, so every
update is that of one process, bit for bit.
"""

import collections
import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras import ops
from hvd_keras.gradients import buckets, clipping, model_ranks, reducer, shards, specs
from hvd_keras.ops.reduction import wire_dtype
from hvd_keras.runtime import settings
from hvd_keras.runtime.keras import keras, overrides, replaced

_UNSUITABLE = {
    "Adafactor": "its slots are rows and columns, which are small already",
    "MultiOptimizer": "it has no slots itself",
    "ScheduleFreeAdamW": "its slots begin as copies of the weights",
}


def check_suitable(optimizer: Any) -> None:
    """Raise ValueError if an optimizer's state cannot be in shares."""
    name = type(optimizer).__name__
    reason = _UNSUITABLE.get(name)
    if reason is None and overrides(optimizer, "apply", of=keras.optimizers.Optimizer):
        reason = "its own apply may need all gradients, and each rank has the averages of a part"
    if reason is not None:
        raise ValueError(
            f"hvd.DistributedOptimizer: shard_state=True is not possible for {name}, because "
            f"{reason}. Leave shard_state out."
        )
    if optimizer.built:
        raise ValueError(
            f"hvd.DistributedOptimizer: shard_state=True, but this {name} is built already, with "
            "all its slots. Call hvd.DistributedOptimizer before the optimizer is built, or "
            "hvd.load_model(path, shard_state=True) for a model in a file."
        )


class Packed:
    """The requests in which tensors of variables travel, of one dtype, each owned by one rank.

    The variables are in the order in which their gradients become ready.
    """

    def __init__(self, own: "ShardedReducer", variables: Sequence[Any], dtype: tf.DType) -> None:
        self._name, process_set = own.name, own.process_set
        self._process_set, self._dtype = process_set, dtype
        self._shapes = [tf.TensorShape(variable.shape) for variable in variables]
        sizes = [shape.num_elements() for shape in self._shapes]
        owned_by = [own.owners[shards.variable_id(variable)] for variable in variables]
        limit = settings.read().bucket_bytes // dtype.size  # elements
        limits = min(limit, buckets.FIRST_BYTES // dtype.size), limit
        # Tensors that are alone do not travel here, see buckets.pack.
        self._requests, self.alone = buckets.pack(sizes, owned_by, process_set.size(), limits)

    def reduce(
        self, tensors: Sequence[Any], after: list[Any], **how: Any
    ) -> tuple[dict[int, Any], list[Any]]:
        """Return the tensors that this rank owns, reduced over all ranks, by number.

        Args:
            tensors: of this rank, all of them.
            after: what the first request waits for, so that all ranks submit in one order; also
                returned, for the next one.
            how: arguments for ``ops.reducescatter``.
        """
        flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
        rank, ranks = self._process_set.rank(), self._process_set.size()
        found: dict[int, list[Any]] = collections.defaultdict(list)
        for number, request in enumerate(self._requests):
            rows = (self._row(flat, pieces, request.length) for pieces in request.rows)
            # [ranks, length], row r for owner r; reducescatter leaves each rank its own row.
            packed = tf.reshape(tf.concat(list(itertools.chain(*rows)), 0), [ranks, request.length])
            with tf.control_dependencies(after):
                mine = ops.reducescatter(
                    packed,
                    name=f"{self._name} gradients to owners {number}, {self._dtype.name}",
                    process_set=self._process_set,
                    **how,
                )
            after = [mine]
            self._take(tf.reshape(mine, [-1]), request.rows[rank], found)
        return self._joined(found), after

    def share(
        self, tensors: Mapping[int, Any], after: list[Any]
    ) -> tuple[dict[int, Any], list[Any]]:
        """Give all ranks what each owns; return the tensors that other ranks own, by number.

        Args:
            tensors: those that this rank owns, by number.
            after: as in ``reduce``.
        """
        flat = {i: tf.reshape(tensor, [-1]) for i, tensor in tensors.items()}
        rank = self._process_set.rank()
        found: dict[int, list[Any]] = collections.defaultdict(list)
        for number, request in enumerate(self._requests):
            mine = tf.concat(self._row(flat, request.rows[rank], request.length), 0)
            with tf.control_dependencies(after):
                gathered = ops.allgather(
                    mine,
                    name=f"{self._name} values of owners {number}, {self._dtype.name}",
                    process_set=self._process_set,
                )
            # [ranks · length]: the owners' rows, one after another.
            whole = tf.debugging.assert_equal(
                tf.size(gathered),
                request.length * self._process_set.size(),
                "shard_state=True: a rank has joined (hvd.join), so nobody updates the variables "
                "that it owns. Give all ranks the same number of batches, or leave shard_state out",
            )
            with tf.control_dependencies([] if whole is None else [whole]):
                gathered = tf.identity(gathered)
            after = [gathered]
            for other, pieces in enumerate(request.rows):
                if other != rank:
                    begin = other * request.length
                    self._take(gathered[begin : begin + request.length], pieces, found)
        return self._joined(found), after

    def _row(self, flat: Any, pieces: list[buckets.Piece], length: int) -> list[Any]:
        # The rows of one request are equally long; zeros stand for what an owner has less.
        row = [flat[piece.tensor][piece.first : piece.last] for piece in pieces]
        padding = length - sum(piece.last - piece.first for piece in pieces)
        return [*row, tf.zeros([padding], self._dtype)] if padding else row

    def _take(self, row: Any, pieces: list[buckets.Piece], found: dict[int, list[Any]]) -> None:
        begin = 0
        for piece in pieces:
            end = begin + piece.last - piece.first
            found[piece.tensor].append(row[begin:end])
            begin = end

    def _joined(self, found: dict[int, list[Any]]) -> dict[int, Any]:
        # A tensor that a request's end has cut comes in several pieces, in their order.
        return {
            i: tf.reshape(pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0), self._shapes[i])
            for i, pieces in found.items()
        }


class ShardedReducer(reducer.KerasReducer):
    """A ``KerasReducer`` of an optimizer, not built yet, of whose state each rank has a share."""

    is_sharded = True

    def __init__(self, *args: Any) -> None:
        self.owners: dict[int, int] = {}  # ranks of the process set, by variable id
        self._variables: list[Any] = []  # keeps the ids
        self._noted: set[int] = set()  # the ids of slots that _add_slot has made
        self._packed: dict[Any, Packed] = {}  # by dtype and variables
        super().__init__(*args)

    def hooks(self) -> dict[str, Callable[..., Any]]:
        return {
            **super().hooks(),
            "build": self._build,  # chooses the owners
            "add_variable_from_reference": self._add_slot,  # of full size on the owner alone
            "_apply_weight_decay": self._apply_weight_decay,
            "_backend_update_step": self._update,  # gives the new values to all
            "_update_model_variables_moving_average": self._update_averages,
            "_overwrite_model_variables_with_average_value": self._use_averages,
            # In files of model.save, optimizers have whole slots.
            "save_own_variables": functools.partial(_save, self.optimizer),
            "load_own_variables": functools.partial(_load, self.optimizer),
        }

    def register_local(self, variable: Any) -> None:
        if self._owner_of(variable) is not None:
            raise ValueError(
                f"register_local_var: {variable.path} has an owner already (shard_state=True). "
                "Register variables before the optimizer is built."
            )
        super().register_local(variable)

    def begin(
        self, gradients: Sequence[Any], variables: Sequence[Any], local: Sequence[Any] = ()
    ) -> Any:
        if not self.optimizer.built:
            self.optimizer.build(variables)  # which gives them their owners
        return super().begin(gradients, variables, local)

    # Owners and slots

    def _build(self, variables: Sequence[Any]) -> None:
        optimizer = self.optimizer
        name = type(optimizer).__name__
        if not optimizer.built:
            self._variables = [v for v in variables if self._has_owner(v)]
            sizes = [specs.spec_of(v).bytes for v in self._variables]
            # By size alone, so that all ranks choose alike without a message.
            owned_by = buckets.owners(sizes, self.process_set.size())
            ids = map(shards.variable_id, self._variables)
            self.owners = dict(zip(ids, owned_by, strict=True))
        before = {shards.variable_id(variable) for variable in optimizer.variables}
        # On most ranks a slot is empty, for which not every optimizer is prepared.
        try:
            type(optimizer).build(optimizer, variables)
        except Exception as error:
            raise ValueError(
                f"shard_state=True: {name} fails when it is built with empty slots, which ranks "
                f"have for variables that they do not own: {error}. Leave shard_state out."
            ) from error
        # All ranks have scalars; of another variable the owner must be known.
        for variable in optimizer.variables:
            if len(variable.shape) and shards.variable_id(variable) not in before | self._noted:
                raise ValueError(
                    f"shard_state=True: {name} has a variable {variable.path} of shape "
                    f"{list(variable.shape)} that it did not make with "
                    "add_variable_from_reference, so its owner is unknown. Leave shard_state out."
                )

    def _has_owner(self, variable: Any) -> bool:
        # Keras overwrites variables such as the scales of float8 on each rank.
        is_overwritten = getattr(variable, "overwrite_with_gradient", False)
        is_part = shards.of(variable) is not None
        return not (is_overwritten or is_part or shards.variable_id(variable) in self.local)

    def _owner_of(self, variable: Any) -> int | None:
        """Return the rank of the process set that updates a variable; None if all do."""
        return self.owners.get(shards.variable_id(variable))

    def _holds(self, variable: Any) -> bool:
        return self._owner_of(variable) in (None, self.process_set.rank())

    def _add_slot(
        self, reference_variable: Any, name: str | None = None, initializer: Any = "zeros"
    ) -> Any:
        """Replace ``add_variable_from_reference``: on ranks other than the owner without values."""
        optimizer, variable = self.optimizer, reference_variable
        owner = self._owner_of(variable)
        is_accumulator = name == "gradient_accumulator"  # of gradients before their exchange
        if is_accumulator or self._holds(variable):
            slot = type(optimizer).add_variable_from_reference(
                optimizer, variable, name=name, initializer=initializer
            )
        else:
            path = getattr(variable, "path", None) or variable.name.replace(":", "_")
            slot = optimizer.add_variable(
                (0,), initializer, variable.dtype, name=f"{path.replace('/', '_')}_{name or 'var'}"
            )
        if owner is not None and not is_accumulator:
            shards.mark(slot, shards.owned(tuple(variable.shape), owner, self.process_set))
        self._noted.add(shards.variable_id(slot))
        return slot

    # A step

    def exchange(self, plan: reducer.Plan, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Exchanges the gradients that travel; those of others' variables stay this rank's own."""
        results = list(gradients)
        how = self.options.of_dense()
        # What the plan exchanges in the end: sparse gradients, those that are alone, and all if the
        # user's own compressor must see whole tensors.
        rest = [i for i, gradient in enumerate(gradients) if gradient is not None]
        after: list[Any] = []
        if wire_dtype(how["compression"]) is not None:
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
            reduced = plan.exchange(some, self.options, after)
            for i in rest:
                results[i] = reduced[i]
        return results

    def clip(self, gradients: Sequence[Any], step: reducer.Step) -> Any:
        """Clips the gradients of the variables that this rank updates, as one process does."""
        variables, local = step.updated, step.local
        held = [i for i, variable in enumerate(variables) if self._holds(variable)]
        known: dict[int, Any] = {}
        indices = list(range(len(variables)))
        # A norm over all gradients needs the squares of those that other ranks have; norms of each
        # need what this rank updates, and the parts of tables.
        if clipping.clips_by_all(self.optimizer) and step.travels:
            known = self._squares(gradients, variables)
        else:
            indices, local = held, None
        divided = {k for k, i in enumerate(indices) if i in step.divided}
        cut = clipping.clip(self, [gradients[i] for i in indices], divided, local, known)
        results = list(gradients)
        for i, gradient in zip(indices, cut, strict=True):
            results[i] = gradient
        return results

    def _squares(self, gradients: Sequence[Any], variables: Sequence[Any]) -> dict[int, Any]:
        """Return the squared norms of the gradients of all variables that have owners, by place."""
        indices = [i for i, v in enumerate(variables) if self._owner_of(v) is not None]
        mine = [
            clipping.square(gradients[i])
            if self._holds(variables[i])
            else tf.zeros([], gradients[i].dtype)
            for i in indices
        ]
        # One allreduce of a number per variable. Adding zeros changes no bit of them.
        name = f"{self.name} norms"
        sums = ops.reduce_tensors(mine, op=ops.Sum, name=name, process_set=self.process_set)
        return dict(zip(indices, sums, strict=True))

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        held = [variable for variable in variables if self._holds(variable)]
        type(self.optimizer)._apply_weight_decay(self.optimizer, held)

    def _update(self, gradients: Sequence[Any], variables: Sequence[Any], rate: Any) -> None:
        held = [i for i, variable in enumerate(variables) if self._holds(variable)]
        type(self.optimizer)._backend_update_step(
            self.optimizer, [gradients[i] for i in held], [variables[i] for i in held], rate
        )
        if (step := self.step) and step.travels:  # not while a model is built
            self._share(variables)
            step.shared = True

    def _update_averages(self, variables: Sequence[Any]) -> None:
        update = type(self.optimizer)._update_model_variables_moving_average
        with self._held_averages(variables) as held:
            update(self.optimizer, held)

    def _use_averages(self, variables: Sequence[Any]) -> None:
        use = type(self.optimizer)._overwrite_model_variables_with_average_value
        with self._held_averages(variables) as held:
            use(self.optimizer, held)
        step = self.step
        exchanges = step is not None and step.travels
        if exchanges or not tf.inside_function():  # also Keras's call at the end of fit
            self._share(variables)

    @contextlib.contextmanager
    def _held_averages(self, variables: Sequence[Any]) -> Iterator[list[Any]]:
        optimizer = self.optimizer
        averages = optimizer._model_variables_moving_average
        own = map(shards.variable_id, optimizer._trainable_variables)
        of_own = dict(zip(own, averages, strict=True))
        # At the end of fit, Keras passes the variables of a second optimizer, too.
        pairs = [
            (variable, of_own[number])
            for variable in variables
            if (number := shards.variable_id(variable)) in of_own and self._holds(variable)
        ]
        held, of_held = zip(*pairs, strict=True) if pairs else ((), ())
        # Keras shall update the held ones alone.
        with replaced(optimizer, "_model_variables_moving_average", list(of_held)):
            yield list(held)

    def _share(self, variables: Sequence[Any]) -> None:
        """Give all ranks the values of the variables that each updates, last variables first."""
        rank = self.process_set.rank()
        by_dtype: dict[Any, list[Any]] = collections.defaultdict(list)
        for variable in reversed(variables):
            if self._owner_of(variable) is not None:
                by_dtype[tf.as_dtype(variable.dtype).base_dtype].append(variable)
        after: list[Any] = []
        for dtype, of_dtype in by_dtype.items():
            packed = self._pack(of_dtype, dtype)
            mine = {
                i: tf.convert_to_tensor(variable)
                for i, variable in enumerate(of_dtype)
                if self._holds(variable) and i not in packed.alone
            }
            found, after = packed.share(mine, after)
            for i in packed.alone:
                owner = self.owners[shards.variable_id(of_dtype[i])]
                with tf.control_dependencies(after):
                    found[i] = ops.broadcast(
                        tf.convert_to_tensor(of_dtype[i]),
                        self.process_set.ranks[owner],
                        name=f"{self.name} value of owner {i}, {dtype.name}",
                        process_set=self.process_set,
                    )
                after = [found[i]]
                if owner == rank:
                    del found[i]
            for i, value in found.items():
                shards.inner_variable(of_dtype[i]).assign(value)

    def _pack(self, variables: Sequence[Any], dtype: Any) -> Packed:
        key = dtype, *map(shards.variable_id, variables)
        if key not in self._packed:
            self._packed[key] = Packed(self, variables, dtype)
        return self._packed[key]


def save_or_load(method: Callable[..., None], scaled: Any, store: Any) -> None:
    """Replace how a LossScaleOptimizer writes and reads files, with the optimizer in it."""
    # On the class, because compile creates such optimizers.
    own = {"save_own_variables": _save, "load_own_variables": _load}[method.__name__]
    (own if model_ranks.is_sharded(scaled) else method)(scaled, store)


def _save(optimizer: Any, store: Any) -> None:
    """Replace ``save_own_variables``."""
    for i, variable in enumerate(optimizer.variables):
        store[str(i)] = shards.stored(variable)


def _load(optimizer: Any, store: Any) -> None:
    """Replace ``load_own_variables``: the file has the whole state."""
    if len(store.keys()) != len(optimizer.variables):  # as Keras: it is another optimizer's
        warnings.warn(
            f"Skipping variable loading for optimizer '{optimizer.name}', because it has "
            f"{len(optimizer.variables)} variables whereas the saved optimizer has "
            f"{len(store.keys())} variables.",
            stacklevel=2,
        )
        return
    for i, variable in enumerate(optimizer.variables):
        shards.assign(variable, np.asarray(store[str(i)]))
