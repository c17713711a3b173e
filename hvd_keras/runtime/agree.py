"""Gathers small values from all ranks, so that every rank can make the same decision.

Below the public collectives, because process sets are created with it: arrays travel by the core's
C API, and no framework takes part.
"""

import contextlib
import contextvars
import ctypes
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import ml_dtypes
import numpy as np
import xxhash

from hvd_keras.runtime import libraries, rank_info

#: This rank traces a step alone, only to create its variables: nothing may wait for other ranks.
is_building = contextvars.ContextVar("hvd_keras is building a model", default=False)
#: Whether this rank tries something by itself, in which other ranks may not take part.
refuses = contextvars.ContextVar("hvd_keras exchanges nothing", default=False)

#: What the core can send, by NumPy's names.
DTYPES = {
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
}

_Result = TypeVar("_Result")


class Ranks(Protocol):
    """The ranks that take part, a ``process_sets.ProcessSet``."""

    @property
    def ranks(self) -> Sequence[int]: ...

    def id(self) -> int: ...

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def check_included(self, name: str) -> None: ...


@contextlib.contextmanager
def within(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    """Set a context variable in a block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class Memory(ctypes.Structure):
    """A tensor, for the core."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_char_p),
        ("dims", ctypes.c_int),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
    )

    @classmethod
    def at(cls, address: int, dtype: str, shape: Sequence[int]) -> "Memory":
        """Describe a tensor of this dtype (a name of NumPy's, or bfloat16) and shape."""
        return cls(address, *_described(dtype, tuple(shape)))


@functools.lru_cache(10_000)
def _described(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, int, Any]:
    return dtype.encode(), len(shape), (ctypes.c_int64 * len(shape))(*shape)


#: Returns the address of memory for a result, by its index, number of dimensions and shape.
Allocate = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64)
)


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_char_p) for name in ("kind", "name", "note", "reduction", "wire")),
        *((name, ctypes.c_int) for name in ("process_set", "root")),
        *((name, ctypes.c_double) for name in ("prescale", "postscale")),
        *(("device", ctypes.c_int), ("stream", ctypes.c_void_p), ("allocate", Allocate)),
    )


# Of requests that were aborted in the middle: late messages may still be written there.
_kept: list[Any] = []

# Requests that nobody has waited for: their memory stays, even if their owner gives them up.
_begun: set["Request"] = set()


class Request:
    """A request on its way.

    Args:
        kind: such as "allreduce".
        inputs: tensors, which the owner must keep unchanged until ``wait`` returns.
        outputs: the addresses of the results, if they have the inputs' shapes; else None.
        owner: what owns the memory.
        name: identifies the call on all ranks.
        process_set: the number of the set.
        note: text that must be equal on all ranks.
        reduction: the value of a ``ReduceOp``.
        wire: the widest floating-point dtype that is sent.
        root: the rank of the job that broadcasts.
        prescale, postscale: factors of the inputs and of the results.
        device: the CUDA device of all tensors but splits; -1: they are in the host's memory.
        stream: the address of the CUDA stream that makes the inputs and will use the results.
        allocate: called for each result without an output, on any thread; default: the core's own.
    """

    def __init__(
        self,
        kind: str,
        inputs: Sequence[Memory],
        outputs: Sequence[int] | None,
        owner: Any,
        *,
        name: str,
        process_set: int = 0,
        note: str = "",
        reduction: str = "Sum",
        wire: str = "float64",
        root: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        device: int = -1,
        stream: int = 0,
        allocate: Any = Allocate(),  # noqa: B008 (null)
    ) -> None:
        if refuses.get():
            raise RuntimeError(f"{kind} {name!r}: nothing is exchanged in a trial")
        # A note may have the name of a file, which may be no text.
        texts = kind, name, note, reduction, wire
        words = (text.encode(errors="backslashreplace") for text in texts)
        call = _Call(*words, process_set, root, prescale, postscale, device, stream, allocate)
        self._owner: Any = owner, inputs, allocate
        tensors = (Memory * len(inputs))(*inputs)
        there = outputs and (ctypes.c_void_p * len(outputs))(*outputs)
        self._core = libraries.core()
        self._pending = self._core.hvd_submit(ctypes.byref(call), tensors, len(inputs), there)
        _begun.add(self)

    def wait(self) -> None:
        """Wait for the results, without Python's lock; on a device, until ``stream`` waits.

        Raises:
            What ``libraries.exception_of`` makes of the code of the core.
        """
        if code := self._core.hvd_wait(self._pending):
            text = self._core.hvd_error().decode()
            self.release()
            raise libraries.exception_of(code, text)

    def result(self, index: int, dtype: Any) -> np.ndarray[Any, Any]:
        """Return a copy of a result that the core has allocated."""
        data, shape = ctypes.c_void_p(), ctypes.POINTER(ctypes.c_int64)()
        where = ctypes.byref(data), ctypes.byref(shape)
        dims = shape[: self._core.hvd_result(self._pending, index, *where)]
        size = math.prod(dims) * np.dtype(dtype).itemsize
        memory = (ctypes.c_char * size).from_address(data.value)  # string_at takes less than 2 GiB
        return np.frombuffer(memory, dtype).reshape(dims).copy()

    def release(self) -> None:
        """Free the request and its results."""
        if not self._core.hvd_release(self._pending):
            _kept.append(self._owner)
        self._owner = None
        _begun.discard(self)


