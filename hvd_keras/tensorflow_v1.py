"""Scripts of TensorFlow 1's time: ``tf.compat.v1`` optimizers, sessions and hooks."""

from typing import Any

import tensorflow as tf

from hvd_keras import exchange, ops, reducer, runtime, settings


class Reducer(reducer.GradientReducer):
    """What a ``tf.compat.v1.train.Optimizer`` gains, and where it is entered.

    ``compute_gradients`` gives the gradients of all ranks, so that what a script does with them
    before ``apply_gradients`` (clipping), it does with those of the whole batch.

    Args:
        optimizer: the optimizer, which is changed.
        name, options, groups: as in ``reducer.GradientReducer``.
    """

    def __init__(
        self,
        optimizer: tf.compat.v1.train.Optimizer,
        name: str | None,
        options: exchange.ExchangeOptions,
        groups: exchange.Groups,
    ) -> None:
        super().__init__(name, options, groups)
        self.optimizer = optimizer
        optimizer._hvd_reducer = self
        optimizer.compute_gradients = self.compute_gradients
        optimizer.register_local_var = self.register_local

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """In place of ``Optimizer.compute_gradients``, which ``minimize`` calls."""
        pairs = type(self.optimizer).compute_gradients(self.optimizer, *args, **kwargs)
        gradients, variables = zip(*pairs, strict=True)
        return list(zip(self.reduce(gradients, variables), variables, strict=True))


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """An op that assigns the root's values to all global variables of the graph.

    For TensorFlow 1 graphs: ``session.run`` it on every rank, after initialisation and before the
    first step. ``hvd.BroadcastGlobalVariablesHook`` does so in monitored sessions.

    Args:
        root_rank: the rank whose values all get.

    Returns:
        The op, in the default graph.

    Raises:
        RuntimeError: eager execution is on, where variables are in no graph.
        ValueError: there is no such rank.
        TypeError: a variable has a dtype that cannot travel.
        tf.errors.FailedPreconditionError: (when run) the ranks' variables differ in dtype, shape or
            number; on every rank.

    Example:
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(hvd.broadcast_global_variables(0))
    """
    runtime.rank()  # says so, if init() was not called
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables: eager execution is on, in which no graph knows the "
            "variables. Use hvd.broadcast_variables(model.variables, root_rank), or "
            "hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank) in fit()."
        )
    assignments: list[tf.Operation] = []
    bucket: list[Any] = []
    room = limit = settings.read().bucket_bytes
    for variable in tf.compat.v1.global_variables():
        size = exchange.size_in_bytes(exchange.spec_of(variable))
        if bucket and size > room:
            assignments += _broadcast(bucket, root_rank, assignments)
            bucket, room = [], limit
        bucket.append(variable)
        room -= size
    return tf.group(*assignments, *_broadcast(bucket, root_rank, assignments))


def _broadcast(
    variables: list[Any], root_rank: int, before: list[tf.Operation]
) -> list[tf.Operation]:
    """After those before, so that all ranks submit them in one order."""
    with tf.control_dependencies(before):
        values = ops.grouped_broadcast(
            [tf.identity(v) for v in variables], root_rank, f"global variables from {len(before)}"
        )
    return [v.assign(x, read_value=False) for v, x in zip(variables, values, strict=True)]


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Gives all ranks the root's global variables when a monitored session begins.

    That is after initialisation, and after a checkpoint was restored: it is enough that the root
    rank has one.

    Args:
        root_rank: the rank whose values all get.
        device: the TensorFlow device for the ops. Default: TensorFlow's choice.

    Raises:
        RuntimeError: (in the session) it was lost, most likely because another rank has left. Then
            TensorFlow would make new ones for ever.
        Others as ``hvd.broadcast_global_variables``.

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
        """While the graph can still be changed."""
        self._done = False
        if self._broadcast is None or self._broadcast.graph != tf.compat.v1.get_default_graph():
            with tf.device(self.device or None):
                self._broadcast = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Once; a second session in a row means that TensorFlow tries to recover from an error."""
        if self._done:
            raise RuntimeError(
                "The session was lost after an error, most likely because another rank has left "
                "the job (tf.compat.v1.logging.set_verbosity('INFO') shows the error). One rank "
                "cannot go on alone. Let all ranks make the same number of steps; after a failure "
                "start the job again from the last checkpoint."
            )
        self._done = True
        session.run(self._broadcast)
