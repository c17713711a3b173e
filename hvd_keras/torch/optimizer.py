"""``DistributedOptimizer`` on PyTorch: one process's optimizer, fed with the gradients of all."""

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hvd_keras.gradients import missing_calls, specs
from hvd_keras.gradients.model_ranks import accumulate, refuse_distributed
from hvd_keras.gradients.values import Values
from hvd_keras.runtime import agree, rank_info
from hvd_keras.runtime.keras import innermost, overrides, replaced
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set
from hvd_keras.runtime.reductions import Average, Max, ReduceOp, check_of_gradients
from hvd_keras.torch.collectives import Compression, Exchange, all_checked, check_compression
from hvd_keras.training import fit_state

_kind = operator.attrgetter("shape", "dtype", "device")


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    *,
    compression: str = Compression.none,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    **others: Any,
) -> keras.optimizers.Optimizer:
    """Make a Keras optimizer apply the gradients of all ranks, and return it, as on TensorFlow.

    Args:
        optimizer: any ``keras.optimizers.Optimizer``, or its name.
        name, compression, gradient_predivide_factor, op, backward_passes_per_step,
            average_aggregated_gradients, process_set: as on TensorFlow.
        others: those of TensorFlow's, at their defaults.

    Raises:
        NotImplementedError: an argument is unknown, or needs Keras on TensorFlow.
        TypeError: ``optimizer`` is none of Keras, or ``compression`` of another type.
        ValueError: it is distributed already, or an argument is impossible; and in the first step,
            on every rank, if the ranks' models differ.
    """
    rank_info.rank()  # says so, if init() was not called
    given = [key for key, value in others.items() if value != _DEFAULTS.get(key, others)]
    if given:
        raise NotImplementedError(
            f"hvd.DistributedOptimizer: got {', '.join(given)}, expected none but the arguments "
            "that exist on PyTorch. Leave them out."
        )
    optimizer = keras.optimizers.get(optimizer) if isinstance(optimizer, str) else optimizer
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"hvd.DistributedOptimizer: got {optimizer!r}, expected a keras.optimizers.Optimizer, "
            "such as keras.optimizers.Adam(); one of torch.optim trains no Keras model in fit."
        )
    outermost, optimizer = optimizer, innermost(optimizer)
    refuse_distributed(optimizer)
    process_set.check_included("DistributedOptimizer")
    check_of_gradients(op, gradient_predivide_factor)
    check_compression(compression)
    accumulate(optimizer, passes := backward_passes_per_step)
    factor = gradient_predivide_factor
    call: dict[str, Any] = {"reduction": op.value, "wire": compression}
    call |= {"process_set": process_set.id(), "prescale": 1 / factor, "postscale": factor}
    local_sum = 1 if average_aggregated_gradients else passes
    reducer = Reducer(optimizer, name, process_set, local_sum, op, call)
    # A LossScaleOptimizer changes what an optimizer accumulates.
    reducer.watches = optimizer is outermost or not optimizer.gradient_accumulation_steps
    return outermost


# Of the arguments that TensorFlow's has besides.
_DEFAULTS: dict[str, Any] = {
    **{"device_dense": "", "device_sparse": "", "sparse_as_dense": False, "num_groups": 0},
    **{"scale_local_gradients": True, "shard_state": False, "fragments": 1},
    **dict.fromkeys(("groups", "sync_every", "outer_optimizer", "inner_process_set")),
}


# By the value of a variable, the Ahead that sends its gradients, and its number there.
_watched: Any = WeakTensorKeyDictionary()


