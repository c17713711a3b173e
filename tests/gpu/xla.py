"""A job of several ranks that runs programs compiled for GPUs over the fake of CUDA and NCCL.

tests/unit/test_core.py starts it as ``python -m tests.gpu.xla LIBRARY``, where the library is built
from xla.cc. The fake ends the process if an event between XLA's stream and ours is missing.
"""

import concurrent.futures
import contextlib
import ctypes
import os
import sys
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from hvd_keras.ops.validate import raw
from tests.harness import inputs

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
DEVICE = 1  # not the device of a handler that does not ask XLA
LIBRARY = ctypes.CDLL(sys.argv[1])
FAKE_CUDA = ctypes.CDLL(os.environ["HVD_CUDART_LIBRARY"])
for name in ("open", "compile", "start", "finish"):
    getattr(LIBRARY, f"hvd_xla_{name}").restype = ctypes.c_char_p
LIBRARY.hvd_xla_bytes.restype = ctypes.c_uint64
FAKE_CUDA.hvd_fake_cuda_leaks.restype = ctypes.c_char_p


def check(error: bytes | None) -> None:
    if error:
        raise RuntimeError(error.decode())


def addresses(arrays) -> ctypes.Array:
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


class Program:
    """A function of tensors, compiled for a GPU, with a stream."""

    def __init__(self, function: Callable, *arguments: np.ndarray) -> None:
        jitted = tf.function(lambda *tensors: function(*tensors), jit_compile=True)
        lower = jitted.experimental_get_compiler_ir(*map(tf.constant, arguments))
        lowered = lower(stage="hlo_serialized", platform_name="GPU")
        self.pointer = ctypes.c_void_p()
        pointer = ctypes.byref(self.pointer)
        check(LIBRARY.hvd_xla_compile(lowered, ctypes.c_size_t(len(lowered)), DEVICE, pointer))

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_) -> None:
        LIBRARY.hvd_xla_forget(self.pointer)

    @contextlib.contextmanager
    def held(self):
        """Holds the stream up: work that is enqueued meanwhile waits."""
        LIBRARY.hvd_xla_hold(self.pointer)
        try:
            yield
        finally:
            LIBRARY.hvd_xla_release(self.pointer)

    def start(self, *arguments: np.ndarray) -> None:
        check(LIBRARY.hvd_xla_start(self.pointer, addresses(arguments)))

    def expect(self, *expected: np.ndarray) -> None:
        results = [np.empty_like(value) for value in expected]
        sizes = (ctypes.c_size_t * len(results))(*(value.nbytes for value in results))
        check(LIBRARY.hvd_xla_finish(self.pointer, addresses(results), sizes))
        for result, value in zip(results, expected, strict=True):
            np.testing.assert_array_equal(result, value)


def no_host_waits_for_the_gpu() -> None:
    """XLA's stream is held up before the arguments arrive: all calls must be enqueued."""

    def function(x, y):
        a = hvd.allreduce(x, name="a", op=hvd.Sum)
        b, c = hvd.grouped_allreduce([a, y], name="b", op=hvd.Sum)
        d, h = hvd.grouped_allgather([b, c], name="d")
        e = hvd.broadcast(c, SIZE - 1, name="e")
        f = hvd.reducescatter(e, name="f", op=hvd.Sum)
        g = hvd.alltoall(x, name="g")
        hvd.allreduce(x, name="unused", op=hvd.Sum)
        hvd.barrier()
        return [a, b, c, d, e, f, g, h]

    shape = (2 * SIZE, 3)
    mine = slice(2 * RANK, 2 * RANK + 2)
    with Program(function, np.ones(shape, "float32"), np.ones(shape)) as program:
        for step in range(3):
            x = [inputs.tensor(rank + step, shape) for rank in range(SIZE)]
            y = [inputs.tensor(rank + 3 - step, shape, "float64") for rank in range(SIZE)]
            a, c = sum(x), sum(y)
            with program.held():
                program.start(x[RANK], y[RANK])
            g = np.concatenate([part[mine] for part in x])
            d, h = (np.tile(part, (SIZE, 1)) for part in (SIZE * a, c))
            program.expect(a, SIZE * a, c, d, c, SIZE * c[mine], g, h)