def run(
    kind: str, arrays: Sequence[np.ndarray[Any, Any]], **call: Any
) -> list[np.ndarray[Any, Any]]:
    """Run a collective of arrays, as ``begin``; also while a framework traces a function."""
    return begin(kind, arrays, **call)()


def begin(
    kind: str, arrays: Sequence[np.ndarray[Any, Any]], **call: Any
) -> Callable[[], list[np.ndarray[Any, Any]]]:
    """Begin a collective of arrays, which nothing may change until it has ended.

    Args:
        kind, call: as for ``Request``.
        arrays: of dtypes that the core knows. For alltoall a tensor and its splits (int64).

    Returns:
        What waits for the results and returns them, new arrays; for alltoall the rows, and their
        number from each rank. Raises as ``Request.wait``.
    """
    mine = [np.ascontiguousarray(array).reshape(array.shape) for array in arrays]
    keeps_shape = kind in ("allreduce", "broadcast")
    results = [np.empty_like(array) for array in mine] if keeps_shape else []
    inputs = [Memory.at(array.ctypes.data, array.dtype.name, array.shape) for array in mine]
    outputs = [array.ctypes.data for array in results] or None
    request = Request(kind, inputs, outputs, (mine, results), **call)

    def finish() -> list[np.ndarray[Any, Any]]:
        request.wait()
        found = results
        if not keeps_shape:
            found = [request.result(i, array.dtype) for i, array in enumerate(mine)]
        request.release()
        return found

    return finish


# The types that an error keeps on ranks that do not have it themselves.
_KINDS = (OSError, ValueError, TypeError, NotImplementedError, RuntimeError)


def gather_json(name: str, value: Any, process_set: Ranks | None = None) -> list[Any]:
    """Return every rank's value, by rank. Also works while TensorFlow traces a function.

    Args:
        name: identifies the call on all ranks.
        value: anything that JSON can hold.
        process_set: the ranks that take part. Default: all. It must include this rank.
    """
    if (process_set.size() if process_set else rank_info.size()) == 1:
        return [value]
    # With NumPy's numbers, which scripts may give as arguments.
    text = json.dumps(value, default=lambda number: number.item())
    gathered = gather_bytes(name, text.encode(), process_set)
    return [json.loads(data) for data in gathered]


def gather_if_different(
    name: str, value: Any, process_set: Ranks | None = None
) -> list[Any] | None:
    """Return every rank's value, by rank; None if they are equal: then only hashes travel."""
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    if len(set(gather_json(name, digest, process_set))) == 1:
        return None
    return gather_json(f"{name} in full", value, process_set)


def gather_bytes(
    name: str, mine: bytes, process_set: Ranks | None = None, to_leader: bool = False
) -> list[bytes]:
    """Return every rank's bytes, by rank, of any number. Also works while TensorFlow traces.

    Args and errors as in ``gather_json``. With ``to_leader`` the first rank alone gets them.
    """
    rank_info.rank()  # raises if hvd.init() was not called
    if process_set is not None:
        process_set.check_included(name)
    call = {"process_set": 0 if process_set is None else process_set.id()}
    # Two requests: the lengths may differ by rank, and rows have none.
    (lengths,) = run("allgather", [np.array([len(mine)])], name=f"{name}.lengths", **call)
    sent, kind = [np.frombuffer(mine, np.uint8)], "allgather"
    if to_leader:
        sent.append(np.array([len(mine)] + [0] * (len(lengths) - 1)))
        kind = "alltoall"
    joined = run(kind, sent, name=name, **call)[0].tobytes()
    if len(joined) < lengths.sum():
        return []
    ends = np.cumsum(lengths)
    return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def digest(values: Any, before: int = 0) -> int:
    """Hash a tensor or an array to an int64 of 0 or more; ``before``: the hash of those before it.

    XXH3 (https://xxhash.com) reads 10 GB/s. Its 63 bits differ if the values do, but by chance.
    """
    array = np.ascontiguousarray(values).reshape(-1)
    is_text = array.dtype.kind in "OUS"
    data = repr(array.tolist()).encode() if is_text else array.view(np.uint8).data
    return xxhash.xxh3_64_intdigest(data, before) >> 1


