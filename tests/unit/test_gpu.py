"""GPU code that can be tested without a GPU: the choice of GPUs, and loading the kernels."""

import ctypes
import os
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

from hvd_keras.hvdrun import EXTENSIONS
from hvd_keras.launch import job_spec, options
from hvd_keras.runtime import gpu, libraries
from hvd_keras.runtime.settings import Settings


def test_each_process_of_a_host_gets_its_own_gpu() -> None:
    assert [gpu.choose(4, rank, 4, Settings()) for rank in range(4)] == [0, 1, 2, 3]
    assert gpu.choose(8, 2, 3, Settings()) == 2


def test_a_process_that_sees_only_its_own_gets_that() -> None:
    assert gpu.choose(1, 3, 4, Settings(some_gpus_hidden=True)) == 0


def test_fewer_gpus_than_processes() -> None:
    with pytest.raises(RuntimeError, match=r"has 2 GPUs for 3 processes.*HVD_GPU_OPERATIONS=MPI"):
        gpu.choose(2, 0, 3, Settings())
    one = r"has 1 GPU for 2 processes.*\(hvdrun -np 1\), or set CUDA_VISIBLE_DEVICES=-1 to"
    with pytest.raises(RuntimeError, match=one):
        gpu.choose(1, 1, 2, Settings())
    shared = Settings(gpus_shared=True)
    assert [gpu.choose(2, rank, 3, shared) for rank in range(3)] == [0, 1, 0]


@pytest.mark.parametrize(
    ("gpus", "chosen", "expected"),
    [(1, {}, "MPI"), (2, {}, None), (0, {}, None), (1, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, None)],
)
def test_more_ranks_than_gpus_share_them(monkeypatch, gpus, chosen, expected) -> None:
    """Of this host; in all other cases `hvd.init` refuses it."""
    monkeypatch.setattr(job_spec, "usable_gpus", lambda environment: gpus)
    monkeypatch.delenv("HVD_GPU_OPERATIONS", raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    given = options.parse(["-np", "2", "--oversubscribe", "true"], EXTENSIONS)
    assert job_spec.build(given).options.settings.get("HVD_GPU_OPERATIONS") == expected


def test_missing_and_broken_gpu_libraries_are_named(tmp_path: pathlib.Path) -> None:
    text = tmp_path / "libnccl.so.2"
    text.write_text("no library")
    code = (
        "import hvd_keras as hvd\nfrom hvd_keras.runtime import gpu\nprint(gpu.facts())\nhvd.init()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={
            "PATH": "",
            "PYTHONPATH": os.environ["PYTHONPATH"],
            "HVD_NCCL_LIBRARY": str(text),
            "HVD_CUDART_LIBRARY": "/none",
            "HVD_GPU_BROADCAST": "nccl",
        },
        capture_output=True,
        text=True,
    )
    assert "NCCL cannot be used: HVD_NCCL_LIBRARY is" in result.stdout
    assert "pip install nvidia-nccl-cu12" in result.stdout
    assert "CUDA's runtime library cannot be used: HVD_CUDART_LIBRARY is '/none'" in result.stdout
    assert result.returncode == 1
    assert "ValueError: HVD_GPU_BROADCAST is 'nccl', expected NCCL or MPI" in result.stderr


def test_the_gpu_kernels_load_into_the_tensorflow_that_has_gpus() -> None:
    assert tf.test.is_built_with_cuda()
    libraries.tensorflow_ops()
    # Missing functions must be detected now, not at their first call.
    library = libraries._tensorflow_folder() / "libhvd_tensorflow.so"
    ctypes.CDLL(str(library), mode=ctypes.RTLD_LOCAL | 2)  # RTLD_NOW
    on_host = {"HvdAlltoall": ["splits", "received_splits"], "HvdJoin": ["last"]}
    collectives = ("Allreduce", "Allgather", "Broadcast", "Alltoall", "Reducescatter", "Barrier")
    for name in (*collectives, "Wait"):
        found = kernels.get_registered_kernels_for_op(f"Hvd{name}").kernel
        (on_gpu,) = [kernel for kernel in found if kernel.device_type == "GPU"]
        assert list(on_gpu.host_memory_arg) == on_host.get(f"Hvd{name}", [])
