"""Allreduce: every rank gets the sum, mean, ... of all ranks' tensors."""

import contextvars
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvd_keras.ops import validate
from hvd_keras.ops.reduction import (
    Compression,
    Compressor,
    check_reducible,
    wire_dtype,
)
from hvd_keras.ops.slices import reduce_slices
from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import converted
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set
from hvd_keras.runtime.reductions import Adasum, Average, ReduceOp, Sum, chosen

_own = contextvars.ContextVar("hvd_keras reduces for itself", default=False)
_waits = contextvars.ContextVar("a GPU's stream waits for the results", default=True)


def is_reduced(gradient: Any, of_tapes: Mapping[Any, Collection[str]]) -> bool:
    """Whether a gradient of a graph is computed from what it has exchanged.

    Args:
        gradient: a tensor, or IndexedSlices.
        of_tapes: by graph, the names of what tapes have returned: earlier exchanges, such as those
            of a layer, do not count.
    """
    gradient = getattr(gradient, "values", gradient)
    seen, found = set(), [gradient.op] if tf.is_symbolic_tensor(gradient) else []
    while found:
        op = found.pop()
        if op in seen:
            continue
        seen.add(op)
        if _exchanges(op):
            return True
        if any(value.name in of_tapes.get(op.graph, ()) for value in op.outputs):
            continue
        found += [value.op for value in op.inputs]
        # What is assigned to the variables that it reads, such as sums of several steps.
        handles = [value for value in op.inputs if value.dtype == tf.resource]
        users = [user for handle in handles for user in handle.consumers()]
        found += [user for user in users if user.type.startswith("Assign")]
    return False


def _exchanges(op: tf.Operation) -> bool:
    """Whether an op, or a function that it calls, is one of ``native/tensorflow``."""
    return op.type.startswith("Hvd") or any(map(_exchanges, called_by(op)))


def called_by(op: tf.Operation) -> Iterator[tf.Operation]:
    """Yield the ops of the functions that an op calls, as far as they are known."""
    attributes = op.node_def.attr.values()
    for name in [f.name for value in attributes for f in (value.func, *value.list.func) if f.name]:
        graph = getattr(op.graph._get_function(name), "graph", None)
        yield from () if graph is None else graph.get_operations()


def has_reduced(arrays: bool = False) -> bool:
    """Whether the script has called ``allreduce``, of more than numbers if ``arrays``."""
    return _has_reduced_arrays if arrays else _has_reduced