class Ahead:
    """Sends each bucket of gradients once it is computed, while others still are.

    Every bucket that is sent on one rank is sent once on all, at the latest in ``results``.

    Args:
        values: of the variables, in the order of the optimizer, the same on all ranks.
        send: a method that begins to exchange a bucket's gradients, given by numbers and values.
    """

    def __init__(
        self, values: Sequence[torch.Tensor], send: Callable[[list[int], list[Any]], Any]
    ) -> None:
        self._values = values
        # Hooks live as long as variables, which may get another optimizer.
        self._sender = weakref.WeakMethod(send)
        order = reversed(range(len(values)))  # backpropagation makes the last first
        self._buckets = specs.in_buckets(order, lambda i: values[i].nbytes)
        self.sent: dict[int, Any] = {}  # requests, by bucket
        self._is_stale = False  # a gradient has changed since it was sent
        # By variable, the states of its gradients that were computed.
        self._given: dict[int, list[Any]] = {}
        self._awaited = list(map(set, self._buckets))
        self._hooks = [
            values[i].register_post_accumulate_grad_hook(functools.partial(self._see, number, i))
            for number, bucket in enumerate(self._buckets)
            for i in bucket
        ]
        _watched.update({value: (weakref.ref(self), i) for i, value in enumerate(values)})

    def note(self, i: int, gradient: torch.Tensor) -> None:
        """Note a gradient that something else than ``backward`` has computed."""
        self._given.setdefault(i, []).append(_state(gradient))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _see(self, number: int, i: int, _: Any) -> None:
        send: Any = self._sender()
        if send is None:
            self.remove()
            return
        self._is_stale |= number in self.sent  # computed again before the update
        self._given[i] = [_state(self._values[i].grad)]
        if not send.__self__.is_stepping or send.__self__.accumulates:
            return
        self._awaited[number].discard(i)
        if not self._is_stale and not self._awaited[number]:
            self._send(number, [self._values[k].grad for k in self._buckets[number]])

    def _send(self, number: int, gradients: list[Any]) -> None:
        send = self._sender()
        assert send is not None  # an optimizer calls, or it was asked for before
        self.sent[number] = send(self._buckets[number], gradients)

    def differs(self, gradients: Sequence[Any]) -> tuple[bool, bool]:
        """Whether an update gets other gradients than were sent, and if so, changed ones."""
        given = [(gradients[i], states) for i, states in self._given.items()]
        others = [g for g, states in given if g is None or _state(g) not in states]
        is_changed = not self._is_stale and any(g is not None for g in others)
        return self._is_stale or bool(others), is_changed

    def results(self, gradients: list[Any], exist: Any) -> dict[int, Any]:
        """Return the results by variable, of the buckets whose gradients all ``exist`` on a rank.

        Args:
            gradients: zeros where this rank has none, but another.
            exist: [variables], an array of bool.
        """
        whole = [n for n, bucket in enumerate(self._buckets) if exist[bucket].all()]
        for n in whole:
            if n not in self.sent:
                self._send(n, [gradients[i] for i in self._buckets[n]])
        found = {
            i: reduced
            for n in whole
            for i, reduced in zip(self._buckets[n], self.sent.pop(n).results(), strict=True)
        }
        self._is_stale, self._given, self._awaited = False, {}, list(map(set, self._buckets))
        return found

    def remove(self) -> None:
        """Send nothing any more."""
        for hook in self._hooks:
            hook.remove()

    def drain(self) -> None:
        """The same; all ranks receive what some have sent, which will not be applied."""
        self.remove()
        for n, bucket in enumerate(self._buckets):
            if n not in self.sent:
                self._send(n, [torch.zeros_like(self._values[i]) for i in bucket])
            self.sent.pop(n).results()


def _state(gradient: torch.Tensor) -> tuple[int, int]:
    """Return what changes if a gradient does."""
    return gradient.data_ptr(), gradient._version


