"""A job of 2 ranks with torch's tensors on the fakes of CUDA and NCCL, where they can be copied.

test_torch.py starts it with LD_PRELOAD of the fake, which ends the process if an event between
torch's streams and ours is missing, or if memory is given away too early.
"""

import contextlib
import ctypes
import os
import threading

import keras
import numpy as np
import pytest
import torch

import hvd_keras as hvd
from hvd_keras.torch.collectives import Exchange

FAKE = ctypes.CDLL(os.environ["HVD_CUDART_LIBRARY"])
FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


def use_the_fakes_allocator():
    names = ("hvd_fake_cuda_torch_allocate", "hvd_fake_cuda_torch_free")
    allocator = torch.cuda.memory.CUDAPluggableAllocator(FAKE._name, *names)
    record = ctypes.cast(FAKE.hvd_fake_cuda_torch_record, ctypes.c_void_p).value
    allocator.allocator().set_record_stream_fn(record)
    torch.cuda.memory.change_current_allocator(allocator)


use_the_fakes_allocator()
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
DEVICE = torch.device("cuda", hvd.local_rank())
assert torch.cuda.current_device() == DEVICE.index


def on_gpu(values, dtype=torch.float32, requires_grad=False):
    return torch.tensor(values, dtype=dtype).to("cuda").requires_grad_(requires_grad)


@contextlib.contextmanager
def held_up(stream):
    """Let work that the stream is given wait until the block ends."""
    go = threading.Event()
    function = FUNCTION(lambda _: go.wait())
    FAKE.cudaLaunchHostFunc(ctypes.c_void_p(stream.cuda_stream), function, None)
    try:
        yield
    finally:
        go.set()
        stream.synchronize()


def the_collectives_and_their_gradients():
    ranks = range(SIZE)
    total = sum(ranks)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        x = on_gpu([1.0 + RANK, 2.0], dtype, requires_grad=True)
        y = hvd.allreduce(x, op=hvd.Sum)
        assert (y.device, y.dtype) == (DEVICE, dtype)
        assert y.tolist() == [SIZE + total, 2 * SIZE], y.tolist()
        y.backward(on_gpu([1.0 + RANK, 3.0], dtype))
        assert x.grad.tolist() == [SIZE + total, 3 * SIZE], x.grad.tolist()
        assert hvd.allreduce(x).tolist() == [1 + total / SIZE, 2]
    one, two = hvd.grouped_allreduce(
        [on_gpu([RANK], torch.int64), on_gpu([[5]], torch.int64)], op=hvd.Max
    )
    assert (one.tolist(), two.tolist()) == ([SIZE - 1], [[5]])
    x = on_gpu([[10.0 + RANK] * 2] * (RANK + 1), requires_grad=True)
    y = hvd.allgather(x)
    rows = [[10.0 + r] * 2 for r in ranks for _ in range(r + 1)]
    assert (y.device, y.tolist()) == (DEVICE, rows)
    y.backward(on_gpu([[float(i)] * 2 for i in range(len(rows))]))
    start = RANK * (RANK + 1) // 2
    assert x.grad.tolist() == [[SIZE * (start + i)] * 2 for i in range(RANK + 1)]
    assert hvd.allgather(on_gpu(np.zeros((0, 3)))).shape == (0, 3)
    x = on_gpu([5.0 + RANK], requires_grad=True)
    y = hvd.broadcast(x, root_rank=1)
    assert y.item() == 6
    x = on_gpu([0.0, 1, 2], requires_grad=True)
    y, counts = hvd.alltoall(x, splits=[1, 2] if RANK == 0 else [3, 0])
    assert counts.tolist() == [[1, 3], [2, 0]][RANK]
    assert (y.device, y.tolist()) == (DEVICE, [[0, 0, 1, 2], [1, 2]][RANK])
    y.backward(on_gpu([10.0 * RANK + i for i in range(len(y))]))
    assert x.grad.tolist() == [[0, 10, 11], [1, 2, 3]][RANK], x.grad
    x = on_gpu([[1.0 + RANK], [2], [3]])
    assert hvd.reducescatter(x, op=hvd.Sum).flatten().tolist() == [[3, 4], [6]][RANK]