def begun(tensors: list, name: str) -> list:
    return raw.hvd_allreduce(tensors, tensor_name=name, waits=False)


def what_does_not_wait_is_awaited() -> None:
    """A begun allreduce, another one, then the wait for the first: an error of it comes there."""

    def function(x, y):
        tensors = begun([x, y], "a")
        c = hvd.allreduce(y, name="c", op=hvd.Sum)
        a, b = raw.hvd_wait(tensors)
        (d,) = raw.hvd_wait(begun([a], "d"))
        return [a, b, c, d]

    x, y = (inputs.of_all_ranks(SIZE, shape) for shape in ((100_000,), (3, 2)))
    with Program(function, x[RANK], y[RANK]) as program:
        for _ in range(3):
            with program.held():
                program.start(x[RANK], y[RANK])
            a, b = x.sum(0), y.sum(0)
            program.expect(a, b, b, SIZE * a)
    mine = np.ones((RANK + 1, 3), "float32")
    with (
        Program(lambda x: raw.hvd_wait(begun([x], "e"))[0], mine) as program,
        pytest.raises(RuntimeError, match=r"rank 0: op=Sum float32\[1,3\], on a GPU"),
    ):
        program.start(mine)


def results_lie_where_the_inputs_lay() -> None:
    def function(x):
        for i in range(4):
            x = hvd.allreduce(x, name=f"in place {i}", op=hvd.Sum)
            (x,) = raw.hvd_wait(begun([x], f"begun {i}"))
        return x

    x = inputs.of_all_ranks(SIZE, (100_000,))
    with Program(function, x[RANK]) as program:
        program.start(x[RANK])
        program.expect(SIZE**7 * x.sum(0))
        used = LIBRARY.hvd_xla_bytes(program.pointer) / x[RANK].nbytes
        assert 2 <= used < 2.01, "not only the argument and the result"


def ranks_that_differ_are_refused() -> None:
    """The error reaches every rank through XLA, and the next program works."""
    refusals = {
        hvd.allgather: ["XLA has compiled a program for [", "jit_compile=False"],
        hvd.allreduce: [f"rank {r}: op=Average float32[{r + 1},3], on a GPU" for r in range(SIZE)],
    }
    x = np.ones((RANK + 1, 3), "float32")
    for call, texts in refusals.items():
        with Program(call, x) as program, pytest.raises(RuntimeError) as error:
            program.start(x)
        for text in ("FAILED_PRECONDITION", *texts):
            assert text in str(error.value)
    x = inputs.of_all_ranks(SIZE, (2, 3))
    with Program(lambda x: hvd.allreduce(x, op=hvd.Sum), x[RANK]) as program:
        program.start(x[RANK])
        program.expect(x.sum(0))


def two_programs_at_once() -> None:
    """Two programs from two threads; each rank starts them in a different order."""
    x = inputs.of_all_ranks(SIZE, (4, 3))
    total = x.sum(0)

    def run(program: Program, factor: int) -> None:
        for _ in range(20):
            program.start(x[RANK])
            program.expect(factor * total)

    def twice(x):
        return hvd.allreduce(hvd.allreduce(x, name="one", op=hvd.Sum), name="two", op=hvd.Sum)

    with (
        Program(lambda x: hvd.allreduce(x, name="single", op=hvd.Sum), x[RANK]) as one,
        Program(twice, x[RANK]) as other,
        concurrent.futures.ThreadPoolExecutor(2) as threads,
    ):
        calls = [(one, 1), (other, SIZE)]
        for call in [threads.submit(run, *call) for call in calls[:: 1 if RANK else -1]]:
            call.result()


if SIZE == 1:
    sys.exit("several ranks are needed")
check(LIBRARY.hvd_xla_open(os.environ["HVD_CUDART_LIBRARY"].encode()))
for test in (
    no_host_waits_for_the_gpu,
    what_does_not_wait_is_awaited,
    results_lie_where_the_inputs_lay,
    ranks_that_differ_are_refused,
    two_programs_at_once,
):
    test()
    print(f"ok  {test.__name__}", flush=True)
hvd.shutdown()
left = FAKE_CUDA.hvd_fake_cuda_leaks().decode()
assert not left, left
