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
from hvd_keras.hooks.variables import broadcast_variables as _broadcast_variables
from hvd_keras.ops import validate
from hvd_keras.ops.reduction import Compression, Compressor, chosen
from hvd_keras.runtime import objects
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set

_Function = TypeVar("_Function", bound=Callable[..., Any])


def check_included(kind: str, process_set: ProcessSet) -> None:
    """Raise Horovod's exception if this rank may not make the call."""
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
        # hvd_keras's gradients are those of the sum of the ranks' losses.
        factor = 1 / process_set.size() if averages_gradients else 1.0
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


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ops.ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """``hvd_keras.grouped_allreduce``; averages and scaled sums of integers are truncated.

    Raises:
        NotImplementedError: ``tf.IndexedSlices`` with another op than Average or Sum.
        tf.errors.InvalidArgumentError: this rank is not in the process set.
        As ``hvd_keras.grouped_allreduce`` besides.
    """
    check_included("allreduce", process_set)
    with validate.on_all_ranks("allreduce", name or "unnamed", process_set):
        validate.check_average(average)
        reduction = chosen(average, op)
        for tensor in tensors:
            if isinstance(tensor, tf.IndexedSlices) and reduction not in (ops.Average, ops.Sum):
                raise NotImplementedError(
                    f"hvd.allreduce: got tf.IndexedSlices with op=hvd.{reduction.value}, expected "
                    "hvd.Average or hvd.Sum. Use tf.convert_to_tensor first."
                )
        integers = [_is_integer(tensor) for tensor in tensors]

    def reduce(tensors: Sequence[Any], **scaling: Any) -> list[Any]:
        return ops.grouped_allreduce(
            tensors,
            name=name,
            device_dense=device_dense,
            device_sparse=device_sparse,
            compression=compression,
            process_set=process_set,
            ignore_name_scope=ignore_name_scope,
            **scaling,
        )

    factors = prescale_factor, postscale_factor
    return _scaled(reduce, tensors, any(integers), reduction, factors, process_set)


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


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ops.ReduceOp = ops.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    ignore_name_scope: bool = False,
) -> list[tf.Tensor]:
    """``hvd_keras.grouped_reducescatter`` with Horovod's gradient: size() times ours.

    Raises:
        tf.errors.InvalidArgumentError: this rank is not in the process set.
        As ``hvd_keras.grouped_reducescatter`` besides.
    """
    check_included("reducescatter", process_set)
    with validate.on_all_ranks("reducescatter", name or "unnamed", process_set):
        integers = [_is_integer(tensor) for tensor in tensors]

    def reduce(tensors: Sequence[Any], **scaling: Any) -> list[Any]:
        return ops.grouped_reducescatter(
            tensors,
            device_dense,
            compression,
            process_set=process_set,
            name=name,
            ignore_name_scope=ignore_name_scope,
            **scaling,
        )

    factors = prescale_factor, postscale_factor
    results = _scaled(reduce, tensors, any(integers), op, factors, process_set)
    return [_with_gradient_times(process_set.size(), x) for x in results]


@in_order(
    "tensor device_dense compression op name process_set ignore_name_scope prescale_factor "
    "postscale_factor",
    like=grouped_reducescatter,
)
def reducescatter(tensor: Any, **given: Any) -> Any:
    """``grouped_reducescatter`` of one tensor."""
    return grouped_reducescatter([tensor], **given)[0]


def _scaled(
    reduce: Callable[..., list[Any]],
    tensors: Sequence[Any],
    has_integers: bool,
    op: ops.ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> list[Any]:
    """Return ``reduce(tensors)``; averages and scale factors of integers are truncated."""
    before, after = factors
    if not has_integers or (op is not ops.Average and factors == (1.0, 1.0)):
        return reduce(tensors, op=op, prescale_factor=before, postscale_factor=after)
    # hvd_keras refuses these, so this scales the whole group, which is one request.
    divisor = process_set.size() if op is ops.Average else 1
    kind = ops.Sum if op is ops.Average else op
    sums = reduce([_truncated(x, before) for x in tensors], op=kind)
    return [_truncated(x, after, divisor) for x in sums]


def _is_integer(tensor: Any) -> bool:
    if isinstance(tensor, tf.IndexedSlices):
        return bool(tensor.values.dtype.is_integer)
    return bool(tf.convert_to_tensor(tensor).dtype.is_integer)


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
