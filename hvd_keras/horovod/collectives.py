"""What ``horovod.tensorflow`` has for tensors, variables and objects, where hvd_keras differs.

A rank outside of the process set gets TensorFlow's error. Averages and scale factors of integers
are truncated. The gradients of allgather, broadcast and reducescatter are those of the mean of the
ranks' losses, not of their sum.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from hvd_keras import ops
from hvd_keras.ops import validate
from hvd_keras.runtime import objects, process_sets
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set
from hvd_keras.runtime.reductions import chosen
from hvd_keras.training.broadcasting import broadcast_variables as _broadcast_variables

_Function = TypeVar("_Function", bound=Callable[..., Any])


def check_included(kind: str, process_set: ProcessSet) -> None:
    """Raise Horovod's exception if this rank may not make the call."""
    process_sets.check_type(process_set, kind)
    process_set.id()
    if not process_set.included():
        raise tf.errors.InvalidArgumentError(
            None,
            None,
            f"hvd.{kind}: this rank is not in {process_set}. Call it only on those ranks: "
            "if process_set.included(): ...",
        )


def _with_gradient_times(factor: float, tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor; gradients that flow through it are multiplied."""
    if factor == 1.0 or not tensor.dtype.is_floating:
        return tensor

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def identity(value: tf.Tensor) -> Any:
        return tf.identity(value), lambda upstream: upstream * tf.cast(factor, upstream.dtype)

    return identity(tensor)


def _adapted(function: _Function, averages_gradients: bool = False) -> _Function:
    """Return a function of hvd_keras, which raises Horovod's error outside of its process set."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        process_set = given.arguments["process_set"]
        check_included(function.__name__, process_set)
        results = function(*args, **kwargs)
        if not averages_gradients:
            return results
        # hvd_keras's gradients are those of the sum of the ranks' losses.
        factor = 1 / process_set.size()
        return tf.nest.map_structure(lambda x: _with_gradient_times(factor, x), results)

    return call  # type: ignore[return-value]


def in_order(
    names: str, like: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function: it takes these arguments, in this order, and gets them by name.

    Args:
        names: separated by spaces. The first is required.
        like: the function that has the defaults; None is that of arguments that it lacks.
    """
    known = inspect.signature(like).parameters
    first, *others = names.split()
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(first, positional)]
    for name in others:
        default = known[name].default if name in known else None
        parameters.append(inspect.Parameter(name, positional, default=default))
    signature = inspect.Signature(parameters)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(**signature.bind(*args, **kwargs).arguments)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


allgather = _adapted(ops.allgather, averages_gradients=True)
grouped_allgather = _adapted(ops.grouped_allgather, averages_gradients=True)
broadcast = _adapted(ops.broadcast, averages_gradients=True)
alltoall = _adapted(ops.alltoall)
broadcast_variables = _adapted(_broadcast_variables)
broadcast_object = _adapted(objects.broadcast_object)
allgather_object = _adapted(objects.allgather_object)
barrier = _adapted(ops.barrier)


@functools.wraps(objects.broadcast_object_fn)
def broadcast_object_fn(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """As in hvd_keras."""
    given = inspect.signature(objects.broadcast_object_fn).bind(*args, **kwargs).arguments
    return functools.partial(broadcast_object, **given)


def _truncating(function: _Function, gradient_times_size: bool = False) -> _Function:
    """Return a grouped reduction of hvd_keras that also takes averages and factors of integers.

    It raises NotImplementedError for ``tf.IndexedSlices`` with another op than Average or Sum, and
    Horovod's error outside of its process set.
    """
    signature, kind = inspect.signature(function), function.__name__.removeprefix("grouped_")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> list[Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        tensors, process_set = given.pop("tensors"), given["process_set"]
        check_included(kind, process_set)
        tensors = validate.listed(kind, tensors)
        with validate.on_all_ranks(kind, given["name"] or "unnamed", process_set):
            average = given.pop("average", None)
            validate.check_average(average)
            op = given["op"] = chosen(average, given["op"])
            for tensor in tensors:
                if isinstance(tensor, tf.IndexedSlices) and op not in (ops.Average, ops.Sum):
                    raise NotImplementedError(
                        f"hvd.{kind}: got tf.IndexedSlices with op=hvd.{op.value}, expected "
                        "hvd.Average or hvd.Sum. Use tf.convert_to_tensor first."
                    )
            values = [tf.convert_to_tensor(getattr(x, "values", x)) for x in tensors]
        before, after = given["prescale_factor"], given["postscale_factor"]
        has_integers = any(value.dtype.is_integer for value in values)
        if not has_integers or (op is not ops.Average and before == after == 1.0):
            results = function(tensors, **given)
        else:
            # hvd_keras refuses these, so this scales the whole group, which is one request.
            divisor = process_set.size() if op is ops.Average else 1
            given["op"] = ops.Sum if op is ops.Average else op
            given["prescale_factor"] = given["postscale_factor"] = 1.0
            sums = function([_truncated(x, before) for x in tensors], **given)
            results = [_truncated(x, after, divisor) for x in sums]
        factor = process_set.size() if gradient_times_size else 1.0
        return [_with_gradient_times(factor, x) for x in results]

    return call  # type: ignore[return-value]


grouped_allreduce = _truncating(ops.grouped_allreduce)
grouped_reducescatter = _truncating(ops.grouped_reducescatter, gradient_times_size=True)


@in_order(
    "tensor average device_dense device_sparse compression op prescale_factor postscale_factor "
    "name process_set ignore_name_scope",
    like=grouped_allreduce,
)
def allreduce(tensor: Any, **given: Any) -> Any:
    """``grouped_allreduce`` of one tensor."""
    return grouped_allreduce([tensor], **given)[0]


@in_order(
    "tensor name op prescale_factor postscale_factor ignore_name_scope process_set", like=allreduce
)
def _allreduce(tensor: Any, op: ops.ReduceOp = ops.Sum, **given: Any) -> Any:
    """Return what Horovod's ``allreduce`` calls, and programs call, too: its default is the sum."""
    return allreduce(tensor, op=op, **given)


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """As ``hvd_keras.broadcast_variables``; returns the variables' new values."""
    del name
    variables = list(variables)
    assignment = _broadcast_variables(variables, root_rank, process_set)
    with tf.control_dependencies([] if assignment is None else [assignment]):
        return [tf.identity(variable) for variable in variables]


@in_order(
    "tensor device_dense compression op name process_set ignore_name_scope prescale_factor "
    "postscale_factor",
    like=grouped_reducescatter,
)
def reducescatter(tensor: Any, **given: Any) -> Any:
    """``grouped_reducescatter`` of one tensor."""
    return grouped_reducescatter([tensor], **given)[0]


def _truncated(tensor: Any, factor: float, divisor: int = 1) -> Any:
    """``tensor * factor / divisor``, rounded towards zero where Horovod does it."""
    if factor == 1.0 and divisor == 1:
        return tensor
    if isinstance(tensor, tf.IndexedSlices):
        values = tensor.values / divisor if divisor > 1 else tensor.values  # not truncated
        values = _truncated(values, factor)
        return tf.IndexedSlices(values, tensor.indices, tensor.dense_shape)
    tensor = tf.convert_to_tensor(tensor)
    return tf.cast(tf.cast(tensor, tf.float64) * factor / divisor, tensor.dtype)
