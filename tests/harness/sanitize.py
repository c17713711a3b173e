"""Builds the core and its tests with sanitizers, and runs them. TensorFlow is not loaded.

AddressSanitizer and UndefinedBehaviorSanitizer see all tests. ThreadSanitizer sees those without
MPI: Open MPI itself does not start under it, so there ranks are threads (threads_test).
"""

import os
import pathlib
import subprocess
import sys

from tests.harness import ranks

ROOT = pathlib.Path(__file__).parents[2]
ALONE = ("agreement_test", "collectives_test", "ends_test")
ALONE += ("host_counters_test", "host_threads_test", "loops_test", "recorder_test", "reduce_test")
WITH_MPI = ("engine_test", "exchange_test", "leave_test")
# The parts of gpu_test, each in separate processes.
OF_GPUS = ("", "stops", "fails", "without")
# Memory that these libraries never free, by design.
LEAKS_OF_OTHERS = ("libmpi.so", "libopen-pal.so", "libpmix.so", "libevent", "libhwloc.so")


def build(name: str, *flags: str, tensorflow: bool = False) -> pathlib.Path:
    """Builds the test programs, perhaps those with TensorFlow, too, and returns their folder."""
    folder = ROOT / "build" / f"sanitize-{name}"
    tools = pathlib.Path(sys.executable).parent
    configure = [str(tools / "cmake"), "-S", str(ROOT / "native"), "-B", str(folder), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}"]
    configure += [f"-DHVD_TENSORFLOW={'ON' if tensorflow else 'OFF'}", "-DHVD_BUILD_TESTS=ON"]
    configure += ["-DCMAKE_BUILD_TYPE=Debug", f"-DCMAKE_CXX_FLAGS=-O1 {' '.join(flags)}"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    command = [str(tools / "ninja"), "-C", str(folder), "--quiet", "all", "tests/all"]
    subprocess.run(command, check=True)
    return folder / "tests"


def run(binaries: pathlib.Path, *tests: str) -> None:
    """Runs programs one by one; exits at the first one that reports an error."""
    for test in tests:
        print(f"{binaries.parent.name}: {test}", flush=True)
        subprocess.run([str(binaries / test)], check=True, timeout=600)


def main() -> None:
    """Everything."""
    address = build("address", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    suppressions = address / "leaks-of-others"
    suppressions.write_text("".join(f"leak:{library}\n" for library in LEAKS_OF_OTHERS))
    os.environ["LSAN_OPTIONS"] = f"suppressions={suppressions}:print_suppressions=0"
    run(address, *ALONE, "threads_test")
    os.environ["ASAN_OPTIONS"] = "fast_unwind_on_malloc=0"  # whole stacks, to know whose leak it is
    fake_cuda = str(address / "libhvd_fake_cuda.so")
    os.environ |= {"HVD_CUDART_LIBRARY": fake_cuda, "HVD_NCCL_LIBRARY": fake_cuda}
    transports = (("mpi", 2), ("host", 2), ("cluster", 3), ("grid", 4), ("gpu", 2))
    jobs = [(size, test, transport) for test in WITH_MPI for transport, size in transports]
    jobs += [(7, "inter_host_test")]
    jobs += [(2, "gpu_test", "gpu", which) for which in OF_GPUS]
    for size, test, *arguments in jobs:
        print(f"{address.parent.name}: {test} {' '.join(arguments)} on {size} ranks", flush=True)
        job = ranks.mpirun(size, str(address / test), *arguments, timeout=600)
        if job.status != 0:
            sys.exit(job.output)
    # UCX, a part of Open MPI, intercepts mmap, which the sanitizer does already.
    os.environ |= {"UCX_MEM_EVENTS": "n", "UCX_MEM_MMAP_HOOK_MODE": "none"}
    run(build("thread", "-fsanitize=thread"), *ALONE, "threads_test")
    print("The sanitizers have found nothing.")


if __name__ == "__main__":
    main()
