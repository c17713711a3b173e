"""What ``horovod.tensorflow`` has for tensors, variables and objects, where hvd_keras differs.

A rank outside of the process set gets TensorFlow's error. Averages and scale factors of integers
are computed in float64 and truncated; averages of sparse ones are floating-point numbers. The
gradients of allgather, broadcast and reducescatter are those of the mean of the ranks' losses, not
of their sum.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from hvd_keras import ops
from hvd_keras.hooks.variables import broadcast_variables as _broadcast_variables
from hvd_keras.ops import objects, validate
from hvd_keras.ops.reduction import Compression, Compressor, chosen
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


def _adapted(function: _Function, gradient: Callable[[int], float] | None = None) -> _Function:
    """Return the function, which raises ``InvalidArgumentError`` outside of its process set.

    Args:
        function: of hvd_keras, with an argument ``process_set``.
        gradient: the factor of the results' gradients, by the number of ranks. Default: none.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        process_set = given.arguments["process_set"]
        check_included(function.__name__, process_set)
        results = function(*args, **kwargs)
        if gradient is None:
            return results
        factor = gradient(process_set.size())
        return tf.nest.map_structure(lambda x: _with_gradient_times(factor, x), results)

    return call  # type: ignore[return-value]


def in_order(
    function: Callable[..., Any], names: str, call: Callable[[Any, dict[str, Any]], Any]
) -> Callable[..., Any]:
    """Return a function whose arguments are some of another one's, in another order.

    Args:
        function: the other one, whose defaults and docstring it has.
        names: the arguments, separated by spaces; the first has no default.
        call: calls ``function`` with the value of the first, and what else was given.
    """
    known = inspect.signature(function).parameters
    first, *others = names.split()
    tensor = inspect.Parameter(first, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature([tensor, *(known[name] for name in others)])

    @functools.wraps(function)
    def reordered(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        return call(given.pop(first), given)

    reordered.__signature__ = signature  # type: ignore[attr-defined]
    return reordered


def _mean(size: int) -> float:
    """Return the factor that makes of the sum of the ranks' losses their mean."""
    return 1 / size


allgather = _adapted(ops.allgather, _mean)
grouped_allgather = _adapted(ops.grouped_allgather, _mean)
broadcast = _adapted(ops.broadcast, _mean)
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


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: ops.ReduceOp = ops.Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return what Horovod's ``allreduce`` calls, and programs call, too: its default is the sum."""
    return allreduce(
        tensor,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
        ignore_name_scope=ignore_name_scope,
    )


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
        rounds = reduction is ops.Average or (prescale_factor, postscale_factor) != (1.0, 1.0)
        integers = [i for i, x in enumerate(tensors) if rounds and _is_integer(x)]
    options: dict[str, Any] = {
        "device_dense": device_dense,
        "device_sparse": device_sparse,
        "compression": compression,
        "process_set": process_set,
        "ignore_name_scope": ignore_name_scope,
    }
    others = [i for i in range(len(tensors)) if i not in integers]
    results = list(tensors)
    if others:
        reduced = ops.grouped_allreduce(
            [tensors[i] for i in others],
            op=reduction,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            name=name,
            **options,
        )
        for i, value in zip(others, reduced, strict=True):
            results[i] = value
    if integers:
        sums = ops.grouped_allreduce(
            [_truncated(tensors[i], prescale_factor) for i in integers],
            op=ops.Sum if reduction is ops.Average else reduction,
            name=name if name is None or not others else f"{name}.integers",
            **options,
        )
        divisor = process_set.size() if reduction is ops.Average else 1
        for i, value in zip(integers, sums, strict=True):
            if divisor > 1 and isinstance(value, tf.IndexedSlices):  # Horovod truncates others only
                value = tf.IndexedSlices(value.values / divisor, value.indices, value.dense_shape)
                results[i] = _truncated(value, postscale_factor)
            else:
                results[i] = _truncated(value, postscale_factor, divisor)
    return results


allreduce = in_order(
    grouped_allreduce,
    "tensor average device_dense device_sparse compression op prescale_factor postscale_factor "
    "name process_set ignore_name_scope",
    lambda tensor, given: grouped_allreduce([tensor], **given)[0],
)


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Assign the root's values to the variables of every rank, in place.

    Args:
        variables: in the same order on all ranks.
        root_rank: the rank whose values all get.
        name: not needed.
        process_set: the ranks that take part.

    Returns:
        The variables' new values.

    Raises:
        As ``hvd_keras.broadcast_variables``.
    """
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
    size = process_set.size()
    rounds = op is ops.Average or (prescale_factor, postscale_factor) != (1.0, 1.0)
    with validate.on_all_ranks("reducescatter", name or "unnamed", process_set):
        integers = [rounds and _is_integer(x) for x in tensors]
    if not any(integers):
        values = ops.grouped_reducescatter(
            *(tensors, device_dense, compression, op, process_set),
            *(prescale_factor, postscale_factor, name, ignore_name_scope),
        )
        return [_with_gradient_times(size, x) for x in values]
    # One request for all, so a group that mixes dtypes does all of its scaling outside.
    kind = ops.Sum if op is ops.Average else op
    mine = [_truncated(x, prescale_factor) for x in tensors]
    sums = ops.grouped_reducescatter(mine, device_dense, compression, kind, process_set, name=name)
    divisor = size if op is ops.Average else 1
    return [_with_gradient_times(size, _truncated(x, postscale_factor, divisor)) for x in sums]


reducescatter = in_order(
    grouped_reducescatter,
    "tensor device_dense compression op name process_set ignore_name_scope prescale_factor "
    "postscale_factor",
    lambda tensor, given: grouped_reducescatter([tensor], **given)[0],
)


def _is_integer(tensor: Any) -> bool:
    if isinstance(tensor, tf.IndexedSlices):
        return bool(tensor.values.dtype.is_integer)
    return bool(tf.convert_to_tensor(tensor).dtype.is_integer)


def _truncated(tensor: Any, factor: float, divisor: int = 1) -> Any:
    """``tensor * factor / divisor``, rounded towards zero where it has an integer dtype."""
    if factor == 1.0 and divisor == 1:
        return tensor
    if isinstance(tensor, tf.IndexedSlices):
        values = _truncated(tensor.values, factor, divisor)
        return tf.IndexedSlices(values, tensor.indices, tensor.dense_shape)
    tensor = tf.convert_to_tensor(tensor)
    return tf.cast(tf.cast(tensor, tf.float64) * factor / divisor, tensor.dtype)
