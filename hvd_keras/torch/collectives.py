"""The collectives on torch's tensors, eager, with gradients and without copies.

Every rank of the process set makes the same calls; the k-th calls of one name belong together.
"""

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hvd_keras.gradients import missing_calls, specs
from hvd_keras.runtime import agree, flight
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set
from hvd_keras.runtime.reductions import Adasum, Average, Max, Min, ReduceOp, Sum, chosen
from hvd_keras.training.variables import give_each_rank_its_own_randomness

Tensors = Sequence[torch.Tensor]


@functools.cache
def name_of(dtype: torch.dtype) -> str:
    """Return NumPy's name of a dtype, or ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def checked(kind: str, tensor: Any) -> torch.Tensor:
    """Return what can be sent: a contiguous tensor on the CPU or a CUDA GPU.

    Raises:
        NotImplementedError: it is elsewhere.
        TypeError: the core does not know its dtype.
    """
    tensor = torch.as_tensor(getattr(tensor, "value", tensor))  # of a Keras variable
    if tensor.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"hvd.{kind}: got a tensor on {tensor.device}, expected one on the CPU or on a CUDA "
            "GPU. Move it there: tensor.cpu()."
        )
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if name_of(tensor.dtype) not in agree.DTYPES:
        raise TypeError(
            f"hvd.{kind}: got a tensor of dtype {name_of(tensor.dtype)}, expected one of "
            f"{', '.join(sorted(agree.DTYPES))}. Encode it as one of these first."
        )
    return tensor.contiguous()


def all_checked(kind: str, tensors: Iterable[Any]) -> list[torch.Tensor]:
    """Return tensors as ``checked`` does. ValueError if they are not on one device."""
    found = [checked(kind, tensor) for tensor in tensors]
    if len(places := {str(tensor.device) for tensor in found}) > 1:
        raise ValueError(
            f"hvd.{kind}: got tensors on {', '.join(sorted(places))} in one call. Move them to one "
            "device, or make a call for each."
        )
    return found


class Exchange:
    """A request on its way; ``results`` waits for it.

    On a GPU it follows what torch's current stream has been given, and that stream then follows it.

    Args:
        kind, call: as for ``agree.Request``.
        tensors: as ``all_checked`` returns them, splits on the CPU; unchanged until ``results``
            returns.
        outputs: what the results are written into, of the same shapes; default: new tensors.
    """

    def __init__(self, kind: str, tensors: Tensors, outputs: Tensors = (), **call: Any) -> None:
        self._inputs = [tensor.detach() for tensor in tensors]
        self._dtypes = [tensor.dtype for tensor in self._inputs]
        # The core rounds what MPI adds up; NCCL, and these, get what is rounded.
        is_exact = kind == "reducescatter" or call.get("reduction") == Adasum.value
        if "wire" in call and (is_exact or self._inputs[0].is_cuda):
            wire = getattr(torch, call.pop("wire"))
            are_wide = [t.is_floating_point() and t.itemsize > wire.itemsize for t in self._inputs]
            pairs = zip(self._inputs, are_wide, strict=True)
            self._inputs = [t.to(wire) if is_wide else t for t, is_wide in pairs]
            outputs = () if any(are_wide) else outputs
        if kind in ("allreduce", "broadcast") and not outputs:
            outputs = list(map(torch.empty_like, self._inputs))
        self._results = dict(enumerate(outputs))
        self._stream: Any = None
        if self._inputs[0].is_cuda:
            self._stream = torch.cuda.current_stream(self._inputs[0].device)
            call |= {"device": self._stream.device_index, "stream": self._stream.cuda_stream}
            for tensor in [t for t in (*self._inputs, *outputs) if t.is_cuda]:
                tensor.record_stream(self._stream)  # may be of another
        inputs = [
            agree.Memory.at(t.data_ptr(), name_of(t.dtype), tuple(t.shape)) for t in self._inputs
        ]
        there = [tensor.data_ptr() for tensor in outputs] or None
        call["allocate"] = agree.Allocate(self._allocate)
        self._request = agree.Request(kind, inputs, there, (self._inputs, outputs), **call)

    def _allocate(self, index: int, dims: int, shape: Any) -> int | None:
        like = self._inputs[index]
        try:
            with torch.cuda.stream(self._stream):
                result = torch.empty(shape[:dims], dtype=like.dtype, device=like.device)
        except RuntimeError:  # the core says that there is no memory
            return None
        self._results[index] = result
        return int(result.data_ptr())

    def results(self) -> list[torch.Tensor]:
        """Return the results. Raises as ``agree.Request.wait``."""
        self._request.wait()
        if self._stream is not None:  # another one may be current now
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._request.release()
        return [self._results[i].to(dtype) for i, dtype in enumerate(self._dtypes)]


class Compression:
    """The widest dtype in which floating-point values are sent: ``none``, ``fp16``, ``bf16``."""

    none = "float64"  # nothing is wider, so nothing is rounded
    fp16 = "float16"
    bf16 = "bfloat16"


def check_compression(compression: Any) -> None:
    """Raise TypeError unless it is one of ``Compression``."""
    if compression not in (Compression.none, Compression.fp16, Compression.bf16):
        raise TypeError(
            f"compression is {compression!r}, expected hvd.Compression.none, .fp16 or .bf16; on "
            "PyTorch there is no compression of your own."
        )


@contextlib.contextmanager
def _on_all_ranks(
    kind: str, name: str | None, process_set: ProcessSet, *more: Any, **call: Any
) -> Iterator[dict[str, Any]]:
    """Yield the call's arguments, while ``agree.refused_on_all_ranks`` hears of errors in them."""
    process_set.check_included(kind)
    name = name or "unnamed"
    flight.note_call(f"{kind} '{name}'")
    with agree.refused_on_all_ranks(kind, name, process_set, *more, **call):
        yield {**call, "name": name, "process_set": process_set.id()}


