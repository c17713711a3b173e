"""For TensorFlow 1 scripts: ``tf.compat.v1`` optimizers, sessions and hooks."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hvd_keras import ops
from hvd_keras.gradients import agreement, reducer, specs
from hvd_keras.runtime import rank_info
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set


class Reducer(reducer.GradientReducer):
    """Reduces the gradients of a ``tf.compat.v1.train.Optimizer``, whose methods are replaced.

    ``compute_gradients`` returns the gradients over all ranks, so that what a script does with them
    before ``apply_gradients``, such as clipping, applies to the gradients of the whole batch.
    """

    def __init__(
        self,
        optimizer: tf.compat.v1.train.Optimizer,
        name: str | None,
        options: agreement.ExchangeOptions,
        groups: agreement.Groups,
    ) -> None:
        super().__init__(name, options, groups)
        self.optimizer = optimizer
        optimizer._hvd_reducer = self
        optimizer.compute_gradients = self.compute_gradients
        optimizer.register_local_var = self.register_local

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Replace ``Optimizer.compute_gradients``, which ``minimize`` calls."""
        pairs = type(self.optimizer).compute_gradients(self.optimizer, *args, **kwargs)
        gradients, variables = zip(*pairs, strict=True)
        return list(zip(self.reduce(gradients, variables), variables, strict=True))


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Return an op that assigns the root's values to all global variables of the graph.

    For TensorFlow 1 graphs: ``session.run`` it on every rank, after initialisation and before the
    first step. ``hvd.BroadcastGlobalVariablesHook`` does so in monitored sessions.

    Args:
        root_rank: the rank whose values all ranks get.

    Returns:
        The op, in the default graph.

    Raises:
        RuntimeError: eager execution is on, where no graph has the variables.
        ValueError: the rank does not exist.
        TypeError: a variable has a dtype that is not supported.
        tf.errors.FailedPreconditionError: (when run) the ranks' variables differ in dtype, shape or
            number; on every rank.

    Example:
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(hvd.broadcast_global_variables(0))
    """
    rank_info.rank()  # raises if hvd.init() was not called
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables: eager execution is on, where no graph has the "
            "variables. Use hvd.broadcast_variables(model.variables, root_rank), or "
            "hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank) in fit()."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> tf.Operation:
    """``hvd.broadcast_variables`` in a TensorFlow 1 graph: an op that assigns when it is run.

    Raises:
        As ``broadcast_global_variables``.
    """
    process_set.check_included("broadcast_variables")
    assignments: list[tf.Operation] = []
    for bucket in specs.in_buckets(variables):
        # One after the other, so that all ranks submit them in the same order.
        with tf.control_dependencies(assignments):
            mine = [tf.identity(v) for v in bucket]
            name = f"variables of a graph from {len(assignments)}"
            values = ops.grouped_broadcast(mine, root_rank, name, process_set)
        pairs = zip(bucket, values, strict=True)
        # Nobody needs the values afterwards.
        assignments += [v.assign(x, read_value=False) for v, x in pairs]
    return tf.group(*assignments)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Gives all ranks the root's global variables when a monitored session begins.

    This is after initialisation, and after a checkpoint was restored, so only the root rank needs
    the checkpoint.

    Args:
        root_rank: the rank whose values all ranks get.
        device: the TensorFlow device for the ops. Default: TensorFlow's choice.

    Raises:
        RuntimeError: (in the session) the session was lost, most likely because another rank has
            left. TensorFlow would open new sessions forever.
        As ``hvd.broadcast_global_variables``.

    Example:
        hooks = [hvd.BroadcastGlobalVariablesHook(0)]
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            while not session.should_stop():
                session.run(train_op)
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self._broadcast: tf.Operation | None = None
        self._done = False

    def begin(self) -> None:
        """Create the op while the graph can still be changed."""
        self._done = False
        if self._broadcast is None or self._broadcast.graph != tf.compat.v1.get_default_graph():
            with tf.device(self.device or None):
                self._broadcast = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Broadcasts once. A second session means that TensorFlow is trying to recover."""
        if self._done:
            raise RuntimeError(
                "The session was lost after an error, most likely because another rank has left "
                "the job (tf.compat.v1.logging.set_verbosity('INFO') shows the error). One rank "
                "cannot continue alone. Let all ranks make the same number of steps; after a "
                "failure, restart the job from the last checkpoint."
            )
        self._done = True
        session.run(self._broadcast)
