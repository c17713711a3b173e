"""Who trains a model together: the one object that optimizers, tapes, callbacks and patches ask.

A ``GradientReducer`` knows the process set, the variables that belong to this rank alone, and how
the gradients travel. It lives in the optimizer as ``_hvd_reducer``.
"""

import collections
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvd_keras import ops
from hvd_keras._keras import is_legacy, keras
from hvd_keras.process_sets import ProcessSet
from hvd_keras.training import building, exchange, forgotten

# By process set: the ranks of one set make the same optimizers, those of another may make others.
_numbers: collections.defaultdict[int, Iterator[int]] = collections.defaultdict(itertools.count)


class GradientReducer:
    """Makes the gradients of all ranks from those of this rank.

    Args:
        name: identifies it on all ranks. Default: its number among those of the process set.
        options: how gradients travel, and between which ranks.
        groups: which gradients travel together.
    """

    def __init__(
        self, name: str | None, options: exchange.ExchangeOptions, groups: exchange.Groups
    ) -> None:
        self.name = name or f"optimizer {next(_numbers[options.process_set.id()])}"
        self.options = options
        self.groups = groups
        self._local: dict[int, Any] = {}
        self._plans: dict[Any, exchange.Plan] = {}
        # The lists of variables that the ranks have compared.
        self._known: set[tuple[exchange.VariableSpec, ...]] = set()

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that train together."""
        return self.options.process_set

    def register_local(self, variable: Any) -> None:
        """Lets a variable belong to this rank: no exchange of its gradient, no broadcast."""
        self._local[exchange.variable_id(variable)] = variable

    def is_local(self, variable: Any) -> bool:
        """Whether a model's or an optimizer's variable belongs to this rank alone.

        An optimizer's variable (a momentum, say) belongs to the model's variable after whose path
        Keras has named it.
        """
        if exchange.variable_id(variable) in self._local:
            return True
        name = getattr(variable, "name", "")
        for local in self._local.values():
            path = getattr(local, "path", None)
            if path is not None and name.startswith(path.replace("/", "_") + "_"):
                return tuple(local.shape) == tuple(variable.shape)
            if path is None and f"/{local.name.partition(':')[0]}" in name:  # tf_keras
                return tuple(local.shape) == tuple(variable.shape)
        return False

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], local: Sequence[Any] = ()
    ) -> list[Any]:
        """The gradients over all ranks, in the order given; None where no rank has one.

        Args:
            gradients: one per variable: a tensor, ``tf.IndexedSlices`` or None.
            variables: the variables (or other sources) that they belong to.
            local: those of them that belong to this rank, besides the registered ones.

        Raises:
            ValueError: the ranks' variables differ; on every rank.
        """
        step: Step = self.begin(gradients, variables, local)
        reduced: list[Any] = step.finish()
        return reduced

    # A tf.function of the script's would rewrite this code and what it calls, and rewrite it wrong.
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def begin(
        self, gradients: Sequence[Any], variables: Sequence[Any], local: Sequence[Any] = ()
    ) -> "Step":
        """Agrees with the other ranks how the gradients of this step travel.

        Raises:
            ValueError: the ranks' variables differ; on every rank.
        """
        gradients = list(gradients)
        if self.process_set.size() == 1 or not gradients or building.is_building():
            return Step(self, None, gradients, [], [])
        forgotten.mark_reduced(variables)
        gradients = self.options.densified(gradients)
        local_ids = {*self._local, *map(exchange.variable_id, local)}
        shared = [i for i, v in enumerate(variables) if exchange.variable_id(v) not in local_ids]
        plan = self._plan([variables[i] for i in shared], [gradients[i] for i in shared])
        for i, gradient in zip(shared, plan.complete([gradients[i] for i in shared]), strict=True):
            gradients[i] = gradient
        overwritten = [
            i
            for i, variable in enumerate(variables)
            if gradients[i] is not None and getattr(variable, "overwrite_with_gradient", False)
        ]
        if overwritten:
            # Such "gradients" (float8 scales) are new values; Keras takes the largest of several.
            largest = ops.grouped_allreduce(
                [gradients[i] for i in overwritten],
                op=ops.Max,
                name=f"{self.name} overwritten",
                process_set=self.process_set,
            )
            for i, value in zip(overwritten, largest, strict=True):
                gradients[i] = value
        return Step(self, plan, gradients, shared, overwritten)

    def _plan(self, variables: list[Any], gradients: list[Any]) -> exchange.Plan:
        specs = tuple(exchange.spec_of(v) for v in variables)
        if specs not in self._known:
            exchange.check_specs(self.name, specs, self.process_set)
            requests = len(exchange.Plan(self.name, specs, ()).buckets(gradients))
            if forgotten.check_weights(self.name, variables, requests, self.process_set):
                self._known.add(specs)
        kinds = exchange.kinds_of(gradients)
        indices = exchange.group_indices(self.groups, variables)
        if tf.executing_eagerly():
            # Which gradients exist may differ in each step and on each rank.
            kinds = exchange.agree_on_kinds(self.name, kinds, self.process_set)
        # In a graph it is settled now. A rank that traces the same once more asks nobody: the
        # others may not be tracing.
        key = tf.executing_eagerly(), specs, kinds, tuple(map(tuple, indices))
        if key not in self._plans:
            agreed = kinds
            if not tf.executing_eagerly():
                agreed = exchange.agree_on_kinds(self.name, kinds, self.process_set)
            if self.options.op is ops.Adasum and "sparse" in agreed:
                raise ValueError(
                    f"{self.name}: op=hvd.Adasum needs dense gradients, and that of "
                    f"{specs[agreed.index('sparse')]} is sparse. Give sparse_as_dense=True, too."
                )
            self._plans[key] = exchange.Plan(self.name, specs, agreed, indices)
        return self._plans[key]


class Step:
    """One step's gradients, between the agreement and the exchange.

    Attributes:
        gradients: in the order given; completed, those that travel not exchanged yet.
        exchanged: whether ``exchange`` was called.
    """

    def __init__(
        self,
        reducer: GradientReducer,
        plan: exchange.Plan | None,
        gradients: list[Any],
        shared: list[int],
        overwritten: list[int],
    ) -> None:
        self.gradients = gradients
        self._reducer = reducer
        self._plan = plan
        self._position = {i: p for p, i in enumerate(shared)}  # in the plan
        # What an optimizer sees of them: without Nones, and without what it overwrites.
        self._updated = [
            i for i, g in enumerate(gradients) if g is not None and i not in overwritten
        ]
        self.exchanged = plan is None

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def finish(self) -> list[Any]:
        """All gradients, exchanged, in the order given."""
        reduced = self.exchange([self.gradients[i] for i in self._updated])
        for i, gradient in zip(self._updated, reduced, strict=True):
            self.gradients[i] = gradient
        return self.gradients

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def exchange(self, gradients: Sequence[Any]) -> list[Any]:
        """Exchanges what the optimizer has made of the gradients that it updates with.

        Args:
            gradients: of the variables that have one, in their order.
        """
        self.exchanged = True
        if self._plan is None:
            return list(gradients)
        options = self._reducer.options
        places = [self._position.get(i) for i in self._updated]
        travelling: list[Any] = [None] * len(self._plan.specs)
        for place, gradient in zip(places, gradients, strict=True):
            if place is not None:
                travelling[place] = gradient
        travelling = self._plan.exchange(travelling, options)
        return [
            options.scale_local(gradient) if place is None else travelling[place]
            for place, gradient in zip(places, gradients, strict=True)
        ]


def of_optimizer(optimizer: Any) -> GradientReducer | None:
    """The reducer of an optimizer that is distributed, also inside a LossScaleOptimizer."""
    optimizer = innermost(optimizer)
    return getattr(optimizer, "_hvd_reducer", None)


def innermost(optimizer: Any) -> Any:
    """The optimizer inside a LossScaleOptimizer; another one itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def optimizers_of(model: Any) -> list[Any]:
    """The optimizers of a model: that of ``compile``, and those in attributes, as GANs have."""
    values: list[Any] = [getattr(model, "optimizer", None)]
    for value in list(vars(model).values()):
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, (list, tuple)):
            values += value
        else:
            values.append(value)
    classes: tuple[type, ...] = (keras.optimizers.Optimizer, tf.compat.v1.train.Optimizer)
    if is_legacy:
        classes += (keras.optimizers.legacy.Optimizer,)
    found = {id(value): value for value in values if isinstance(value, classes)}
    return list(found.values())