class _Collective(torch.autograd.Function):  # type: ignore[misc]
    """Calls ``gradient`` with what arrives at the results; it returns what goes on to the tensors.

    It calls collectives, which have gradients themselves.

    See docs/design.md, "Gradients of the collectives".
    """

    @staticmethod
    def forward(ctx: Any, kind: str, call: dict[str, Any], gradient: Any, *tensors: Any) -> Any:
        ctx.gradient = gradient
        return tuple(Exchange(kind, tensors, **call).results())

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return None, None, None, *ctx.gradient(*upstream)


def _reduction(
    kind: str, tensors: Sequence[Any], op: ReduceOp, wire: str, prescale: float, postscale: float
) -> dict[str, Any]:
    """Check how tensors are to be reduced, and return it as arguments of an ``Exchange``."""
    check_compression(wire)
    factors = prescale, postscale
    for tensor in tensors:
        got = f"hvd.{kind}: got a tensor of dtype {tensor.dtype} with op=hvd.{op.value}"
        if tensor.dtype is torch.bool and op not in (Min, Max):
            raise ValueError(f"{got}. Use hvd.Min (logical and) or hvd.Max (logical or).")
        if not tensor.is_floating_point() and (op in (Average, Adasum) or set(factors) != {1.0}):
            raise ValueError(
                f"{got}{f' and factors {factors}' if set(factors) != {1.0} else ''}, whose result "
                "would be rounded. Use op=hvd.Sum, or cast it to float32."
            )
    return {"reduction": op.value, "wire": wire, "prescale": prescale, "postscale": postscale}


def _with_rows(kind: str, tensors: Sequence[Any]) -> list[torch.Tensor]:
    found = all_checked(kind, tensors)
    if not all(tensor.dim() for tensor in found):
        raise ValueError(
            f"hvd.{kind}: got a scalar, expected a tensor with at least one dimension. Use "
            "tensor.reshape(1)."
        )
    return found


