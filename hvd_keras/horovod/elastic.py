"""Horovod's elastic training, on hvdrun's restarts.

A rank that fails ends the job; ``hvdrun --max-restarts`` starts it again, with the ranks that there
are then, and the decorated function goes on from the last commit. So a commit is a file, which
rank 0 writes into the folder ``HVD_COMMITS``; hvdrun chooses one for each job that may restart.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import cloudpickle
import numpy as np
import tensorflow as tf

from hvd_keras.compat import tensorflow_v1
from hvd_keras.gradients import model_ranks, shards
from hvd_keras.runtime import agree, log, objects, rank_info, settings
from hvd_keras.runtime.keras import keras
from hvd_keras.runtime.process_sets import global_process_set
from hvd_keras.saving import storage
from hvd_keras.training.broadcasting import broadcast_variables
from hvd_keras.training.variables import (
    average_accumulated,
    recurrent_states,
    training_variables,
    variables_of,
)

_Result = TypeVar("_Result")

# All ranks make the same states, in each start of the job.
_numbers = itertools.count()

# A damaged last commit is survived.
_KEPT = 2


class ObjectState:
    """Attributes that are the same on all ranks, and can be committed.

    Args:
        bcast_object, get_rank: accepted for classes derived from Horovod's; they have no effect.
        attributes: their names and first values, which cloudpickle can serialise.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **attributes: Any) -> None:
        self._names = list(attributes)
        self._number = next(_numbers)
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = 0
        self._has_run = False  # by ``run``, in this process
        for name, value in attributes.items():
            setattr(self, name, value)
        ObjectState.save(self)  # a derived class has not set its own attributes yet

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Functions to call when the job has been started again, after the commit was restored."""
        self._reset_callbacks += callbacks

    def on_reset(self) -> None:
        for callback in self._reset_callbacks:
            callback()

    def _attributes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        self._saved = cloudpickle.dumps(self._attributes()), self._values()

    def restore(self) -> None:
        """Set the state to what was saved, committed or synchronised last."""
        attributes, values = self._saved
        vars(self).update(cloudpickle.loads(attributes))
        self._assign(values)

    def sync(self) -> None:
        """Give all ranks the state of rank 0."""
        vars(self).update(objects.broadcast_object(self._attributes(), 0, name="state"))
        self._broadcast()
        self.save()

    def commit(self) -> None:
        """Save the state, also in a file of rank 0, from which a restart continues."""
        self.save()
        self._commits += 1
        folder = self._folder()
        if folder is None or rank_info.rank() != 0:
            return
        if type(self).save is not ObjectState.save:
            log.warn_once(
                f"a restart loses what {type(self).__name__}.save keeps: commits contain only the "
                "attributes that a constructor was given, and the variables of a TensorFlowState"
            )
        attributes, values = self._saved
        path = storage.path_of(folder, 0, self._commits)
        # Attributes may be any objects, and the text of a checkpoint is JSON.
        arrays = [*values, np.frombuffer(attributes, np.uint8)]
        stored = [storage.Variable(str(i), False, value) for i, value in enumerate(arrays)]
        storage.write(path, {"commit": self._commits}, stored)
        storage.prune(path, _KEPT)

    def check_host_updates(self) -> None:
        """Do nothing: the next restart uses hosts that were added, up to hvdrun's --max-np."""

    def _values(self) -> list[Any]:
        """This rank's values of what is more than attributes."""
        return []

    def _assign(self, values: Sequence[Any]) -> None:
        """Set what ``_values`` gives."""

    def _broadcast(self) -> None:
        """Give all ranks rank 0's values of what ``_values`` gives."""

    def _resume(self) -> bool:
        """Take over the last commit; return on every rank whether one exists."""
        folder = self._folder()
        # After a restart rank 0 may be on another host than the rank 0 that has committed.
        gathered = agree.gather_json("commits", storage.newest(folder) if folder else [])
        if not any(gathered):
            return False
        root, found = gathered.index(max(gathered)), None
        damaged: dict[str, str] = {}
        if rank_info.rank() == root:
            found = storage.read_last(folder, damaged)
        for path, reason in damaged.items():
            log.logger.warning("commit %s is damaged: %s", path, reason)
        commit = found and found[1].metadata["commit"]
        self._commits = objects.broadcast_object(commit, root, name="commit")
        if self._commits is None:
            raise RuntimeError(
                f"hvd.elastic.run: all commits in {folder} are damaged. Remove them to start from "
                "the beginning."
            )
        if found is not None:
            *values, attributes = [variable.value for variable in found[1].variables]
            _check_shapes(values, self._values())
            self._saved = attributes.tobytes(), values
            print(f"hvd_keras: continuing from commit {found[0]}", file=sys.stderr, flush=True)
        if root != 0:
            self._saved = objects.broadcast_object(self._saved, root, name="committed")
        if rank_info.rank() == 0 or found is not None:
            self.restore()
        return True

    def _folder(self) -> Any:
        folder = settings.read().commits
        return folder and folder / f"state-{self._number}"