# On GPUs, of the largest value of a variable: how many units in the last place values may differ by
# and still be those of one model. After 1,000 steps it was 3.
_UNITS = 100


def is_rounding(mine: Any, call: dict[str, Any]) -> bool:
    """Whether the ranks' arrays differ by no more than GPUs may round; ``call``: for ``run``."""
    if mine.dtype.kind != "f" and mine.dtype != ml_dtypes.bfloat16:
        return False
    # All ranks know both, and decide alike. A NaN is no rounding.
    (most,) = run("allreduce", [mine], reduction="Max", **call)
    (least,) = run("allreduce", [mine], reduction="Min", **call)
    spread = np.abs(most.astype(np.float64) - least.astype(np.float64)).max()
    largest = np.abs(np.stack([most, least]).astype(np.float64)).max()
    unit = float(ml_dtypes.finfo(mine.dtype).eps)  # type: ignore[no-untyped-call]
    return bool(spread <= _UNITS * unit * largest)


def numpy_dtype(dtype: Any) -> Any:
    """Return NumPy's form of a dtype of a variable, or of its name, such as bfloat16."""
    name = getattr(dtype, "name", dtype)
    return np.dtype(getattr(ml_dtypes, name, name))


def by_rank(values: Sequence[Any], process_set: Ranks | None = None) -> str:
    """Return a text of the ranks' values, for errors: ``rank 0: 3; rank 1: 4``; without None."""
    ranks = range(len(values)) if process_set is None else process_set.ranks
    pairs = zip(ranks, values, strict=True)
    return "; ".join(f"rank {rank}: {value}" for rank, value in pairs if value is not None)


@contextlib.contextmanager
def refused_on_all_ranks(
    kind: str, name: str, process_set: Ranks, *more: Any, **call: Any
) -> Iterator[None]:
    """Make an error in this rank's arguments of a collective fail the call on all ranks.

    Other ranks may make the same call correctly and would wait for this one. So this rank submits a
    request of that name that describes the error. If all ranks submit the same, each raises its
    error; otherwise all ranks get a FailedPreconditionError that shows each rank's view.

    Args:
        kind, name, process_set: of the call.
        more: arrays that a request of this kind needs beside an empty one.
        call: further arguments for ``Request``.
    """
    try:
        yield
    except (NotImplementedError, TypeError, ValueError) as error:
        # Correct requests of this name have another note, so the core serves none of them.
        call |= {"note": f"refused on this rank, {type(error).__name__}: {error} Sent instead:"}
        sent = [np.zeros(0, np.uint8), *more]
        try:
            run(kind, sent, name=name, process_set=process_set.id(), **call)
        except Exception as answer:
            if type(answer).__name__ == "FailedPreconditionError":
                raise answer from error
            # Another rank has left; the original error is more helpful.
        raise


def on_all_ranks(
    name: str, function: Callable[[], _Result], process_set: Ranks | None = None
) -> _Result:
    """Call a function; an error on any rank is raised on all, with the same type and text.

    Args:
        name: begins the text of the error, and identifies the call on all ranks.
        function: may do nothing on some ranks.
        process_set: the ranks that call this. Default: all.

    Returns:
        What ``function`` returned on this rank.

    Raises:
        OSError, ValueError, TypeError, NotImplementedError: (on every rank) that of the first rank
            that has an error; an OSError has its ``errno``.
        RuntimeError: (on every rank) the function raised another error.
    """
    error = mine = None  # None travels where nothing failed
    try:
        result = function()
    except Exception as caught:
        error, own = caught, type(caught).__name__
        kind = next((k.__name__ for k in _KINDS if isinstance(caught, k)), "RuntimeError")
        text = str(caught) if own == kind else f"{own}: {caught}"
        mine = [kind, text, getattr(caught, "errno", None)]
    gathered = gather_json(name, mine, process_set)
    failed = [theirs for theirs in gathered if theirs is not None]
    if not failed:
        return result
    kind, text, number = failed[0]
    texts = [theirs and theirs[1] for theirs in gathered]
    if set(texts) != {text}:
        text = by_rank(texts, process_set)
    # A built-in type, which all ranks have; a class of the script's may need other arguments.
    combined = next(k for k in _KINDS if k.__name__ == kind)(f"{name}: {text}")
    if isinstance(combined, OSError):
        combined.errno = number
    raise combined from error


def on_leader(name: str, function: Callable[[], _Result], process_set: Ranks) -> _Result | None:
    """As ``on_all_ranks``, but only the first rank calls the function; others wait for it.

    Returns what the function returned; None on the other ranks.
    """
    return on_all_ranks(name, lambda: function() if process_set.rank() == 0 else None, process_set)