def allreduce(tensor: Any, **options: Any) -> torch.Tensor:
    """Combine the tensors of all ranks, element by element, as on TensorFlow.

    Args:
        tensor: of any shape, the same on all ranks.
        options: as of ``grouped_allreduce``.

    Returns:
        A new tensor of the same dtype and shape.

    Raises:
        NotImplementedError: the tensor is neither on the CPU nor on a CUDA GPU.
        TypeError, ValueError: the tensor or an argument is impossible.
        FailedPreconditionError: (on every rank) the ranks' tensors or arguments differ.
        AbortedError: a rank has left the job.
    """
    return grouped_allreduce([tensor], **options)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    *,
    average: bool | None = None,
    compression: str = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """``allreduce`` of several tensors as one request.

    Args:
        tensors: the same number on all ranks.
        average, op: ``hvd.Average`` (default; floating-point tensors only), ``Sum``, ``Min``,
            ``Max``, ``Product`` or ``Adasum``. The first two have gradients.
        compression: ``hvd.Compression.none``, ``fp16`` or ``bf16``.
        prescale_factor, postscale_factor: multiply every rank's tensor, and the result.
        name: identifies the call on all ranks; only needed if calls have no fixed order.
        process_set: the ranks that take part.
    """
    with _on_all_ranks("allreduce", name, process_set) as call:
        mine = all_checked("allreduce", tensors)
        op = chosen(average, op)
        how = op, compression, prescale_factor, postscale_factor
        call |= _reduction("allreduce", mine, *how)

    def gradient(*upstream: torch.Tensor) -> list[torch.Tensor]:
        if op not in (Average, Sum):
            raise NotImplementedError(
                f"hvd.allreduce with op=hvd.{op.value} has no gradient on PyTorch."
            )
        same: dict[str, Any] = {"op": op, "compression": compression, "process_set": process_set}
        same |= {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
        return grouped_allreduce(upstream, name=f"{call['name']}.gradient", **same)

    return list(_Collective.apply("allreduce", call, gradient, *mine)) if mine else []


def allgather(tensor: Any, **options: Any) -> torch.Tensor:
    """Concatenate all ranks' tensors along the first dimension, which may differ by rank.

    Args (``name`` and ``process_set``) and errors as in ``allreduce``; a scalar is a ValueError.
    """
    return grouped_allgather([tensor], **options)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """``allgather`` of several tensors as one request."""
    with _on_all_ranks("allgather", name, process_set) as call:
        mine = _with_rows("allgather", tensors)
    counts = [len(tensor) for tensor in mine]

    def gradient(*upstream: torch.Tensor) -> Iterator[torch.Tensor]:
        name = f"{call['name']}.gradient"
        total = grouped_allreduce(upstream, op=Sum, name=name, process_set=process_set)
        # [ranks, tensors]: the rows of each rank, of which the earlier ones come first.
        mine = [np.array([counts])]
        (rows,) = agree.run("allgather", mine, name=name, process_set=process_set.id())
        starts = rows[: process_set.rank()].sum(0).tolist()
        parts = zip(total, starts, counts, strict=True)
        return (whole[start : start + count] for whole, start, count in parts)

    return list(_Collective.apply("allgather", call, gradient, *mine)) if mine else []


def broadcast(
    tensor: Any,
    root_rank: int,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Give every rank the tensor of the rank ``root_rank``, of one dtype and shape on all ranks.

    Args and errors as in ``allreduce``; a root that does not take part is a ValueError.
    """
    return grouped_broadcast([tensor], root_rank, name, process_set)[0]


def grouped_broadcast(
    tensors: Sequence[Any], root_rank: int, name: str | None, process_set: ProcessSet
) -> list[torch.Tensor]:
    """``broadcast`` of several tensors as one request."""
    with _on_all_ranks("broadcast", name, process_set, root=process_set.ranks[0]) as call:
        mine = all_checked("broadcast", tensors)
        process_set.check_root(root_rank)
    call["root"] = root_rank
    is_root = process_set.ranks[process_set.rank()] == root_rank

    def gradient(*upstream: torch.Tensor) -> list[torch.Tensor]:
        name = f"{call['name']}.gradient"
        total = grouped_allreduce(upstream, op=Sum, name=name, process_set=process_set)
        # Zeros elsewhere, of which all ranks take further derivatives.
        return [torch.where(torch.tensor(is_root, device=x.device), x, 0) for x in total]

    return list(_Collective.apply("broadcast", call, gradient, *mine)) if mine else []


def alltoall(
    tensor: Any,
    splits: Any = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of the tensor to each rank, by ``splits`` or equally many, and get rows from each.

    Args and errors as in ``allreduce``; InvalidArgumentError (on every rank) if splits do not fit.

    Returns:
        The received rows; with ``splits``, and the number of rows from each rank (int32).
    """
    size = process_set.size()
    with _on_all_ranks("alltoall", name, process_set, np.zeros(size, np.int64)) as call:
        (mine,) = _with_rows("alltoall", [tensor])
        rows = checked("alltoall", [len(mine) // size] * size if splits is None else splits)
        if rows.is_floating_point():
            raise TypeError(f"hvd.alltoall: splits is {splits!r}, expected integers.")

    def gradient(upstream: torch.Tensor, _: Any) -> tuple[torch.Tensor, None]:
        name = f"{call['name']}.gradient"
        return alltoall(upstream, counts, name=name, process_set=process_set)[0], None

    sent = mine, rows.to("cpu", torch.int64)
    received, counts = _Collective.apply("alltoall", call, gradient, *sent)
    return received if splits is None else (received, counts.to(torch.int32))


def reducescatter(tensor: Any, **options: Any) -> torch.Tensor:
    """``allreduce`` by ``hvd.Average`` or ``hvd.Sum``, of which each rank gets its share of rows.

    Args and errors as in ``allreduce``. The first ``rows % size`` ranks get one row more.
    """
    return grouped_reducescatter([tensor], **options)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    *,
    compression: str = Compression.none,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """``reducescatter`` of several tensors as one request."""
    with _on_all_ranks("reducescatter", name, process_set) as call:
        if op not in (Average, Sum):
            raise NotImplementedError(f"hvd.reducescatter: op is {op!r}, expected Average or Sum.")
        mine = _with_rows("reducescatter", tensors)
        how = op, compression, prescale_factor, postscale_factor
        call |= _reduction("reducescatter", mine, *how)
    factor = prescale_factor * postscale_factor
    if op is Average:
        factor /= process_set.size()

    def gradient(*upstream: torch.Tensor) -> list[torch.Tensor]:
        name, parts = f"{call['name']}.gradient", [part * factor for part in upstream]
        return grouped_allgather(parts, name=name, process_set=process_set)

    return list(_Collective.apply("reducescatter", call, gradient, *mine)) if mine else []


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set have called it."""
    process_set.check_included("barrier")
    agree.run("barrier", [], name="unnamed", process_set=process_set.id())


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Assign the root rank's values to the variables of every rank, as on TensorFlow.

    Raises:
        TypeError: one is no variable of Keras.
        ValueError: (on every rank) the ranks' variables differ, or the root is no rank.
    """
    process_set.check_included("broadcast_variables")
    variables = list(variables) if isinstance(variables, Iterable) else [variables]
    if odd := [type(one).__name__ for one in variables if not hasattr(one, "assign")]:
        raise TypeError(
            f"hvd.broadcast_variables: got a {odd[0]}, expected variables of Keras, such as "
            "model.variables. Send a tensor with hvd.broadcast."
        )
    if process_set.size() == 1:
        return
    if not variables:
        missing_calls.warn_of_empty_broadcast(process_set)
    # An optimizer's slots have Keras's counters in their last part: adam/dense_1_kernel_velocity.
    paths = [re.sub(r"_\d+(?=/|$|_[^/]*$)", "", variable.path) for variable in variables]
    pairs = zip(paths, variables, strict=True)
    described = [specs.VariableSpec(path, v.shape, v.dtype) for path, v in pairs]
    specs.check_specs("broadcast", described, process_set)
    for number, bucket in enumerate(specs.in_buckets(variables)):
        values = [variable.value.detach() for variable in bucket]
        values = grouped_broadcast(values, root_rank, f"variables {number}", process_set)
        for variable, value in zip(bucket, values, strict=True):
            variable.assign(value)
        missing_calls.synchronized.add(*bucket)
    seeds = [v for v in variables if specs.common_path(v.path).endswith("seed_generator_state")]
    give_each_rank_its_own_randomness(seeds, process_set)