State = ObjectState


class TensorFlowState(ObjectState):
    """Variables of TensorFlow, and attributes.

    Args:
        variables: those to keep. Default, in a TensorFlow 1 graph: all global ones.
        session: of a TensorFlow 1 graph. Default: the default one.
        attributes: as in ``ObjectState``.

    Raises:
        ValueError: no variables are given, and eager execution has no list of all; or each rank has
            a part of one.
    """

    def __init__(
        self, variables: Iterable[Any] | None = None, session: Any = None, **attributes: Any
    ) -> None:
        if variables is None:
            if tf.executing_eagerly():
                raise ValueError(
                    "hvd.elastic.TensorFlowState: variables is missing; expected a list of "
                    "tf.Variables, such as model.variables + optimizer.variables."
                )
            variables = tf.compat.v1.global_variables()
        self.variables = list(variables)
        shards.refuse_parts(self.variables, _NO_PARTS)
        self._in_session = None
        if not tf.executing_eagerly():
            self._in_session = session or tf.compat.v1.get_default_session()
            # Once: a graph that is finalised takes no more ops.
            self._broadcasting = tensorflow_v1.broadcast_variables(self.variables, 0)
        super().__init__(**attributes)

    def _values(self) -> list[Any]:
        if self._in_session is not None:
            return list(self._in_session.run(self.variables))
        return [np.array(variable) for variable in self.variables]

    def _assign(self, values: Sequence[Any]) -> None:
        for variable, value in zip(self.variables, values, strict=True):
            if self._in_session is not None:
                variable.load(value, self._in_session)
            else:
                variable.assign(value)

    def _broadcast(self) -> None:
        if self._in_session is not None:
            self._in_session.run(self._broadcasting)
        else:
            broadcast_variables(self.variables, 0)