def the_host_does_not_wait_for_the_gpu():
    late = on_gpu([1.0 + RANK] * 1000)
    torch.cuda.current_stream().synchronize()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream), held_up(stream):
            x = torch.empty(1000, device="cuda")
            x.copy_(late, non_blocking=True)
            y = hvd.allreduce(x, op=hvd.Sum, name="late")
            z = hvd.allgather(y, name="gathered")
            del x
            other = torch.empty(1000, device="cuda")  # in the memory that x had
            other.copy_(late, non_blocking=True)
        assert z.tolist() == [sum(range(1, SIZE + 1))] * (1000 * SIZE)


def memory_is_kept_while_streams_use_it():
    first, second = torch.cuda.current_stream(), torch.cuda.Stream()
    x, sources = on_gpu([1.0 + RANK] * 1000), [on_gpu([7.0] * size) for size in (1000, 1000 * SIZE)]
    second.wait_stream(first)
    with torch.cuda.stream(second), held_up(second):
        total = hvd.allreduce(x, op=hvd.Sum, name="total")
        gathered = hvd.allgather(x, name="gathered")
        del x, gathered
        with torch.cuda.stream(first):  # which neither has waited for, nor may get their memory
            for source in sources:
                torch.empty_like(source).copy_(source)
    assert total.tolist() == [sum(range(1, SIZE + 1))] * 1000


def another_stream_takes_the_results():
    first, second = torch.cuda.current_stream(), torch.cuda.Stream()
    x = on_gpu([1.0 + RANK] * 1000)
    second.wait_stream(first)
    with torch.cuda.stream(second), held_up(second):
        sent = Exchange("allreduce", [x], name="shared")
        with torch.cuda.stream(first):
            copy = sent.results()[0].clone()
    assert copy.tolist() == [sum(range(1, SIZE + 1))] * 1000


class Given(torch.autograd.Function):
    """Has the gradients that it is given: the fake computes none."""

    @staticmethod
    def forward(ctx, gradients, *values):
        ctx.gradients = gradients
        return values[0].clone()

    @staticmethod
    def backward(ctx, _):
        return None, *(gradient.clone() for gradient in ctx.gradients)


class Keep(keras.optimizers.Optimizer):
    """Makes the variables their gradients."""

    def update_step(self, gradient, variable, learning_rate):
        variable.value.detach().copy_(gradient)


def buckets_travel_during_backward():
    shapes = [(300,), (40, 50), (7,), (1000,)]
    with keras.device(str(DEVICE)):
        variables = [keras.Variable(np.full(shape, RANK, "float32")) for shape in shapes]
    hvd.broadcast_variables(variables, root_rank=1)
    assert all((v.numpy() == 1).all() for v in variables)
    optimizer = hvd.DistributedOptimizer(Keep(0.1), op=hvd.Sum)
    stream = torch.cuda.Stream()
    for step in range(4):
        values = [v.value.requires_grad_() for v in variables]
        for value in values:
            value.grad = None
        upstream = on_gpu(np.zeros(shapes[0]))
        given = [on_gpu(np.full(shape, i + RANK + step)) for i, shape in enumerate(shapes)]
        with torch.cuda.stream(stream) if step == 3 else contextlib.nullcontext():
            stream.wait_stream(torch.cuda.default_stream())
            with held_up(torch.cuda.current_stream()):
                Given.apply(given, *values).backward(upstream)
                ahead = optimizer._hvd_reducer._ahead
                assert ahead is None or len(ahead.sent) == len(ahead._buckets) > 1
                optimizer.apply([value.grad for value in values], variables)
            for i, variable in enumerate(variables):
                expected = SIZE * (i + step) + sum(range(SIZE))
                assert (variable.numpy() == expected).all(), (step, i, variable.numpy())


def what_differs_is_refused():
    for tensors, text in (
        ([on_gpu([1.0]), torch.ones(1)], "got tensors on cpu, cuda:"),
        ([torch.ones(1) if RANK else on_gpu([1.0])], "on a GPU"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=text):
            hvd.grouped_allreduce(tensors, name="different")


for test in (
    the_collectives_and_their_gradients,
    the_host_does_not_wait_for_the_gpu,
    memory_is_kept_while_streams_use_it,
    another_stream_takes_the_results,
    buckets_travel_during_backward,
    what_differs_is_refused,
):
    test()
    print("ok ", test.__name__, flush=True)
hvd.shutdown()
