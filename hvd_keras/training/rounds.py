"""Trains on slow networks: the ranks average weights after many updates, not gradients in each.

In a round, each rank makes ``every`` updates of its own, from weights that all ranks have in
common. The mean of the ranks' differences from these is the gradient with which an outer optimizer
makes the next common weights (DiLoCo; Douillard et al., 2023, https://arxiv.org/abs/2311.08105).
Without one, these are the mean of the ranks' weights (LocalSGD; Stich, 2018,
https://arxiv.org/abs/1805.09767).
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_keras.gradients import missing_calls, model_ranks, shards, specs
from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import innermost, keras
from hvd_keras.runtime.process_sets import ProcessSet
from hvd_keras.training import fit_state, variables

if TYPE_CHECKING:
    from hvd_keras.training.fit_state import Fit

# Their next update computes the weights from slots, so it would undo that of an outer optimizer.
_UNSUITABLE = {"Ftrl", "ScheduleFreeAdamW"}


def check_suitable(optimizer: Any) -> None:
    """Raise ValueError if the ranks cannot average the weights that an optimizer updates."""
    for one in (optimizer, *getattr(optimizer, "optimizers", ())):  # MultiOptimizer has several
        if unsuitable := _UNSUITABLE & {cls.__name__ for cls in type(one).__mro__}:
            raise ValueError(
                f"hvd.DistributedOptimizer: sync_every: {unsuitable.pop()} computes weights from "
                "its slots, which would undo a sync. Use another optimizer."
            )


class Rounds:
    """The rounds of one optimizer, in the attribute ``rounds`` of its reducer.

    Args:
        optimizer: that of each rank.
        name: identifies it on all ranks.
        every: the updates of a round.
        outer: the optimizer of the common weights, not built yet; None: their mean.
        process_set: the ranks that train the model.
        inner: which of them average gradients in each step; None: no others.
        wire: the widest floating-point dtype that is sent.
    """

    def __init__(
        self,
        optimizer: Any,
        name: str,
        every: int,
        outer: Any,
        process_set: ProcessSet,
        inner: Any,
        wire: str,
    ) -> None:
        self.optimizer, self.name, self.process_set = optimizer, name, process_set
        #: Each of them takes as many batches as the optimizer accumulates.
        self.batches = every * (optimizer.gradient_accumulation_steps or 1)
        self.outer = keras.optimizers.SGD(1.0) if outer is None else outer
        missing_calls.mark_alone(self.outer)  # all ranks have its gradients
        self.weights: list[Any] = []
        self.common: list[Any] = []  # what they were when the round began
        self.alone = inner is None  # each rank trains alone within a round
        self._wire = wire

    def check_step(self, gradients: Sequence[Any]) -> None:
        """Raise if nothing would average the weights that a step is about to change."""
        if agree.is_building.get():
            return
        fit = fit_state.current.get()
        if fit is None or self not in model_ranks.rounds_of(fit.model):
            raise RuntimeError(
                "hvd.DistributedOptimizer: sync_every needs the fit of a model that has this "
                f"{type(self.optimizer).__name__} in compile or in an attribute. In a custom loop, "
                "leave it out, or average the weights with hvd.allreduce."
            )
        if any(hasattr(gradient, "_hvd_reduced") for gradient in gradients):
            raise ValueError(
                "hvd.DistributedOptimizer: got sync_every, but this train_step exchanges gradients "
                "with hvd.DistributedGradientTape in each step. Use tf.GradientTape, or leave "
                "sync_every out."
            )

    def variables(self) -> list[Any]:
        """Return the common weights and the state of the outer optimizer.

        Raises:
            ValueError: the optimizer has no variables yet, or trains a divided table.
        """
        if not self.common:
            self._build()
        return [*self.common, *self.outer.variables]

    def _build(self) -> None:
        optimizer = self.optimizer
        if not optimizer.built:
            raise ValueError(
                f"sync_every: this {type(optimizer).__name__} has no variables before the first "
                "step of fit. Call its build(model.trainable_variables) before."
            )
        check_suitable(optimizer)
        for variable in optimizer._trainable_variables:
            if shards.of(variable) is not None:
                raise ValueError(
                    f"sync_every: {variable.path} is divided between the ranks, which exchange its "
                    "rows in each step. Use keras.layers.Embedding, or leave sync_every out."
                )
        self.weights = [
            variable
            for variable in model_ranks.without_local(optimizer._trainable_variables)
            if not getattr(variable, "overwrite_with_gradient", False)
        ]
        self.common = [
            keras.Variable(
                np.asarray(weight),
                trainable=False,
                dtype=weight.dtype,
                name=f"common_{weight.path.replace('/', '_')}",
            )
            for weight in self.weights
        ]
        self.outer.build(self.common)

    def described(self) -> dict[str, str]:
        """Describe what must be equal on all ranks."""
        found = specs.describe_optimizer(self.outer)
        found = {f"outer {key}": value for key, value in found.items()}
        rate = float(self.outer.learning_rate)
        return {"batches of a round": str(self.batches), "outer rate": str(rate), **found}

    def begin(self) -> None:
        """Take the weights, which are equal on all ranks now, for common ones."""
        for common, weight in zip(self.common, self.weights, strict=True):
            common.assign(weight)

    def end(self) -> None:
        """Give all ranks the next common weights."""
        common, means = iter(self.common), []
        for number, bucket in enumerate(specs.in_buckets(self.weights)):  # which keep their order
            mine = [np.asarray(next(common)) - np.asarray(weight) for weight in bucket]
            means += mean(mine, f"{self.name} weights {number}", self.process_set, self._wire)
        self.outer.apply(list(map(keras.ops.convert_to_tensor, means)))
        for weight, value in zip(self.weights, self.common, strict=True):
            weight.assign(value)


def mean(arrays: list[Any], name: str, process_set: ProcessSet, wire: str = "float64") -> list[Any]:
    """Return the mean of each array over the ranks."""
    call = {"reduction": "Average", "wire": wire, "process_set": process_set.id()}
    return agree.run("allreduce", arrays, name=name, **call)


class Sync(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends the rounds of a model in ``fit``, before all other callbacks see its weights.

    The last round of an epoch ends with it. All ranks come here for each round; one whose callback
    has stopped it, such as TerminateOnNaN, then lets the others stop.
    """

    _supports_tf_logs = True

    def __init__(self, fit: "Fit") -> None:
        super().__init__()
        self._fit, self._process_set = fit, fit.process_set
        self._rounds = model_ranks.rounds_of(fit.model)
        self._every = self._rounds[0].batches
        self._batches = 0  # of this epoch
        self._ended = True  # the rounds of this epoch
        self._first = True  # of the epochs

    def check(self) -> None:
        """Raise ValueError, on every rank, if the model cannot be trained in rounds."""
        model, at_once = self._fit.model, int(self._fit.model.steps_per_execution or 1)
        for layer in model._flatten_layers():
            if self._rounds[0].alone and getattr(layer, "synchronized", False):
                raise ValueError(
                    f"sync_every: the layer {layer.name!r} has synchronized=True, for which the "
                    "ranks exchange moments in each step. Leave one of both out."
                )
        if {rounds.batches for rounds in self._rounds} != {self._every} or len(self._rounds) < len(
            model_ranks.reducers_of(model)
        ):
            raise ValueError(
                "sync_every: the optimizers of one model need the same sync_every and accumulation."
            )
        if self._every % at_once:
            raise ValueError(
                f"sync_every: a round has {self._every} batches, expected a multiple of "
                f"steps_per_execution={at_once}."
            )
        described = {
            f"{i + 1}. {key}": value
            for i, rounds in enumerate(self._rounds)
            for key, value in rounds.described().items()
        }
        specs.check_described("sync_every", described, self._process_set)

    def begin_epoch(self) -> None:
        """Begin a round, after all callbacks have begun the epoch; one that is restored goes on."""
        if self._first:
            self.check()
        for rounds in self._rounds:
            rounds.variables()
            if not (self._first and self._fit.restored):
                rounds.begin()
        self._first = self._ended = False
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        before = batch + 1 - int(self.model.steps_per_execution or 1)
        self._batches = batch + 1
        steps = self.params.get("steps")
        is_due = self._batches // self._every > before // self._every
        is_last = steps is not None and self._batches >= steps
        if is_due or is_last:
            self._end_round(is_due, is_last)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._end_epoch()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._end_epoch()

    def _end_epoch(self) -> None:
        if not self._ended:
            self._end_round(self._batches % self._every > 0, is_last=True)

    def _end_round(self, is_due: bool, is_last: bool) -> None:
        others = list(self._others())
        digests = [agree.digest(np.asarray(variable)) for variable in others]
        stops = bool(self.model.stop_training)
        mine = [self._batches, is_due or is_last, is_last, stops, digests]
        gathered = agree.gather_json("the end of a round", mine, self._process_set)
        batches, due, last, stopped, of_ranks = zip(*gathered, strict=True)
        if len({*zip(batches, last, strict=True)}) > 1 and not any(stopped):
            raise ValueError(
                "sync_every: the ranks' rounds end after different numbers of batches of an epoch: "
                f"{agree.by_rank(batches, self._process_set)}. Give each rank the same number: use "
                "hvd.data.shard, or steps_per_epoch."
            )
        self._ended = any(last)
        self.model.stop_training |= any(stopped)
        if not any(due):
            return
        for rounds in self._rounds:
            rounds.end()
        differing = [v for v, *d in zip(others, *of_ranks, strict=True) if len({*d}) > 1]
        for number, bucket in enumerate(specs.in_buckets(differing)):
            mine = list(map(np.asarray, bucket))
            means = mean(mine, f"statistics at the end of a round {number}", self._process_set)
            for variable, value in zip(bucket, means, strict=True):
                variable.assign(value)

    def _others(self) -> Iterator[Any]:
        """Yield what is averaged besides weights: moving statistics, moving averages of weights."""
        found = list(self.model.variables)
        for optimizer in map(innermost, model_ranks.optimizers_of(self.model)):
            found += getattr(optimizer, "_model_variables_moving_average", ())
        weights = {id(weight) for rounds in self._rounds for weight in rounds.weights}
        weights |= {id(variable) for variable in variables.of_each_rank(self.model)}
        for variable in model_ranks.without_local(found):
            if id(variable) not in weights and "float" in str(variable.dtype):
                yield variable
