"""What the core declares of CUDA and NCCL by itself, against the headers in NVIDIA's wheels."""

import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]
WHEELS = {
    "12": ("nvidia-cuda-runtime-cu12", "nvidia-nccl-cu12"),
    "13": ("nvidia-cuda-runtime", "nvidia-nccl-cu13"),
}
# NVIDIA has these headers in its compiler's wheel; they say nothing of what is called or passed.
OTHERS = {
    "crt/host_defines.h": """
        #define CUDARTAPI
        #define CUDARTAPI_CDECL
        #define __device_builtin__
        #define __cudart_builtin__
        #define __builtin_align__(n) __attribute__((aligned(n)))
        #define __align__(n) __attribute__((aligned(n)))
        #define __host__
        #define __device__
        #define __location__(a)
        """,
    "cuda_runtime.h": "#include <cuda_runtime_api.h>\n",
    "cuda_fp16.h": "",
    "cuda_bf16.h": "",
    "cuda_fp8.h": "",
}
SOURCES = ["tests/gpu/abi.cc", "native/core/base/threads.cc"]
SOURCES += [f"native/core/gpu/{name}.cc" for name in ("nccl_api", "gpu_library")]


def headers_of(wheel: str, folder: pathlib.Path) -> None:
    """Unpacks them, or skips the test."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), wheel]
    downloaded = subprocess.run(command, capture_output=True, text=True)
    if downloaded.returncode != 0:
        pytest.skip(f"{wheel} cannot be downloaded: {downloaded.stderr.strip()[-300:]}")
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(
            folder, [name for name in archive.namelist() if name.endswith((".h", ".hpp"))]
        )
    file.unlink()  # hundreds of megabytes


def compiled(include: list[pathlib.Path], program: pathlib.Path) -> str:
    """The compiler's errors."""
    command = [shutil.which("g++") or "c++", "-std=c++17", f"-I{ROOT / 'native'}"]
    command += [f"-isystem{folder}" for folder in include]
    command += [*(str(ROOT / source) for source in SOURCES), "-ldl", "-o", str(program)]
    return subprocess.run(command, capture_output=True, text=True).stderr


@pytest.mark.slow
@pytest.mark.parametrize("cuda", WHEELS)
def test_declarations_are_those_of_nvidia(cuda: str, tmp_path: pathlib.Path) -> None:
    for name, text in OTHERS.items():
        path = tmp_path / "others" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for wheel in WHEELS[cuda]:
        headers_of(wheel, tmp_path)
    (nccl,) = tmp_path.glob("nvidia/nccl/include/nccl.h")
    (runtime,) = tmp_path.glob("nvidia/*/include/cuda_runtime_api.h")
    include = [tmp_path / "others", runtime.parent, nccl.parent]
    program = tmp_path / "abi"
    assert compiled(include, program) == ""
    subprocess.run([str(program)], check=True)
    # And it notices what differs: an enumerator, an argument, a member.
    text = nccl.read_text()
    for old, new in (
        ("ncclProd       = 1", "ncclProd       = 5"),
        ("size_t recvcount,", "int recvcount,"),
        ("int cgaClusterSize;", "long cgaClusterSize;"),
    ):
        assert old in text
        nccl.write_text(text.replace(old, new))
        assert "static assertion failed" in compiled(include, program), old
