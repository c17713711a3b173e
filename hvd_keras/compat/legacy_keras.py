"""Distributed optimizers of tf_keras (``TF_USE_LEGACY_KERAS=1``).

Supports both families, ``tf_keras.optimizers.Optimizer`` and ``tf_keras.optimizers.legacy``. They
aggregate gradients before they clip them, and ``LossScaleOptimizer`` aggregates before it checks
for overflows, so an overflow on one rank is one on all ranks.

The legacy family also gets ``build`` and ``variables`` as other optimizers have, for the callbacks.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvd_keras import ops
from hvd_keras.gradients import agreement, model_ranks, origin, reducer, shards
from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import keras


class Reducer(reducer.GradientReducer):
    """Reduces the gradients of an optimizer of tf_keras; lives in it as an attribute.

    Args:
        optimizer: of either family, without a LossScaleOptimizer around it.
        passes: local steps whose gradients are added up before an update.
        averages: whether their mean is applied, not their sum.
    """

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        options: agreement.ExchangeOptions,
        groups: agreement.Groups,
        passes: int,
        averages: bool,
    ) -> None:
        super().__init__(name, options, groups)
        self.optimizer = optimizer
        self.variables: list[Any] = []
        self._passes = passes
        self._divisor = passes if averages else 1
        self._sums: dict[int, tf.Variable] = {}  # of the local steps' gradients, by variable
        self._done: tf.Variable | None = None  # local steps since the last update
        self._computed: list[Any] | None = None  # by compute_gradients, since the last update
        optimizer._hvd_reducer = self
        optimizer.apply_gradients = self.apply_gradients
        optimizer._compute_gradients = self._compute_gradients
        if isinstance(optimizer, keras.optimizers.legacy.Optimizer):
            optimizer._aggregate_gradients = self.aggregate_gradients
        else:
            optimizer.build = self.build
            optimizer.aggregate_gradients = self.aggregate_gradients
            optimizer.compute_gradients = self.compute_gradients

    def build(self, var_list: Any) -> None:
        self.variables = list(var_list)
        type(self.optimizer).build(self.optimizer, var_list)

    def compute_gradients(
        self, loss: Any, var_list: Any, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """Replace ``Optimizer.compute_gradients``: gradients over all ranks, as Horovod's."""
        return self._compute_gradients(loss, var_list, tape=tape)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """Replace that of the ``legacy`` family; with Horovod the other family has it, too."""
        own = type(self.optimizer)
        if isinstance(self.optimizer, keras.optimizers.legacy.Optimizer):
            pairs = own._compute_gradients(self.optimizer, loss, var_list, grad_loss, tape)
        else:
            pairs = own.compute_gradients(self.optimizer, loss, var_list, tape)
        gradients, variables = map(list, zip(*pairs, strict=True))
        if self._passes == 1:
            gradients = self.reduce(gradients, variables)
        self._computed = gradients
        return list(zip(gradients, variables, strict=True))

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Replace ``Optimizer.apply_gradients``, which every step calls."""
        # What compute_gradients has returned is used once. It is exchanged already, except local
        # steps that are to be added up. If the script has changed it, for example clipped, another
        # average changes nothing, and a sum is not taken again.
        pairs = list(grads_and_vars)
        computed, self._computed = self._computed, None
        skips = skip_gradients_aggregation or not experimental_aggregate_gradients
        if not pairs or (skips and (self._passes == 1 or computed is None)):
            return self._apply(pairs, name)
        gradients, variables = zip(*pairs, strict=True)
        if self._passes > 1:
            return self._accumulate(gradients, variables, name)
        are_reduced = computed is not None and (
            self.options.op is not ops.Average
            or all(any(g is known for known in computed) for g in gradients)
        )
        if not are_reduced:
            is_together = self.process_set.size() > 1 and not agree.is_building.get()
            if computed is None and is_together and self.averages_rows:
                self._factors = origin.check(self.name, gradients, variables, self.process_set)
            pairs = list(zip(self.reduce(gradients, variables), variables, strict=True))
        return self._apply(pairs, name)

    def _apply(self, pairs: Iterable[tuple[Any, Any]], name: str | None) -> Any:
        pairs = list(pairs)
        if self.process_set.size() > 1:
            updated, local = [v for _, v in pairs], model_ranks.local_variables
            advice = "Use clipnorm, or Keras 3, which computes that norm over all ranks."
            shards.check_clipping(self.optimizer, updated, local, advice)
        own = type(self.optimizer).apply_gradients
        return own(self.optimizer, pairs, name=name, experimental_aggregate_gradients=False)

    def _accumulate(
        self, gradients: Sequence[Any], variables: Sequence[Any], name: str | None
    ) -> Any:
        """Add up this rank's gradients; after the last local step the ranks exchange the sums."""
        # iterations counts local steps, as with Horovod and with Keras 3's own accumulation.
        dense = [self._dense(g, v) for g, v in zip(gradients, variables, strict=True)]
        step = self.begin(dense, variables)
        indices = [i for i, gradient in enumerate(step.gradients) if gradient is not None]
        shared = [variables[i] for i in indices]
        with tf.init_scope():
            for variable in shared:
                if shards.variable_id(variable) not in self._sums:
                    zeros = tf.zeros(variable.shape, variable.dtype)
                    self._sums[shards.variable_id(variable)] = tf.Variable(zeros, trainable=False)
            if self._done is None:
                self._done = tf.Variable(0, trainable=False, dtype=tf.int64)
        # Accumulators on this rank; what travels is their sum, once per update.
        sums = [self._sums[shards.variable_id(variable)] for variable in shared]
        for total, i in zip(sums, indices, strict=True):
            total.assign_add(step.gradients[i])
        done = self._done
        last = tf.equal(done.assign_add(1), self._passes)

        def update() -> tf.Tensor:
            means = [total / tf.cast(self._divisor, total.dtype) for total in sums]
            self._apply(zip(step.exchange(means), shared, strict=True), name)
            for total in sums:
                total.assign(tf.zeros_like(total))
            done.assign(0)
            return tf.identity(self.optimizer.iterations)

        def wait() -> tf.Tensor:
            self.optimizer.iterations.assign_add(1)
            return tf.identity(self.optimizer.iterations)

        return tf.cond(last, update, wait)

    def _dense(self, gradient: Any, variable: Any) -> Any:
        """A gradient that this rank lacks now, but had in another local step, is zero."""
        if gradient is None:
            known = shards.variable_id(variable) in self._sums
            return tf.zeros_like(variable) if known else None
        return tf.convert_to_tensor(gradient)

    def aggregate_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[Any]:
        """Replace ``Optimizer.aggregate_gradients``, which LossScaleOptimizer calls."""
        # LossScaleOptimizer omits variables without a gradient on this rank. In the newer family,
        # build has received all variables.
        if self._passes > 1:
            raise ValueError(
                f"backward_passes_per_step is {self._passes}, but a LossScaleOptimizer of tf_keras "
                "cannot accumulate gradients. Use Keras 3 (unset TF_USE_LEGACY_KERAS), or the "
                "policy mixed_bfloat16, which needs no loss scale."
            )
        gradient = {shards.variable_id(v): (g, v) for g, v in grads_and_vars}
        variables = [v for _, v in gradient.values()]
        if gradient.keys() <= {shards.variable_id(v) for v in self.variables}:
            variables = self.variables
        mine = [gradient.get(shards.variable_id(v), (None, v))[0] for v in variables]
        reduced = zip(self.reduce(mine, variables), variables, strict=True)
        return [(g, v) for g, v in reduced if g is not None]


class _CallableList(list[Any]):
    """A list that works as ``optimizer.variables`` and as ``optimizer.variables()``."""

    def __call__(self) -> list[Any]:
        return self


def build(self: Any, var_list: Any) -> None:
    """Do what ``Optimizer.build`` does, for the legacy family, which has none."""
    self._create_all_weights(list(var_list))
    self.variables = _CallableList(self.weights)
