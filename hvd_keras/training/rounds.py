"""Trains on slow networks: the ranks average weights after many updates, not gradients in each.

In a round, each rank makes ``every`` updates of its own, from weights that all ranks have in
common. The mean of the ranks' differences from these is the gradient with which an outer optimizer
makes the next common weights (DiLoCo; Douillard et al., 2023, https://arxiv.org/abs/2311.08105).
Without one, these are the mean of the ranks' weights (LocalSGD; Stich, 2018,
https://arxiv.org/abs/1805.09767).

Fragments of the weights can have rounds of their own, one after the other (streaming DiLoCo;
Douillard et al., 2025, https://arxiv.org/abs/2501.18512). The differences of one travel until it is
the next one's turn. Then a rank adds what it has learnt meanwhile to the next common weights, and
what rounding has kept from travelling, which so belongs to its next difference.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_keras.gradients import missing_calls, model_ranks, shards, specs
from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import innermost, keras, snapshot
from hvd_keras.runtime.process_sets import ProcessSet
from hvd_keras.training import fit_state, variables

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


class Piece(NamedTuple):
    """A weight, or a part of its flat values that belongs to one fragment."""

    weight: Any
    flat: slice | None = None

    @property
    def value(self) -> Any:
        value = np.asarray(self.weight)
        return value if self.flat is None else value.reshape(-1)[self.flat]

    def assign(self, value: Any) -> None:
        if self.flat is not None:
            whole = np.array(self.weight)
            whole.reshape(-1)[self.flat] = np.asarray(value)
            value = whole
        self.weight.assign(value)


class Rounds(specs.Named):
    """The rounds of one optimizer, in the attribute ``rounds`` of its reducer.

    Args:
        optimizer: that of each rank.
        name: identifies it on all ranks.
        every: the updates of a round.
        outer: the optimizer of the common weights, not built yet; None: their mean.
        process_set: the ranks that train the model.
        inner: which of them average gradients in each step; None: no others.
        wire: the widest floating-point dtype that is sent, or int8.
        fragments: how many of the weights are synced in turn.
    """

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        every: int,
        outer: Any,
        process_set: ProcessSet,
        inner: Any,
        wire: str,
        fragments: int,
    ) -> None:
        super().__init__(name, process_set)
        self.optimizer, self.fragments = optimizer, fragments
        #: Between syncs. Each update takes as many batches as the optimizer accumulates.
        self.batches = every // fragments * (optimizer.gradient_accumulation_steps or 1)
        self.outer = keras.optimizers.SGD(1.0) if outer is None else outer
        missing_calls.mark_alone(self.outer)  # all ranks have its gradients
        self.weights: list[Any] = []
        self.pieces: list[Piece] = []  # of which fragments consist
        self.common: list[Any] = []  # what they were when the round began
        self.sent: list[Any] = []  # this rank's differences of the fragment in flight
        self.alone = inner is None  # each rank trains alone within a round
        self._wire = wire
        self._finish: Callable[[], Any] | None = None  # waits for what is in flight

    def check_step(self, gradients: Sequence[Any]) -> None:
        """Raise if nothing would average the weights that a step is about to change."""
        if agree.is_building.get():
            return
        fit = fit_state.current.get()
        if fit is None or self not in model_ranks.rounds_of(fit.model):
            raise RuntimeError(
                "hvd.DistributedOptimizer: sync_every needs the fit of a model that has this "
                f"{type(self.optimizer).__name__} in compile or in an attribute. In a custom loop "
                "leave it out, or average weights by hvd.allreduce, within hvd.local_fit()."
            )
        if any(hasattr(gradient, "_hvd_reduced") for gradient in gradients):
            raise ValueError(
                "hvd.DistributedOptimizer: got sync_every, but this train_step exchanges gradients "
                "with hvd.DistributedGradientTape in each step. Use tf.GradientTape, or leave "
                "sync_every out."
            )

    def variables(self) -> list[Any]:
        """Return the common weights, the state of the outer optimizer, and what is in flight.

        Raises:
            ValueError: the optimizer has no variables yet, or trains a divided table.
        """
        if not self.common:
            self._build()
        return [*self.common, *self.outer.variables, self._flight]

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
        self._cut()
        self.common = self._alike("common", np.asarray)
        self.outer.build(self.common)
        self._flight = keras.Variable(-1, trainable=False, dtype="int32", name="fragment_in_flight")
        self.sent = self._alike("sent", np.zeros_like) if self.fragments > 1 else []

    def _cut(self) -> None:
        """Divide the weights, in their order, into fragments of equal numbers of values."""
        counts = [math.prod(weight.shape) for weight in self.weights]
        edges = [sum(counts) * i // self.fragments for i in range(self.fragments + 1)]
        ends = [0]  # of the pieces, among all values
        for weight, count in zip(self.weights, counts, strict=True):
            begin = ends[-1]
            inside = sorted({edge - begin for edge in edges if begin < edge < begin + count})
            cuts = itertools.pairwise([0, *inside, count])
            flat = [slice(*cut) for cut in cuts] if inside else [None]
            self.pieces += [Piece(weight, part) for part in flat]
            ends += [begin + stop for stop in (*inside, count)]
        places = [0, *np.searchsorted(ends[1:], edges[1:], "right").tolist()]
        self._parts = list(itertools.starmap(slice, itertools.pairwise(places)))

    def _alike(self, name: str, of: Callable[[Any], Any]) -> list[Any]:
        return [
            keras.Variable(
                of(piece.value),
                trainable=False,
                dtype=piece.weight.dtype,
                name=f"{name}_{i}_{piece.weight.path.replace('/', '_')}",
            )
            for i, piece in enumerate(self.pieces)
        ]

    def described(self) -> dict[str, str]:
        """Describe what must be equal on all ranks."""
        found = specs.describe_optimizer(self.outer)
        found = {f"outer {key}": value for key, value in found.items()}
        rate = float(self.outer.learning_rate)
        how = {"batches of a round": str(self.batches), "fragments": str(self.fragments)}
        return {**how, "wire": self._wire, "outer rate": str(rate), **found}

    def begin(self, is_restored: bool) -> None:
        """Take the weights, equal on all ranks now, for common ones, if no round is restored."""
        if self._finish is not None:  # a fit was interrupted
            self._finish()
            self._finish = None
        if not is_restored:
            self._flight.assign(-1)
            for common, piece in zip(self.common, self.pieces, strict=True):
                common.assign(piece.value)

    def end(self, everything: bool) -> None:
        """Give all ranks the next common weights; or end one fragment's flight, and send another.

        Without ``everything``, the weights themselves differ by rank.
        """
        if int(self._flight) >= 0:
            self._land()
        number = -1 if everything else (int(self._flight) + 1) % self.fragments
        self._flight.assign(number)
        part = slice(None) if everything else self._parts[number]
        pairs = zip(self.common[part], self.pieces[part], strict=True)
        moved = [np.asarray(common) - piece.value for common, piece in pairs]
        if not everything:
            for variable, value in zip(self.sent[part], moved, strict=True):
                variable.assign(value)
            self._finish = self._send()
            return
        wire = "float64" if self._wire == "int8" else self._wire
        means = exchange(moved, f"{self.name} weights", self.process_set, wire=wire)()
        self.outer.apply(list(map(keras.ops.convert_to_tensor, means)))
        for piece, common in zip(self.pieces, self.common, strict=True):
            piece.assign(common)
        self._constrain()

    def _constrain(self) -> None:
        """Let constraints hold, as Keras does after each update; in common weights, too."""
        bound = [w for w in self.weights if getattr(w, "constraint", None) is not None]
        for weight in bound:
            weight.assign(weight.constraint(weight))
        if int(self._flight) < 0:
            for piece, common in zip(self.pieces, self.common, strict=True):
                if any(piece.weight is weight for weight in bound):
                    common.assign(piece.value)

    def _send(self) -> Callable[[], Any]:
        """Begin to send a fragment; what returns waits for this rank's as sent, and their mean."""
        moved = list(map(snapshot, self.sent[self._parts[int(self._flight)]]))
        name, ranks = f"{self.name} fragment {int(self._flight)}", self.process_set
        if self._wire != "int8":
            sent = [a.astype(agree.numpy_dtype(self._wire)).astype(a.dtype) for a in moved]
            finish = exchange(sent, name, ranks, wire=self._wire)
            return lambda: (sent, finish())
        # Their sum fits into int8. What is infinite or no number makes all of a variable NaN.
        most = np.array([np.abs(a).max(initial=0) for a in moved], "float32")
        most = np.nan_to_num(most, nan=np.inf, posinf=np.inf)
        (most,) = exchange([most], f"{name}, largest", ranks, "Max")()
        steps = np.where(most > 0, most / np.float32(127 // ranks.size()), np.float32(1))
        with np.errstate(invalid="ignore"):
            codes = [np.rint(a / step).astype("int8") for a, step in zip(moved, steps, strict=True)]
        finish = exchange(codes, name, ranks, "Sum")

        def scaled(values: list[Any], factor: float = 1.0) -> list[Any]:
            return [value * (step * factor) for value, step in zip(values, steps, strict=True)]

        return lambda: (scaled(codes), scaled(finish(), 1 / ranks.size()))

    def _land(self) -> None:
        """Add what this rank has learnt since the fragment was sent to its next common weights."""
        part = self._parts[int(self._flight)]
        sent, means = (self._finish or self._send())()  # after a restart, it is sent again
        self._finish = None
        common, steps = self.common[part], int(self.outer.iterations)
        before = list(map(snapshot, common))
        self.outer.apply(list(map(keras.ops.convert_to_tensor, means)), common)
        # The outer optimizer counts rounds, not fragments.
        self.outer.iterations.assign(steps + (part is self._parts[-1]))
        own = zip(self.pieces[part], common, before, sent, self.sent[part], strict=True)
        for piece, after, old, mine, variable in own:
            piece.assign(piece.value + (np.asarray(after) - old + mine))
            variable.assign(np.zeros_like(mine))
        self._constrain()


def exchange(
    arrays: list[Any], name: str, ranks: ProcessSet, reduction: str = "Average", **call: Any
) -> Callable[[], list[Any]]:
    """Begin to reduce each array over the ranks; what returns waits for the results."""
    call |= {"reduction": reduction, "process_set": ranks.id()}
    begun = [
        agree.begin("allreduce", bucket, name=f"{name} {number}", **call)
        for number, bucket in enumerate(specs.in_buckets(arrays))  # which keep their order
    ]
    return lambda: [result for finish in begun for result in finish()]


class Sync(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends the rounds of a model in ``fit``, before all other callbacks see its weights.

    The last rounds of an epoch end with it. All ranks come here for each sync; one whose callback
    has stopped it, such as TerminateOnNaN, then lets the others stop.
    """

    _supports_tf_logs = True

    def __init__(self, fit: fit_state.Fit) -> None:
        super().__init__()
        self._fit, self._process_set = fit, fit.process_set
        self._rounds = model_ranks.rounds_of(fit.model)
        self._every, self._fragments = self._rounds[0].batches, self._rounds[0].fragments
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
        kinds = {(rounds.batches, rounds.fragments) for rounds in self._rounds}
        if len(kinds) > 1 or len(self._rounds) < len(model_ranks.reducers_of(model)):
            raise ValueError(
                "sync_every: the optimizers of one model need the same sync_every, fragments, and "
                "accumulation."
            )
        if self._every % at_once:
            raise ValueError(
                f"sync_every: a sync follows {self._every} batches after another, expected a "
                f"multiple of steps_per_execution={at_once}."
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
            rounds.begin(is_restored=self._first and self._fit.restored)
        self._first = self._ended = False
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        before = batch + 1 - int(self.model.steps_per_execution or 1)
        self._batches = batch + 1
        steps = self.params.get("steps")
        is_due = self._batches // self._every > before // self._every
        is_last = steps is not None and self._batches >= steps
        if is_due or is_last:
            self._end_round(True, is_last)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._end_epoch()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._end_epoch()

    def _end_epoch(self) -> None:
        if not self._ended:
            self._end_round(self._fragments > 1 or self._batches % self._every > 0, is_last=True)

    def _end_round(self, is_due: bool, is_last: bool) -> None:
        others = list(self._others())
        digests = [agree.digest(np.asarray(variable)) for variable in others]
        mine = np.array([self._batches, is_due, is_last, self.model.stop_training, *digests])
        call = {"name": "the end of a round", "process_set": self._process_set.id()}
        (gathered,) = agree.run("allgather", [mine], **call)
        batches, due, last, stopped, *of_others = gathered.reshape(-1, len(mine)).T.tolist()
        if len({*zip(batches, last, strict=True)}) > 1 and not any(stopped):
            raise ValueError(
                "sync_every: the ranks' rounds end after different numbers of batches of an epoch: "
                f"{agree.by_rank(batches, self._process_set)}. Give each rank the same number: use "
                "hvd.data.shard, or steps_per_epoch."
            )
        self._ended = any(last)
        self.model.stop_training |= any(stopped)
        everything = self._ended or self._fragments == 1
        for rounds in self._rounds if any(due) else ():
            rounds.end(everything)
        if any(due) and everything:
            differing = [v for v, d in zip(others, of_others, strict=True) if len({*d}) > 1]
            values = list(map(np.asarray, differing))
            means = exchange(values, "statistics at the end of a round", self._process_set)()
            for variable, value in zip(differing, means, strict=True):
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