def note_gradients(grad: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace ``torch.autograd.grad``: let an ``Ahead`` know what it returns."""
    results, inputs = grad(*args, **kwargs), args[1] if len(args) > 1 else kwargs["inputs"]
    for one, result in zip([inputs] if torch.is_tensor(inputs) else inputs, results, strict=False):
        if result is not None and torch.is_tensor(one) and one in _watched:
            watching, i = _watched[one]
            if (ahead := watching()) is not None:
                ahead.note(i, result)
    return results


class Reducer(specs.Named):
    """Exchanges the gradients of an optimizer; its attribute ``_hvd_reducer``.

    From the second step on, buckets travel while ``backward`` of Keras's own step computes others;
    other code may change gradients, or compute some that are never applied. In ``apply`` the ranks
    agree on which gradients there are, and exchange the rest; or, if the optimizer accumulates
    local steps, all in ``_clip_gradients``, once per update.

    Args:
        optimizer: the one whose methods are replaced.
        name: identifies it on all ranks.
        process_set: the ranks that train together.
        local_sum: the factor for Keras's mean over local steps.
        op: how the ranks' gradients are combined.
        call: the arguments of the requests.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        name: str | None,
        process_set: ProcessSet,
        local_sum: int,
        op: ReduceOp,
        call: dict[str, Any],
    ) -> None:
        super().__init__(name, process_set)
        self.op = op
        self.averages_rows, self.is_sharded, self.rounds = True, False, None
        self._optimizer, self._local_sum, self._call = optimizer, local_sum, call
        self._compared: dict[tuple[int, ...], Values] = {}  # lists of variables
        self._ahead: Ahead | None = None
        # An apply of the user's may clip the gradients of each step.
        has_own = overrides(optimizer, "apply", of=keras.optimizers.Optimizer)
        self.accumulates = bool(optimizer.gradient_accumulation_steps) and not has_own
        self.watches = True  # which gradients are computed
        self.is_stepping = False  # in Keras's own step, which applies what ``backward`` computes
        self._is_reduced = False  # what ``apply`` gets is of all ranks
        self._outputs: dict[str, list[torch.Tensor]] = {}  # of earlier requests
        optimizer._hvd_reducer = self
        own_apply = functools.partial(type(optimizer).apply, optimizer)
        optimizer.apply = functools.partial(self.apply, own_apply)
        optimizer._clip_gradients = self._clip_gradients

    # torch.compile breaks its graph at the exchange, which waits for other ranks.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @missing_calls.exchange_by("optimizer")
    def apply(self, apply: Callable[..., Any], grads: Any, trainable_variables: Any = None) -> None:
        """Replace ``apply`` of the optimizer, which every step calls.

        Or of its ``LossScaleOptimizer``: all ranks skip a step with any rank's infinity.
        """
        if self.process_set.size() > 1 and not self._is_reduced:
            grads = self._reduced(grads, trainable_variables)
        with replaced(self, "_is_reduced", True):
            apply(grads, trainable_variables)

    def _reduced(self, grads: Sequence[Any], given: Sequence[Any] | None) -> list[Any]:
        """Exchange the gradients of a step, unless the optimizer accumulates them."""
        shown: Any = self._optimizer._trainable_variables if given is None else given
        gradients = list(grads)
        if (count := len(gradients)) != len(shown):
            raise ValueError(f"{self.name}: got {count} gradients of {len(shown)} variables.")
        if any(getattr(variable, "overwrite_with_gradient", False) for variable in shown):
            raise NotImplementedError(f"{self.name}: float8 scales are not exchanged on PyTorch.")
        if self.op is Average:
            missing_calls.check_average()
        missing_calls.unaveraged.clear()
        is_new = self._compare(shown)
        if self._ahead is not None and is_new:  # a second list of variables
            self._ahead.drain()
            self._ahead = None
        ahead = self._ahead
        differs = ahead.differs(gradients) if ahead is not None else (False, False)
        step = fit_state.step()
        # Which gradients each rank has, and whether any was sent that is not to be applied.
        mine = np.array([*(g is not None for g in gradients), *differs, step, -step])
        call = {"name": f"{self.name}.kinds", "process_set": self.process_set.id()}
        (found,) = agree.run("allreduce", [mine], reduction=Max.value, **call)
        exist, (differ, are_changed, most, least) = found[:-4] > 0, found[-4:]
        if most != -least:
            raise ValueError(f"{self.name}: {specs.DIFFERENT_STEPS}.")
        for i in np.flatnonzero(exist & (mine[:-4] == 0)):  # such as that of an unused branch
            gradients[i] = torch.zeros_like(shown[i].value)
        if are_changed:
            missing_calls.tell(
                f"{self.name}: gradients are changed before the mean over the ranks is taken. To "
                "clip it, use clipnorm, clipvalue or global_clipnorm of the optimizer.",
                self.process_set,
            )
        if ahead is not None and differ and not self.accumulates:
            # The script changes gradients, or computes them in several parts.
            ahead.drain()
            ahead = self._ahead = None
        done = ahead.results(gradients, exist & (not self.accumulates)) if ahead is not None else {}
        if not self.accumulates:
            gradients = self._exchange(gradients, done)
        if self.watches and is_new and len(self._compared) == 1:
            self._ahead = Ahead([variable.value for variable in shown], self._send)
        return gradients

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        """Replace ``_clip_gradients``: called once per update, with the accumulated gradients."""
        if self._optimizer.gradient_accumulation_steps:
            grads = self._exchange(grads, {}) if self.accumulates else grads
            if self._local_sum > 1:  # Keras has taken the mean of the local steps
                grads = [g if g is None else g * self._local_sum for g in grads]
        return type(self._optimizer)._clip_gradients(self._optimizer, grads)

    def _compare(self, shown: Sequence[Any]) -> bool:
        """Compare a list of variables when it is new, which all ranks see alike, and in loops."""
        numbers = tuple(map(id, shown))
        if numbers in self._compared:  # the optimizer keeps its variables
            if not missing_calls.in_fit.get():
                self._compared[numbers].check("step")
            return False
        specs.check_specs(self.name, list(map(specs.spec_of, shown)), self.process_set)
        described = specs.describe_optimizer(self._optimizer)
        specs.check_described(f"{self.name}.options", described, self.process_set)
        requests = 1 + len(specs.in_buckets(shown))
        missing_calls.check_weights(self.name, "weights", shown, requests, self.process_set)
        missing_calls.mark_reduced(shown)
        loop = f"loop {len(self._compared)} of {self.name}"
        self._compared[numbers] = Values(shown, self.process_set, loop=loop)
        return True

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _send(self, own: list[int], gradients: list[Any]) -> Exchange:
        name = f"{self.name} gradients {own[-1]}-{own[0]}"
        mine = all_checked("DistributedOptimizer", gradients)
        # Memory that is new in each step costs as much as to add what it holds.
        outputs = self._outputs.get(name)
        if outputs is None or list(map(_kind, outputs)) != list(map(_kind, mine)):
            outputs = self._outputs[name] = list(map(torch.empty_like, mine))
        return Exchange("allreduce", mine, outputs, name=name, **self._call)

    def _exchange(self, grads: Sequence[Any], done: dict[int, Any]) -> list[Any]:
        """Return the gradients over all ranks, of which some are there; None stays None."""
        if self.process_set.size() == 1:
            return list(grads)
        present = [i for i, g in enumerate(grads) if g is not None and i not in done][::-1]
        requests = [
            (own, self._send(own, [grads[i] for i in own]))
            for own in specs.in_buckets(present, lambda i: grads[i].nbytes)
        ]
        for own, request in requests:
            done |= zip(own, request.results(), strict=True)
        return [done.get(i, gradient) for i, gradient in enumerate(grads)]
