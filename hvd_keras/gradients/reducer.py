"""One step's gradients, from Keras's optimizer to the allreduce and back.

    optimizer.apply = KerasReducer._apply
      begin     agrees with the other ranks on which gradients there are
      finish    exchanges them, bucket by bucket: one allreduce each
    Keras's own apply

Every ``DistributedOptimizer`` and ``DistributedGradientTape`` has a ``GradientReducer``.
"""

import collections
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvd_keras import ops
from hvd_keras.gradients import (
    agreement,
    clipping,
    comparison,
    joining,
    missing_calls,
    model_ranks,
    origin,
    shards,
)
from hvd_keras.gradients.specs import (
    Named,
    VariableSpec,
    check_described,
    check_specs,
    describe_optimizer,
    in_buckets,
    spec_of,
)
from hvd_keras.runtime import agree, log, rank_info
from hvd_keras.runtime.keras import keras, overrides, replaced, require


class GradientReducer(Named):
    """Reduces this rank's gradients with those of the other ranks.

    Args:
        name: identifies the reducer on all ranks. Default: its number, see ``specs.Named``.
        options, groups: how gradients are exchanged, and which of them share a request.
    """

    is_sharded = False  # each variable has one rank that updates it (zero.ShardedReducer)
    optimizer: Any = None  # whose gradients they are, unless it is a tape that asks
    rounds: Any = None  # with sync_every: of more ranks than average their gradients in each step

    def __init__(
        self, name: str | None, options: agreement.ExchangeOptions, groups: agreement.Groups
    ) -> None:
        super().__init__(name, options.process_set)
        self.options, self.op = options, options.op
        self.groups = groups
        self.local: dict[int, Any] = {}  # this rank's own variables, by ``shards.variable_id``
        self.averages_rows = True  # see model_ranks
        self._plans: dict[Any, Plan] = {}  # by what _plan has compared: one per trace, or kinds
        # The lists of variables that the ranks have compared.
        self._agreed: dict[Any, tuple[VariableSpec, ...]] = {}
        self._compared = shards.VariableSet()  # those whose values were compared
        self._steps: Any = None  # counts those of a graph
        self._factors: tuple[float, ...] = origin.UNCHANGED  # of the step
        self.has_local = False  # any rank has local variables: all must clip alike

    def register_local(self, variable: Any) -> None:
        """Make a variable belong to this rank: no exchange of its gradient, no broadcast."""
        self.local[shards.variable_id(variable)] = variable
        if (self.rounds or self).process_set.size() > 1:
            model_ranks.local_variables.add(variable)

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], local: Sequence[Any] = ()
    ) -> list[Any]:
        """Return the gradients over all ranks, in the order given; None if no rank has one.

        Args:
            gradients: one per variable: a tensor, ``tf.IndexedSlices`` or None.
            variables: the variables (or other sources) that they belong to.
            local: variables among these that belong to this rank, besides the registered ones.

        Raises:
            ValueError: (on every rank) the ranks' variables differ.
        """
        reduced: list[Any] = self.begin(gradients, variables, local).finish()
        return reduced

    def begin(
        self, gradients: Sequence[Any], variables: Sequence[Any], local: Sequence[Any] = ()
    ) -> "Step":
        """Agree with the other ranks on how the gradients of this step are exchanged."""
        gradients = list(gradients)
        if agree.is_building.get():
            return Step(self, None, gradients, variables)
        if rank_info.size() > 1:
            missing_calls.mark_reduced(variables, self.optimizer is None, self.process_set.size())
        if self.process_set.size() == 1 or not gradients:
            return Step(self, None, self.options.densified(gradients), variables)
        # From here on, all ranks of the set take part.
        agreement.refuse_strategies()
        divided = shards.sharded_indices(variables, self.name, self.options.op, self.process_set)
        are_reduced = self.optimizer is not None and origin.were_exchanged(
            gradients, variables, self.name, self.process_set
        )
        if self.options.op is not ops.Average:
            missing_calls.unaveraged.clear()
        elif not are_reduced:
            missing_calls.check_average()
        if are_reduced and not self.is_sharded:
            return Step(self, None, gradients, variables, divided=divided)
        if tf.inside_function():
            if self._steps is None:
                with tf.init_scope():
                    self._steps = agreement.handle_of(tf.constant(0, tf.int64))
            agreement.check_step(self.name, self._steps, self.process_set)
        gradients = self.options.densified(gradients)
        for i in () if are_reduced else divided:
            gradients[i] = self.options.scale_local(gradients[i], is_divided=True)
            shards.note_gradient(gradients[i], variables[i])
        # A divided table's gradient is the sum over all ranks already: its lookup has moved it.
        local_ids = {*self.local, *map(shards.variable_id, local)}
        shared = [
            i
            for i, variable in enumerate(variables)
            if i not in divided and shards.variable_id(variable) not in local_ids
        ]
        plan = self._plan([variables[i] for i in shared], [gradients[i] for i in shared])
        if not missing_calls.fit_has(variables):  # it compares all itself
            self._compare([variables[i] for i in shared if hasattr(variables[i], "assign")])
        # A rank that lacks a gradient, such as that of an unused branch, sends zeros.
        for i, kind, spec in zip(shared, plan.kinds, plan.specs, strict=True):
            gradients[i] = agreement.completed(gradients[i], kind, spec)
        overwritten = agreement.overwrite(gradients, variables, self.name, self.process_set)
        step = Step(self, plan, gradients, variables, divided, shared, overwritten)
        step.exchanges = not are_reduced
        return step

    def state(self) -> list[Any]:
        """The variables of the optimizer, if there is one, that all ranks have in common."""
        return []

    def exchange(self, plan: "Plan", gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Exchange the gradients that travel, in the order of the plan."""
        return plan.exchange(gradients, self.options)

    def _compare(self, variables: list[Any]) -> None:
        """Compare the weights that a custom loop trains, now and then."""
        if not variables:
            return
        # They live as long as the variables do.
        known = vars(shards.inner_variable(variables[0])).setdefault("_hvd_comparisons", {})
        key = self.process_set, self.name, *map(shards.variable_id, variables)
        if key not in known:
            known[key] = comparison.Comparison(variables, self.process_set, self.name)
        known[key].step()

    def _plan(self, variables: list[Any], gradients: list[Any]) -> "Plan":
        mine = tuple(spec_of(v) for v in variables)
        specs = self._agreed.get(mine)
        # Another model's may look the same.
        new = [v for v in variables if hasattr(v, "assign") and v not in self._compared]
        if specs is None or new:  # some small allgathers, once for each list of variables
            specs = check_specs(self.name, mine, self.process_set)
            described = {} if self.optimizer is None else describe_optimizer(self.optimizer)
            check_described(f"{self.name}.options", described, self.process_set)
            of_ranks = agree.gather_json(f"{self.name}.local", bool(self.local), self.process_set)
            self.has_local = any(of_ranks)
            requests = len(Plan(self.name, specs, ()).buckets(gradients))
            # Without values yet, a second trace of the function compares again.
            how = requests, self.process_set
            are_known = missing_calls.check_weights(self.name, "weights", new, *how)
            if not self._agreed and not missing_calls.fit_has(variables):
                state = "learning rates, or other states of optimizers"
                given = self.name, state, self.state(), *how, variables
                are_known &= missing_calls.check_weights(*given)
            if are_known:
                self._agreed[mine] = specs
                self._compared.add(*new)
        kinds = agreement.kinds_of(gradients)
        indices = agreement.group_indices(self.groups, variables)
        if tf.executing_eagerly():
            # Which gradients exist may differ in each step and on each rank: an allgather of about
            # one byte per variable.
            own, self._factors = self._factors, origin.UNCHANGED
            kinds, every = agreement.agree_on_kinds(self.name, kinds, self.process_set, own)
            origin.compare(every, self.process_set)
        # In a graph this is fixed now. A rank that traces the same function again does not ask the
        # others, which may not be tracing.
        key = tf.executing_eagerly(), specs, kinds, tuple(map(tuple, indices))
        if key not in self._plans:
            agreed = kinds  # of all ranks in eager mode
            if not tf.executing_eagerly():
                agreed, _ = agreement.agree_on_kinds(self.name, kinds, self.process_set, ())
            if self.options.op is ops.Adasum and "sparse" in agreed:
                raise ValueError(
                    f"{self.name}: op=hvd.Adasum needs dense gradients, and that of "
                    f"{specs[agreed.index('sparse')]} is sparse. Give sparse_as_dense=True, too."
                )
            self._plans[key] = Plan(self.name, specs, agreed, indices)
        return self._plans[key]


class Step:
    """One step's gradients, between the agreement and the exchange."""

    def __init__(
        self,
        reducer: GradientReducer,
        plan: "Plan | None",
        gradients: list[Any],
        variables: Sequence[Any],
        divided: Collection[int] = (),
        shared: Sequence[int] = (),
        overwritten: Sequence[int] = (),
    ) -> None:
        self.gradients = gradients  # in the order given; those that travel not exchanged yet
        self._reducer = reducer
        self._plan = plan
        # Three numberings: of what was given (i), of what the optimizer updates (a place), and of
        # what travels (a position in the plan).
        self._travelling = [variables[i] for i in shared]
        self._position = {i: p for p, i in enumerate(shared)}  # in the plan
        # What an optimizer sees of them: without Nones, and without what it overwrites.
        self._updated = [
            i for i, g in enumerate(gradients) if g is not None and i not in overwritten
        ]
        self.updated = [variables[i] for i in self._updated]
        self.travels = plan is not None  # there are other ranks
        self.exchanges = self.travels  # gradients, and not only the values that they give
        self.exchanged = not self.travels
        # Whether all ranks have the new values; otherwise their owners give them later.
        self.shared = not (self.travels and reducer.is_sharded)
        # Places of divided tables, and of this rank's own variables; None: no rank has such.
        self.divided = {place for place, i in enumerate(self._updated) if i in divided}
        self.local: set[int] | None = None
        if self.travels and reducer.has_local:
            kept = enumerate(self._updated)
            self.local = {k for k, i in kept if i not in divided and i not in self._position}

    def finish(self) -> list[Any]:
        """All gradients, exchanged, in the order given."""
        reduced = self.exchange([self.gradients[i] for i in self._updated])
        for i, gradient in zip(self._updated, reduced, strict=True):
            self.gradients[i] = gradient
        return self.gradients

    def exchange(self, gradients: Sequence[Any]) -> list[Any]:
        """Exchange what the optimizer has made of the gradients of ``updated``, in their order."""
        self.exchanged, gradients = True, list(gradients)
        if self._plan is None or not self.exchanges:
            return gradients
        positions = [self._position.get(i) for i in self._updated]  # None: it stays on this rank
        # In the order of the plan; None where no rank has a gradient, or Keras does not update.
        travelling: list[Any] = [None] * len(self._plan.specs)
        for position, gradient in zip(positions, gradients, strict=True):
            if position is not None:
                travelling[position] = gradient
        travelling = self._reducer.exchange(self._plan, travelling, self._travelling)
        for place, position in enumerate(positions):
            if position is not None:
                gradients[place] = travelling[position]
            elif place not in self.divided:
                gradients[place] = self._reducer.options.scale_local(gradients[place])
        return gradients


class Plan:
    """How the gradients of a list of variables are exchanged, the same on all ranks.

    A gradient that is dense on any rank is dense on all. It is zero on ranks that lack it, and
    stays None if no rank has it.
    """

    def __init__(
        self,
        name: str,
        specs: Sequence[VariableSpec],
        kinds: Sequence[agreement.Kind | None],
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        self.name = name
        self.specs = tuple(specs)
        self.kinds = tuple(kinds)
        self.groups = [list(group) for group in groups]
        self._buckets: dict[tuple[bool, ...], list[list[int]]] = {}  # by which gradients exist
        counts = collections.Counter(map(str, self.kinds))
        log.logger.debug("%s: gradients of %d variables: %s", name, len(self.specs), dict(counts))

    def exchange(
        self,
        gradients: Sequence[Any],
        options: agreement.ExchangeOptions,
        after: Sequence[Any] = (),
    ) -> list[Any]:
        """Return the gradients over all ranks, in the order given; None stays None.

        Last variables first, because backpropagation produces their gradients first. A bucket
        waits for the previous one, so that all ranks submit them in the same order, even inside
        branches and loops, where TensorFlow keeps none. The first one waits for ``after``.

        On a GPU only the end of all buckets holds up later work: backpropagation goes on beside
        them.
        """
        results = list(gradients)
        overlaps = options.can_overlap()
        begun: list[int] = []
        previous = list(after)  # what the next bucket waits for
        for bucket in self.buckets(gradients):
            name = f"{self.name} gradients {bucket[-1]}-{bucket[0]}, {self.specs[bucket[0]].path}"
            with tf.control_dependencies(previous):
                reduced = ops.reduce_tensors(
                    [gradients[i] for i in bucket],
                    **options.of_dense(),
                    device_sparse=options.device_sparse,
                    process_set=options.process_set,
                    name=name,
                    waits=not overlaps,
                )
            begun += [i for i in bucket if not isinstance(gradients[i], tf.IndexedSlices)]
            for i, gradient in zip(bucket, reduced, strict=True):
                results[i] = gradient
            last = reduced[-1]
            previous = [last.values if isinstance(last, tf.IndexedSlices) else last]
        if overlaps and begun:
            ready = ops.wait_for([results[i] for i in begun], options.process_set)
            for i, gradient in zip(begun, ready, strict=True):
                results[i] = gradient
        return results

    def buckets(self, gradients: Sequence[Any]) -> list[list[int]]:
        """Return, for each request, the indices of its gradients."""
        present = tuple(gradient is not None for gradient in gradients)
        if present not in self._buckets:  # an eager loop asks in each step
            # The user's groups first, as given; then the rest by size.
            chosen = [[i for i in group if present[i]] for group in self.groups]
            grouped = {i for group in self.groups for i in group}
            indices = reversed(range(len(self.specs)))
            rest = in_buckets(
                (i for i in indices if present[i] and i not in grouped),
                lambda i: self.specs[i].bytes,
            )
            self._buckets[present] = [*filter(None, chosen), *rest]
        return self._buckets[present]


class KerasReducer(GradientReducer):
    """Reduces the gradients of a Keras 3 optimizer; an attribute of it, so its class stays.

    Gradients are exchanged in ``apply``, before Keras sees them. If the optimizer accumulates local
    steps, they are exchanged once per update instead: in ``_clip_gradients``, which Keras calls
    after accumulation and before anything uses the gradients.

    Every rank updates every variable; ``zero.ShardedReducer`` overrides ``hooks``, ``begin``,
    ``exchange`` and ``clip``, so that each is updated by one.

    Args:
        optimizer: the optimizer whose methods are replaced.
        outermost: the same, or the LossScaleOptimizer around it.
        name, options, groups: as in ``GradientReducer``.
        local_sum: the factor for Keras's mean over local steps.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        outermost: keras.optimizers.Optimizer,
        name: str | None,
        options: agreement.ExchangeOptions,
        groups: agreement.Groups,
        local_sum: int,
    ) -> None:
        super().__init__(name, options, groups)
        self.optimizer = optimizer
        self._local_sum = local_sum
        self._is_scaled = outermost is not optimizer  # by a LossScaleOptimizer
        self.step: Step | None = None  # the update in progress
        self._updates = 0  # that have begun
        optimizer._hvd_reducer = self  # found by model_ranks, and by is_distributed
        model_ranks.distributed.add(optimizer)
        if optimizer.gradient_accumulation_steps and self.process_set.size() > 1:
            joining.accumulating[optimizer] = 0
        outermost.register_local_var = self.register_local
        require(optimizer, "_trainable_variables", "to know what apply updates")
        for method, replacement in self.hooks().items():
            require(optimizer, method, "to exchange, clip and apply gradients")
            setattr(optimizer, method, replacement)

    def hooks(self) -> dict[str, Callable[..., Any]]:
        """Return what Keras's methods become on the optimizer; ``self.step`` joins them."""
        return {
            "apply": self._apply,
            "apply_gradients": self._apply_gradients,
            "_clip_gradients": self._clip_gradients,
        }

    @contextlib.contextmanager
    def update(self, grads: Sequence[Any], trainable_variables: Any) -> Iterator[Step]:
        """The step of an update, by the arguments of ``apply``."""
        # A LossScaleOptimizer around this optimizer, if any, begins it.
        if self.step is not None:
            yield self.step
            return
        given = trainable_variables
        variables = list(self.optimizer._trainable_variables if given is None else given)
        self._updates += 1
        if self.rounds is not None:
            self.rounds.check_step(grads)
        is_together = self.process_set.size() > 1 and not agree.is_building.get()
        # Eager code cannot tell a scale that changes, which a LossScaleOptimizer divides by, from
        # clipping.
        can_tell = not (self._is_scaled and tf.executing_eagerly())
        if is_together and self.averages_rows and can_tell:
            shared = []  # which only a graph can tell of
            if self.rounds is None and not tf.executing_eagerly():
                shared = shards.without(variables)
                shared = [v for v in shared if shards.variable_id(v) not in self.local]
            self._factors = origin.check(self.name, grads, variables, self.process_set, shared)
        with missing_calls.exchange_by("optimizer", variables):
            step = self.begin(grads, variables)
            with replaced(self, "step", step):
                yield step

    def state(self) -> list[Any]:
        weights = self.optimizer._trainable_variables
        known = model_ranks.without_local([*weights, *self.optimizer.variables])
        return [variable for variable in known if not any(variable is w for w in weights)]

    def _apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], **kwargs: Any) -> Any:
        """Replace ``Optimizer.apply_gradients``, which calls ``apply``."""
        # An optimizer of the user's may update without apply: then nothing was exchanged.
        pairs, before = list(grads_and_vars), self._updates
        result = type(self.optimizer).apply_gradients(self.optimizer, pairs, **kwargs)
        if pairs and self._updates == before and self.process_set.size() > 1:
            raise self._not_exchanged("its apply_gradients does not call apply")
        return result

    def _apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Replace ``Optimizer.apply``, which every step calls."""
        keras_apply = type(self.optimizer).apply
        grads = list(grads)
        if self.process_set.size() == 1:
            grads = self.options.densified(grads)
        with self.update(grads, trainable_variables) as step:
            if not self.optimizer.gradient_accumulation_steps:
                # A LossScaleOptimizer has exchanged them, and divided the result by its scale.
                reduced = grads if step.exchanged else step.finish()
                keras_apply(self.optimizer, reduced, trainable_variables)
                if not step.shared:
                    raise self._not_exchanged("it never calls _backend_update_step")
                return
            # Keras adds them up; after the last local step it calls _clip_gradients.
            if overrides(self.optimizer, "apply", of=keras.optimizers.Optimizer):
                step.finish()  # an apply of the user's may clip each
                step.exchanges = False
            keras_apply(self.optimizer, step.gradients, trainable_variables)
            # In eager execution Keras accumulates in one step and exchanges in another.
            if not step.exchanged and not tf.executing_eagerly():
                raise self._not_exchanged("it never calls _clip_gradients")

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        """Replace ``_clip_gradients``: called once per update, with the accumulated gradients."""
        step = self.step
        if self.optimizer.gradient_accumulation_steps:
            if step is None:
                raise self._not_exchanged("it calls _clip_gradients outside of apply")
            grads = step.exchange(grads)
            if self._local_sum > 1:  # Keras has taken the mean of the local steps
                factor = self._local_sum
                grads = [g if g is None else g * tf.constant(factor, g.dtype) for g in grads]
        if step is None:
            return type(self.optimizer)._clip_gradients(self.optimizer, grads)
        return self.clip(grads, step)

    def clip(self, gradients: Sequence[Any], step: Step) -> Any:
        """Clip exchanged gradients, in the order of ``step.updated``, as one process does."""
        if not step.divided and step.local is None:  # this rank has all of them
            return type(self.optimizer)._clip_gradients(self.optimizer, gradients)
        return clipping.clip(self, gradients, step.divided, step.local)

    def _not_exchanged(self, reason: str) -> RuntimeError:
        return RuntimeError(
            f"hvd.DistributedOptimizer: the gradients of this {type(self.optimizer).__name__} were "
            f"not exchanged, because {reason} with Keras {keras.__version__}. Exchange them with "
            "hvd.DistributedGradientTape and leave this optimizer as it is."
        )
