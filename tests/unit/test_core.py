"""Builds and runs native/tests: the core, without TensorFlow, on one rank and on several.

Also runs programs that XLA compiles for GPUs.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from hvd_keras.runtime import settings
from tests.harness import ranks

ROOT = pathlib.Path(__file__).parents[2]
# Of the installation: the core need not be compiled again.
BUILD = next(ROOT.glob("build/py3-*/CMakeCache.txt")).parent
# As in native/tests/support/test_call.h: "cluster" treats each two ranks as a host.
TRANSPORTS = [(1, "mpi"), (2, "mpi"), (2, "host"), (3, "mpi"), (3, "host"), (3, "cluster")]


def program(name: str) -> str:
    """Returns the path of a build tool, preferably this environment's."""
    beside = str(pathlib.Path(sys.executable).parent)
    path = shutil.which(name, path=beside) or shutil.which(name)
    assert path, f"{name} was not found. Install it: pip install {name}"
    return path


def run(*command: str, timeout: float = 900, **env: str) -> str:
    result = subprocess.run(
        command,
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def passes(says: str, size: int, *command: object, env: dict[str, str] | None = None) -> str:
    """Run a program, which says this on each rank when all is well; return the output."""
    job = ranks.mpirun(size, *map(str, command), env=env, status=0)
    assert job.output.count(says) == size, job.output
    return job.output


def build(target: str) -> pathlib.Path:
    """Builds test programs and returns their folder."""
    run(program("cmake"), "-DHVD_BUILD_TESTS=ON", str(BUILD))
    run(program("ninja"), "-C", str(BUILD), "-j", str(os.cpu_count()), target)
    return BUILD / "tests"


@pytest.fixture(scope="module")
def binaries() -> pathlib.Path:
    """Builds the programs without TensorFlow and returns their folder."""
    return build("programs")


@pytest.fixture(scope="module")
def fake_cuda(binaries: pathlib.Path) -> dict[str, str]:
    """Returns an environment with the fakes of CUDA and NCCL in tests/gpu."""
    library = str(binaries / "libhvd_fake_cuda.so")
    return {"HVD_CUDART_LIBRARY": library, "HVD_NCCL_LIBRARY": library}


ALONE = ["agreement_test", "collectives_test", "ends_test", "host_counters_test", "loops_test"]
ALONE += ["recorder_test", "reduce_test", "host_threads_test", "threads_test"]


@pytest.mark.parametrize("name", ALONE)
def test_alone(binaries: pathlib.Path, name: str) -> None:
    assert "ok  " in run(str(binaries / name))


def test_ranks_of_different_builds(binaries: pathlib.Path) -> None:
    script = f'[ "$OMPI_COMM_WORLD_RANK" = 0 ] || other=other_build_test; exec {binaries}/'
    job = ranks.mpirun(2, "sh", "-c", script + "${other:-mpi_calls_test}")
    assert job.status != 0
    assert job.output.count("the ranks have different builds of hvd_keras") == 2, job.output


def test_loops_for_newer_cpus_are_called_by_nobody_else(binaries: pathlib.Path) -> None:
    # If they compiled an inline function, too, the linker might keep their copy.
    objects = sorted(BUILD.rglob("core/math/loops_*.o"))
    assert len(objects) == 2
    for path in objects:
        symbols = run("nm", "--defined-only", "--extern-only", str(path)).splitlines()
        assert all(re.search(r"(baseline|avx2)_loops", symbol) for symbol in symbols), symbols


@pytest.mark.cases(4)
@pytest.mark.parametrize(("size", "transport"), [*TRANSPORTS, (4, "grid")])
def test_engine(binaries: pathlib.Path, size: int, transport: str) -> None:
    passes("two engines do not interfere", size, binaries / "engine_test", transport)


def test_algorithms_between_hosts(binaries: pathlib.Path) -> None:
    """Each rank is a host; up to 7 form even and uneven grids."""
    passes("ok     many hosts form a grid", 7, binaries / "inter_host_test")


@pytest.mark.parametrize(("size", "transport"), [(1, "mpi"), (2, "mpi"), (2, "host")])
def test_edges(binaries: pathlib.Path, size: int, transport: str) -> None:
    passes("after an abort no set calls mpi", size, binaries / "edges_test", transport)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("size", "transport"), TRANSPORTS)
def test_exchange(binaries: pathlib.Path, size: int, transport: str) -> None:
    passes("beyond two gibibytes", size, binaries / "exchange_test", transport)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("size", "transport"),
    [
        pytest.param(*pair, marks=[pytest.mark.slow] * (pair in ((2, "mpi"), (3, "host"))))
        for pair in TRANSPORTS
    ],
)
def test_leave(binaries: pathlib.Path, size: int, transport: str) -> None:
    output = passes("the deadline names who is missing", size, binaries / "leave_test", transport)
    # The last rank of "waiting burns no core" is late; the others warn, again and again.
    for rank in range(size - 1):
        assert f"rank {rank} waits for allreduce 'late'" in output, output
    assert size - 1 <= output.count("no progress for") <= 5 * (size - 1), output


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shared_memory(binaries: pathlib.Path, size: int) -> None:
    passes("little is committed", size, binaries / "shared_memory_test")


