"""A job whose ranks send memory of GPUs by the C API, as PyTorch's tensors are sent, on the fake.

tests/unit/test_core.py starts it as ``python -m tests.gpu.c_api``. The fake ends the process if an
event between the caller's stream and ours is missing.
"""

import ctypes
import os
from collections.abc import Sequence

import numpy as np
import pytest

import hvd_keras as hvd
from hvd_keras.runtime import agree

FAKE = ctypes.CDLL(os.environ["HVD_CUDART_LIBRARY"])
FAKE.hvd_fake_cuda_leaks.restype = ctypes.c_char_p
DEVICE = 1


class Stream:
    """A stream of the caller's, or its device's default one."""

    def __init__(self, is_default: bool) -> None:
        self.pointer = ctypes.c_void_p()
        if not is_default:
            assert FAKE.cudaStreamCreateWithFlags(ctypes.byref(self.pointer), 1) == 0
        self._memory: list[ctypes.c_void_p] = []

    def allocate(self, size: int) -> int:
        memory = ctypes.c_void_p()
        assert FAKE.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(size)) == 0
        self._memory.append(memory)
        return memory.value or 0

    def copy(self, target: int, source: int, size: int) -> None:
        arguments = ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(size)
        assert FAKE.cudaMemcpyAsync(*arguments, 4, self.pointer) == 0

    def close(self) -> None:
        assert FAKE.cudaStreamSynchronize(self.pointer) == 0
        for memory in self._memory:
            FAKE.cudaFree(memory)
        if self.pointer:
            FAKE.cudaStreamDestroy(self.pointer)


def run(stream: Stream, kind: str, arrays: Sequence[np.ndarray], **call) -> list[np.ndarray]:
    """Run a collective of arrays that lie on the GPU, and return the results."""
    inputs, results = [], {}
    for i, array in enumerate(arrays):
        place = array.ctypes.data
        if not (kind == "alltoall" and i == 1):  # splits stay on the host
            place = stream.allocate(array.nbytes)
            stream.copy(place, array.ctypes.data, array.nbytes)
        inputs.append(agree.Memory.at(place, array.dtype.name, array.shape))

    def allocate(index: int, dims: int, shape) -> int:
        results[index] = np.empty(shape[:dims], arrays[index].dtype), 0
        if not (kind == "alltoall" and index == 1):
            results[index] = results[index][0], stream.allocate(results[index][0].nbytes)
        return results[index][1] or results[index][0].ctypes.data

    outputs = None
    if kind in ("allreduce", "broadcast"):
        outputs = [allocate(i, array.ndim, array.shape) for i, array in enumerate(arrays)]
    call |= {"device": DEVICE, "stream": stream.pointer.value or 0}
    call["allocate"] = agree.Allocate(allocate)
    request = agree.Request(kind, inputs, outputs, arrays, name=kind, **call)
    request.wait()
    for array, place in results.values():
        if place:
            stream.copy(array.ctypes.data, place, array.nbytes)
    request.release()
    return [results[i][0] for i in range(len(arrays))]


hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
assert FAKE.cudaSetDevice(DEVICE) == 0
for stream in (Stream(False), Stream(True)):
    x = [np.arange(6, dtype="float32").reshape(3, 2) + rank for rank in range(SIZE)]
    y = [np.full(1000, 10 * rank + 1) for rank in range(SIZE)]
    got = run(stream, "allreduce", [x[RANK], -x[RANK]], reduction="Sum")
    np.testing.assert_array_equal(got, [sum(x), -sum(x)])
    got = run(stream, "broadcast", [x[RANK], y[RANK]], root=SIZE - 1)
    np.testing.assert_array_equal(got[0], x[-1])
    np.testing.assert_array_equal(got[1], y[-1])
    got = run(stream, "allgather", [y[RANK][RANK:], x[RANK]])
    np.testing.assert_array_equal(got[0], np.concatenate([y[r][r:] for r in range(SIZE)]))
    np.testing.assert_array_equal(got[1], np.concatenate(x))
    to_first = [1 + rank % 2 for rank in range(SIZE)]
    splits = np.array([to_first[RANK], *[0] * (SIZE - 2), 3 - to_first[RANK]])
    rows, counts = run(stream, "alltoall", [x[RANK], splits])
    parts = [part[:0] for part in x]
    if RANK in (0, SIZE - 1):
        parts = [np.split(part, [n])[RANK > 0] for part, n in zip(x, to_first, strict=True)]
    assert counts.tolist() == [len(part) for part in parts]
    np.testing.assert_array_equal(rows, np.concatenate(parts))
    got = run(stream, "reducescatter", [x[RANK]], reduction="Sum")
    np.testing.assert_array_equal(got[0], np.array_split(sum(x), SIZE)[RANK])
    stream.close()
call = {"device": DEVICE, "allocate": agree.Allocate(lambda *_: None)}
memory = Stream(True)
inputs = [agree.Memory.at(memory.allocate(8), "float64", [1])]
with pytest.raises(Exception, match="no memory for a result of"):
    agree.Request("allgather", inputs, None, None, name="no memory", **call).wait()
memory.close()
hvd.shutdown()
assert not FAKE.hvd_fake_cuda_leaks().decode(), FAKE.hvd_fake_cuda_leaks().decode()
print("all is well", flush=True)