_has_reduced = _has_reduced_arrays = False


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Combine the ranks' tensors; all ranks get the result, bit for bit the same.

    Terms are combined in the order of the ranks; float16 and bfloat16 are accumulated in float32.

    Args:
        tensor: a tensor of any numeric dtype (bool with Min and Max), of the same dtype and shape
            on all ranks; or ``tf.IndexedSlices``, which are gathered (Average and Sum only), with
            any number of slices per rank.
        average: Horovod's older form of ``op``: True is Average, False is Sum.
        device_dense: the TensorFlow device on which a dense tensor is exchanged; default: its own.
        device_sparse: the same for ``tf.IndexedSlices``.
        compression: how the tensor is sent: ``hvd.Compression.none``, ``.fp16`` or ``.bf16``.
        op: ``hvd.Average`` (default; floating-point tensors only), ``Sum``, ``Min``, ``Max``,
            ``Product``, or ``Adasum`` (floating-point tensors only; Maleki et al., 2020,
            https://arxiv.org/abs/2006.02924), which adds vectors that are orthogonal and averages
            those that are parallel, pair by pair of neighbouring ranks; it has no gradient.
        prescale_factor: multiplies every rank's tensor, as it was sent, before the reduction.
        postscale_factor: multiplies the result.
        name: identifies the call on all ranks; only needed if calls have no fixed order.
        process_set: the ranks that take part; all of them must make the call.
        ignore_name_scope: accepted for Horovod's scripts; names never depend on name scopes.

    Returns:
        A tensor of the same dtype and shape; ``tf.IndexedSlices`` if the input is one.

    Raises:
        TypeError: the tensor has a dtype that cannot be reduced, or an argument has a wrong type,
            for example because positional arguments are in another order.
        ValueError: the arguments contradict each other or do not fit the dtype, or this rank is
            not in the process set.
        tf.errors.FailedPreconditionError: (on every rank) the ranks' tensors differ in dtype or
            shape, or ``op`` or the factors differ, or (in eager code) only some ranks have one of
            the errors above.
        tf.errors.AbortedError: a rank has left the job.
    """
    return grouped_allreduce(
        *([tensor], average, device_dense, device_sparse, compression, op),
        *(prescale_factor, postscale_factor, process_set, ignore_name_scope, name),
    )[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """``allreduce`` of several tensors as one request: one agreement for all of them.

    Args:
        tensors: tensors of any dtypes, also mixed; dense or ``tf.IndexedSlices``.
        average, device_dense, device_sparse, compression, op, prescale_factor, postscale_factor,
            process_set, ignore_name_scope, name: as in ``allreduce``.

    Returns:
        The results in the order of ``tensors``.

    Raises:
        As ``allreduce``.
    """
    global _has_reduced, _has_reduced_arrays
    del ignore_name_scope
    _has_reduced |= not _own.get()
    validate.check("allreduce", process_set)
    name = validate.name("allreduce", name, process_set)
    tensors = validate.listed("allreduce", tensors)
    only_slices = bool(tensors) and all(isinstance(x, tf.IndexedSlices) for x in tensors)
    request = ("allgather", f"{name}.slices") if only_slices else ("allreduce", name)
    with validate.on_all_ranks(*request, process_set):
        validate.check_average(average)
        validate.check_compression("allreduce", compression)
        reduction = chosen(average, op)
        results = [validate.checked("allreduce", tensor) for tensor in tensors]
        for tensor in results:
            check_reducible("allreduce", tensor, reduction, prescale_factor, postscale_factor)
    # Dense and sparse ones are two requests, in this order on all ranks.
    sparse = [i for i, tensor in enumerate(results) if isinstance(tensor, tf.IndexedSlices)]
    dense = [i for i, tensor in enumerate(results) if not isinstance(tensor, tf.IndexedSlices)]
    are_arrays = bool(sparse) or any(results[i].shape.rank != 0 for i in dense)
    _has_reduced_arrays |= are_arrays and not _own.get()
    if dense:
        wire = wire_dtype(compression)
        # The core rounds while it packs, but not for Adasum and not on GPUs: round here then.
        if compression is not Compression.none and (
            reduction is Adasum or tf.config.get_visible_devices("GPU")
        ):
            wire = None
        outside = compression if wire is None else Compression.none
        packed = [converted(outside.compress)(results[i]) for i in dense]
        with tf.device(device_dense or None):
            reduced = _allreduce_dense(
                [tensor for tensor, _ in packed],
                reduction,
                prescale_factor,
                postscale_factor,
                tensor_name=name,
                process_set=process_set.id(),
                wire_dtype=(wire or tf.float64).name,  # float64 rounds nothing
            )
        for i, tensor, (_, context) in zip(dense, reduced, packed, strict=True):
            results[i] = converted(outside.decompress)(tensor, context)
    if sparse:
        slices = [results[i] for i in sparse]
        factor = prescale_factor * postscale_factor
        with tf.device(device_sparse or None):
            gathered = reduce_slices(slices, compression, reduction, factor, name, process_set)
        for i, one in zip(sparse, gathered, strict=True):
            results[i] = one
    return results


def reduce_tensors(tensors: Sequence[Any], waits: bool = True, **options: Any) -> list[Any]:
    """``grouped_allreduce`` for hvd_keras itself, which ``has_reduced`` does not count.

    Args:
        waits: False: only ``wait_for`` may use the dense results, which a GPU may not have yet;
            ``device_dense`` and ``compression`` must have their defaults.
        tensors, options: as in ``grouped_allreduce``.
    """
    with agree.within(_own, True), agree.within(_waits, waits):
        return grouped_allreduce(tensors, **options)


def wait_for(tensors: Sequence[Any], process_set: ProcessSet) -> list[Any]:
    """Give tensors on that ``reduce_tensors(waits=False)`` has returned, all of one process set.

    What else a GPU has been given by then does not wait for them.
    """
    with tf.compat.v1.colocate_with(tensors[0]):
        return list(validate.raw.hvd_wait(tensors, process_set=process_set.id()))


def _allreduce_dense(
    tensors: list[tf.Tensor],
    reduction: ReduceOp,
    prescale: float,
    postscale: float,
    **call: Any,
) -> list[tf.Tensor]:
    if reduction in (Average, Sum, Adasum):
        return list(
            validate.raw.hvd_allreduce(
                tensors,
                reduction=reduction.value,
                # As text, which keeps all bits; an attribute of an op is a float32.
                prescale_factor=repr(float(prescale)),
                postscale_factor=repr(float(postscale)),
                waits=_waits.get(),
                **call,
            )
        )

    # The gradients of the other reductions compare inputs with outputs, so TensorFlow scales here.
    # The note makes the ranks compare their factors nevertheless.
    def scaled(values: list[tf.Tensor], factor: float) -> list[tf.Tensor]:
        return values if factor == 1.0 else [v * tf.constant(factor, v.dtype) for v in values]

    reduced = validate.raw.hvd_allreduce(
        scaled(tensors, prescale),
        reduction=reduction.value,
        note=f"prescale_factor={float(prescale)!r} postscale_factor={float(postscale)!r}",
        **call,
    )
    return scaled(list(reduced), postscale)