@pytest.mark.cases(1)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs a /dev/shm of its own, and so root")
@pytest.mark.parametrize(("size", "transport"), [(2, "host"), (3, "cluster")])
def test_a_full_dev_shm(
    binaries: pathlib.Path, tmp_path: pathlib.Path, size: int, transport: str
) -> None:
    # Enough for the initially committed memory, not for the slots.
    script = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    job = ranks.mpirun(
        size,
        *(str(binaries / "engine_test"), transport),
        env={"OMPI_MCA_btl_sm_backing_directory": str(tmp_path)},
        inside=("unshare", "--mount", "sh", "-c", script, "sh"),
    )
    assert job.status == 0, job.output
    assert "/dev/shm is full on a host, so tensors travel in pieces of" in job.output


def test_fake_cuda(binaries: pathlib.Path, fake_cuda: dict[str, str]) -> None:
    assert "what is left" in run(str(binaries / "fake_cuda_test"), **fake_cuda)


@pytest.mark.parametrize(
    "seed", ["", *(pytest.param(str(n), marks=pytest.mark.slow) for n in range(20))]
)
def test_process_sets_of_gpus(binaries: pathlib.Path, fake_cuda: dict[str, str], seed: str) -> None:
    env = {**fake_cuda, "HVD_FAKE_CUDA_SEED": seed}
    assert "ok  " in run(str(binaries / "gpu_sets_test"), **env)


@pytest.mark.parametrize("which", [[], pytest.param(["all"], marks=pytest.mark.slow)])
def test_faults_of_gpus(
    binaries: pathlib.Path, fake_cuda: dict[str, str], which: list[str]
) -> None:
    assert "ok  " in run(str(binaries / "gpu_faults_test"), *which, timeout=1800, **fake_cuda)


@pytest.mark.cases(1)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["engine_test", "exchange_test"])
def test_collectives_through_nccl(
    binaries: pathlib.Path, fake_cuda: dict[str, str], name: str, size: int
) -> None:
    job = ranks.mpirun(size, str(binaries / name), "gpu", env=fake_cuda, status=0)
    assert "FAILED" not in job.output


def test_collectives_through_rccl(binaries: pathlib.Path) -> None:
    """HIP and RCCL are the fake under AMD's names."""
    library = str(binaries / "libhvd_fake_hip.so")
    env = {"HVD_CUDART_LIBRARY": library, "HVD_NCCL_LIBRARY": library}
    job = ranks.mpirun(2, str(binaries / "exchange_test"), "gpu", env=env, status=0)
    assert "FAILED" not in job.output


@pytest.mark.parametrize(
    ("size", "which", "name"),
    [
        (1, "", "no host waits for the gpu"),
        (2, "", "no host waits for the gpu"),
        (2, "stops", "a GPU that stops ends all"),
        (2, "fails", "an error of NCCL ends all"),
        (2, "without", "without NCCL all goes over the host"),
    ],
)
def test_gpu(
    binaries: pathlib.Path, fake_cuda: dict[str, str], size: int, which: str, name: str
) -> None:
    output = passes(name, size, binaries / "gpu_test", "gpu", which, env=fake_cuda)
    assert output.count("since rank 0 has no NCCL") == (which == "without"), output


def with_places(environment: dict[str, str]) -> dict[str, str]:
    return {**environment, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}"}


@pytest.mark.slow
def test_xla_on_gpus(fake_cuda: dict[str, str]) -> None:
    library = build("hvd_xla_gpu") / "libhvd_xla_gpu.so"
    command = [sys.executable, "-u", "-m", "tests.gpu.xla", library]
    passes("ok  two_programs_at_once", 2, *command, env=with_places(fake_cuda))


@pytest.mark.cases(1)
@pytest.mark.parametrize("size", [3, 2])
def test_the_c_api_on_gpus(fake_cuda: dict[str, str], size: int) -> None:
    command = [sys.executable, "-u", "-m", "tests.gpu.c_api"]
    passes("all is well", size, *command, env=with_places(fake_cuda))


def test_a_rank_that_dies_in_a_collective_of_gpus_ends_all(
    binaries: pathlib.Path, fake_cuda: dict[str, str]
) -> None:
    command = [str(binaries / "gpu_test"), "gpu", "dies"]
    job = ranks.mpirun(2, *command, env=fake_cuda)
    assert job.status != 0, job.output
    assert "went on" not in job.output


def test_a_script_whose_gpu_is_stuck_ends(
    binaries: pathlib.Path, fake_cuda: dict[str, str]
) -> None:
    command = [str(binaries / "gpu_test"), "gpu", "stuck"]
    job = ranks.mpirun(2, *command, env={**fake_cuda, "HVD_TIMEOUT_SECONDS": "1"})
    assert job.status == settings.WAITED_IN_VAIN, job.output
    assert "the GPU waits for work that cannot finish" in job.output
    assert "allreduce 'stuck' on the GPU of rank" in job.output
    assert "went on" not in job.output