def reducers_of(model: Any) -> list[GradientReducer]:
    """Those of a model's distributed optimizers."""
    reducers = map(of_optimizer, optimizers_of(model))
    return list({id(r): r for r in reducers if r is not None}.values())


_together: weakref.WeakKeyDictionary[Any, ProcessSet] = weakref.WeakKeyDictionary()


def mark_together(model: Any, process_set: ProcessSet) -> None:
    """Notes that a callback of hvd_keras accompanies this model's training on these ranks."""
    _together[model] = process_set


def process_set_of(model: Any) -> ProcessSet | None:
    """The ranks that train a model together; None if this rank trains it alone.

    They are those of its distributed optimizers. A model without one, whose ``train_step`` uses a
    ``hvd.DistributedGradientTape``, is known by a callback of hvd_keras in ``fit``.

    Raises:
        ValueError: its optimizers have different process sets.
    """
    sets = {r.process_set.id(): r.process_set for r in reducers_of(model)}
    if len(sets) > 1:
        raise ValueError(
            f"the optimizers of model {model.name!r} have different process sets: "
            f"{', '.join(map(str, sets.values()))}. Give them the same."
        )
    if sets:
        return next(iter(sets.values()))
    return _together.get(model)


def without_local(model: Any, variables: Iterable[Any]) -> list[Any]:
    """The variables that all ranks have in common."""
    reducers = reducers_of(model)
    return [v for v in variables if not any(reducer.is_local(v) for reducer in reducers)]