class TensorFlowKerasState(TensorFlowState):
    """A model, its optimizer, and attributes.

    Args:
        model: a model that is built.
        optimizer: its optimizer. Default: that of ``compile``.
        backend: has no effect: Horovod's, for TensorFlow 1.
        attributes: as in ``ObjectState``, such as ``epoch`` and ``batch``.

    Raises:
        ValueError: the model or an optimizer has no variables yet, or each rank has a part of them.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **attributes: Any
    ) -> None:
        if not model.built:
            raise ValueError(
                f"hvd.elastic: model {model.name!r} has no variables yet. Build it first: give it "
                "an Input, or call it once."
            )
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        found = training_variables(model)
        for one in model_ranks.optimizers_of(model):
            if model_ranks.reducer_of(one) is not None and not getattr(one, "built", True):
                raise ValueError(
                    f"hvd.elastic: optimizer {one.name!r} of model {model.name!r} has no variables "
                    "yet. Build it first: optimizer.build(variables that it updates)."
                )
        states = recurrent_states(model._flatten_layers())  # of each rank's own rows
        found = [v for v in found if all(v is not state for state in states)]
        if optimizer is not None and optimizer is not getattr(model, "optimizer", None):
            if hasattr(optimizer, "build") and not getattr(optimizer, "built", False):
                optimizer.build(model.trainable_variables)
            found += variables_of(optimizer)
        shards.refuse_parts(found, _NO_PARTS)
        if model_ranks.rounds_of(model):
            raise ValueError(
                f"hvd.elastic: the optimizer of model {model.name!r} has sync_every, and commits "
                "have weights of rank 0 alone. Use hvd.callbacks.Checkpoint."
            )
        super().__init__(model_ranks.without_local(found), **attributes)

    def commit(self) -> None:
        if self._in_session is None:  # the file has rank 0's sums of gradients
            reducer = self.optimizer and model_ranks.reducer_of(self.optimizer)
            process_set = reducer and reducer.process_set
            process_set = process_set or model_ranks.process_set_of(self.model)
            average_accumulated(self.model, process_set or global_process_set, self.optimizer)
        super().commit()


KerasState = TensorFlowKerasState


def run(func: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorate a function of a state: after a restart it continues from the last commit.

    Before the call all ranks get rank 0's state. Before the first call in a process this is that of
    the last commit, if there is one; then the reset callbacks are called, too.
    """

    @functools.wraps(func)
    def wrapper(state: ObjectState, *args: Any, **kwargs: Any) -> _Result:
        if settings.read().commits is None and rank_info.rank() == 0:
            log.warn_once(
                "commits of hvd.elastic are kept in memory only. For restarts from the last one "
                "use hvdrun --max-restarts N, or set HVD_COMMITS to a folder"
            )
        again = not state._has_run and state._resume()
        state._has_run = True
        state.sync()
        if again:
            state.on_reset()
            state.sync()  # what reset callbacks have changed, such as the learning rate
        return func(state, *args, **kwargs)

    return wrapper


def run_fn(func: Callable[..., _Result], reset: Callable[[], None]) -> Callable[..., _Result]:
    """``run``, as ``horovod.common.elastic`` has it: ``reset`` is not needed in a new process."""
    del reset
    return run(func)


class _StateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state


class CommitStateCallback(_StateCallback):
    """Commits the state after so many batches of ``fit``, and at the end of each epoch.

    Put it behind those that update the state.
    """

    def __init__(self, state: ObjectState, batches_per_commit: int = 1) -> None:
        super().__init__(state)
        self.batches_per_commit = batches_per_commit

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        before, self._batches = self._batches, batch + 1
        # steps_per_execution may step over a multiple.
        if self._batches // self.batches_per_commit > before // self.batches_per_commit:
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(_StateCallback):
    """Keeps ``state.batch`` at the number of batches of the epoch that are done."""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.batch = batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(_StateCallback):
    """Keeps ``state.epoch`` at the number of epochs that are done, in all starts together."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._before: int | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # Keras counts from 0, or from the initial_epoch of fit, which may be state.epoch.
        if self._before is None:
            self._before = self.state.epoch - epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        assert self._before is not None
        self.state.epoch = self._before + epoch + 1


_NO_PARTS = (
    "hvd.elastic's commits have those of rank 0 alone (shard_state, a divided table). Train by fit "
    "with hvd.callbacks.Checkpoint, which saves all parts, and hvdrun --max-restarts; in a loop of "
    "your own, leave shard_state and shard out."
)


def _check_shapes(stored: Sequence[Any], own: Sequence[Any]) -> None:
    theirs, ours = ([(value.dtype.name, value.shape) for value in v] for v in (stored, own))
    if theirs != ours:
        raise ValueError(
            f"hvd.elastic.run: the commit has {len(theirs)} variables, this model and optimizer "
            f"{len(ours)}, of other shapes or dtypes. Set HVD_COMMITS to a folder of this training."
        )
