"""The only module, except the launcher, that reads or sets environment variables.

The core reads its own settings in native/core/base/settings.h.
"""

import atexit
import contextlib
import dataclasses
import functools
import importlib.machinery
import json
import os
import pathlib
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hvd_keras.runtime.linux import in_folder

#: What `tell_hvdrun` marks: the program uses hvd_keras, so it should call `hvd.init()`;
ASKED_FOR = "asked-for"
#: `hvd.init()` was called; has succeeded, perhaps with a ``comm`` of some ranks;
ARRIVED = "arrived"
JOINED = "joined"
CHOSEN = "chosen"
#: this process ends because of another rank; is about to finalize MPI; has done so, after which
#: its exit status is the script's choice.
FOLLOWS = "follows"
LEAVING = "leaving"
ENDED = "ended"
#: what begins the name of an uncaught error; before it, that another rank of the host prints it.
ERROR, REPEATED = "error-", "repeated-"

#: Exit statuses of ranks that end because of another rank: it left while this one waited for it;
#: this one timed out waiting for it; Open MPI lost the connection to it.
DESERTED, WAITED_IN_VAIN, MPI_LOST = 76, 75, 14
FOLLOWERS = frozenset({DESERTED, WAITED_IN_VAIN, MPI_LOST})

#: As the core numbers them.
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of this process."""

    #: of the gradients in one request. Larger buckets need fewer agreements; smaller start earlier.
    bucket_bytes: int = 16 << 20
    log_level: str = "WARNING"  # for the core as well
    gpus_shared: bool = False  # by processes of a host
    some_gpus_hidden: bool = False  # from CUDA
    #: None: what lets the ranks train separate models is an error, and other advice a warning.
    #: True: all of it are errors; False: warnings.
    strict: bool | None = None
    verbose_all: bool = False  # all ranks show Keras's progress bar by default, not one
    watched: bool = False  # hvdrun follows this process
    #: A rank that fails because another one has left prints its traceback, too.
    all_tracebacks: bool = True
    postmortem: pathlib.Path | None = None  # where each rank keeps what it did last
    postmortem_is_asked: bool = False  # the user has named that folder, not hvdrun
    timeline: str = ""  # the file of that of all ranks
    stats_directory: pathlib.Path | None = None  # where each rank writes its statistics
    tells_statistics: bool = False  # hvdrun wants them
    commits: pathlib.Path | None = None  # where rank 0 keeps what hvd.elastic commits
    always_divides: bool = False  # hvdrun --auto, even if one process is faster


def _path(name: str) -> pathlib.Path | None:
    text = os.environ.get(name)
    return pathlib.Path(text).absolute() if text else None  # a script may change its folder


@functools.cache
def read() -> Settings:
    """Read the environment, once per process; ValueError if a variable has an invalid value."""
    size = os.environ.get("HVD_BUCKET_BYTES") or str(Settings.bucket_bytes)
    is_size = size.isdecimal() and int(size) > 0
    level = os.environ.get("HVD_LOG_LEVEL") or Settings.log_level
    names = ("HVD_AUTO", "HVD_STRICT", "HVD_VERBOSE_ALL")
    auto, strict, verbose = (os.environ.get(name, "") for name in names)
    for name, text, fits, expected in (
        ("HVD_BUCKET_BYTES", size, is_size, "a positive number of bytes"),
        ("HVD_LOG_LEVEL", level, level.upper() in LOG_LEVELS, "debug, info, warning or error"),
        ("HVD_AUTO", auto, auto in ("", "divided"), "divided"),
        ("HVD_STRICT", strict, strict in ("", "0", "1"), "0 or 1"),
        ("HVD_VERBOSE_ALL", verbose, verbose in ("", "0", "1"), "0 or 1"),
    ):
        if not fits:
            raise ValueError(f"{name} is {text!r}, expected {expected}. Correct or unset it.")
    # Variables HVDRUN_… come from the launcher, HVD_… from the user.
    watched = "HVDRUN_JOB" in os.environ
    asked = _path("HVD_POSTMORTEM")
    return Settings(
        bucket_bytes=int(size),
        log_level=level.upper(),
        gpus_shared=os.environ.get("HVD_GPU_OPERATIONS") == "MPI"
        or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1",
        some_gpus_hidden=bool(os.environ.get("CUDA_VISIBLE_DEVICES")),
        strict=strict == "1" if strict else None,
        verbose_all=verbose == "1",
        watched=watched,
        all_tracebacks="HVDRUN_VERBOSE" in os.environ or not watched,
        postmortem=asked or _path("HVDRUN_POSTMORTEM"),
        postmortem_is_asked=asked is not None,
        timeline=os.environ.get("HVD_TIMELINE", ""),
        stats_directory=_path("HVD_STATS_DIRECTORY"),
        tells_statistics="HVDRUN_STATISTICS" in os.environ,
        commits=_path("HVD_COMMITS"),
        always_divides=auto == "divided",
    )


def warn_only() -> None:
    """Let ranks train separate models with a warning, unless the user has set ``HVD_STRICT``."""
    os.environ.setdefault("HVD_STRICT", "0")
    read.cache_clear()


def wait_without_limit() -> None:
    """Let ranks wait for as long as a script takes, unless the user has set limits."""
    for name in ("HVD_TIMEOUT_SECONDS", "HVD_STALL_WARNING_SECONDS"):
        os.environ.setdefault(name, "0")


def mpi_library() -> str:
    """``HVD_MPI_LIBRARY``: the full path of the MPI library to use; empty: the first found."""
    return os.environ.get("HVD_MPI_LIBRARY", "")


def mpi4py_library() -> str:
    """``MPI4PY_LIBMPI``: the MPI library that mpi4py is to use; empty: the first that it finds."""
    return os.environ.get("MPI4PY_LIBMPI", "")


@functools.cache
def backend_module() -> str:
    """Return the module that has what depends on Keras's backend."""
    backend = keras_backend()
    return "hvd_keras.patches.registry" if backend == "tensorflow" else f"hvd_keras.{backend}"


def wants_legacy_keras() -> bool:
    """Whether ``tf.keras`` is to be tf_keras."""
    return os.environ.get("TF_USE_LEGACY_KERAS", "0").lower() in ("1", "true")


def keras_backend() -> str:
    """Return the backend that Keras has chosen, or will choose when it is imported.

    Raises:
        RuntimeError: hvd_keras does not support it.
    """
    if wants_legacy_keras():
        return "tensorflow"
    folder = pathlib.Path(os.environ.get("KERAS_HOME") or pathlib.Path.home() / ".keras")
    name = os.environ.get("KERAS_BACKEND")
    if not name:
        with contextlib.suppress(OSError, ValueError, KeyError):
            name = json.loads((folder / "keras.json").read_text())["backend"]
    name = name or "tensorflow"
    if name not in ("tensorflow", "torch"):
        raise RuntimeError(
            f"hvd_keras needs the TensorFlow or PyTorch backend of Keras, and {name} is chosen. "
            'Set KERAS_BACKEND=tensorflow, or "backend": "tensorflow" in ~/.keras/keras.json. On '
            "JAX, Keras distributes training itself: keras.distribution.DataParallel."
        )
    return name


def library_path() -> str:
    """``LD_LIBRARY_PATH``: folders of shared libraries."""
    return os.environ.get("LD_LIBRARY_PATH", "")


def user_cache() -> pathlib.Path:
    """Return the folder for what programs of this user keep to save work."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")


# In words, and its variables for the number of processes and for that of this process.
_LAUNCHERS = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("the mpirun of MPICH or Intel MPI", "PMI_SIZE", "PMI_RANK"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)

#: Those whose processes MPI does not join.
OTHERS = (
    ("torchrun, accelerate or another launcher", "WORLD_SIZE", "RANK"),
    ("Horovod's launcher", "HOROVOD_SIZE", "HOROVOD_RANK"),
)


def launched(
    environment: Mapping[str, str] = os.environ, launchers: Sequence[Sequence[str]] = _LAUNCHERS
) -> tuple[str, str, int]:
    """The launcher that has started this process, and the variable that says how many it started.

    Returns:
        The launcher in words, the variable's name and its value; without one, "", "" and 1.
    """
    for launcher, name, rank in launchers:
        if (text := environment.get(name, "")).isdecimal() and rank in environment:
            return launcher, name, int(text)
    return "", "", 1


# Programs that start the ranks of a host. (That of srun also starts batch scripts.)
_STARTERS = {"mpirun", "orterun", "prterun", "orted", "prted", "hydra_pmi_proxy"}


def launched_above() -> tuple[str, int]:
    """Return what has started this process as one of how many ranks, whatever its environment.

    "" and 1 if nothing has, or a process that uses hvd_keras is between: that one is the rank.
    """
    process = os.getppid()
    with contextlib.suppress(OSError):  # another user's process, or no Linux
        while process > 1:
            folder = pathlib.Path(f"/proc/{process}")
            if b"/libhvd_core.so" in (folder / "maps").read_bytes():
                break  # the rank
            if "HVDRUN_SECRET" in (found := _first_environment(folder)):  # hvdrun's worker
                return "hvdrun", launched(found)[2]
            if os.fsdecode((folder / "comm").read_bytes()).strip() in _STARTERS:
                tasks = (folder / "task").glob("*/children")
                return "mpirun", sum(len(task.read_text().split()) for task in tasks)
            process = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
    return "", 1


def _first_environment(folder: pathlib.Path) -> dict[str, str]:
    """Return the environment that the process of this folder of /proc was started with."""
    entries = os.fsdecode((folder / "environ").read_bytes()).split("\0")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def is_launched() -> bool:
    """Whether a launcher has started this process as one of several."""
    return launched()[2] > 1 or "PMIX_RANK" in os.environ


def launched_rank() -> int:
    """Return the number that the launcher has given this process; without a launcher 0."""
    _, found, _ = launched()
    return next((int(os.environ.get(rank, 0)) for _, name, rank in _LAUNCHERS if name == found), 0)


_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def export_ranks(prefix: str) -> None:
    """Set ``PREFIX_RANK``, ``PREFIX_SIZE`` and the local ones, by which programs know a rank."""
    _, name, size = launched()
    if not name:
        return
    os.environ.setdefault(f"{prefix}_RANK", str(launched_rank()))
    os.environ.setdefault(f"{prefix}_SIZE", str(size))
    for ours, theirs in (("RANK", _LOCAL_RANKS), ("SIZE", _LOCAL_SIZES)):
        for found in filter(None, map(os.environ.get, theirs)):
            os.environ.setdefault(f"{prefix}_LOCAL_{ours}", found)


_JOINED = "HVDRUN_JOINED"  # a rank's process, number and job


def _job() -> str:
    """Tell the job from others that a rank may start."""
    return ":".join(
        os.environ.get(name, "") for name in ("HVDRUN_JOB", "PMIX_NAMESPACE", "SLURM_STEP_ID")
    )


def tell_children(rank: int) -> None:
    """Let the processes that this rank will start know that they are none."""
    os.environ[_JOINED] = f"{os.getpid()},{rank},{_job()}"


def parent_rank() -> int | None:
    """Return the rank of this job that has started this process; None if it may be a rank."""
    process, rank, job = os.environ.get(_JOINED, "0,0,").split(",", 2)
    if process == str(os.getpid()) or job != _job():
        return None
    return int(rank) if os.path.exists(f"/proc/{process}") else None


_hvdrun: socket.socket | None = None


def tell_hvdrun(**message: Any) -> None:
    """Tell hvdrun, if it has started this process, something about this rank.

    Does nothing if hvdrun's worker has gone, or takes nothing for a second.

    Args:
        message: ``mark``, one of those above, or ``statistics``, a dict.
    """
    global _hvdrun
    if (path := os.environ.get("HVDRUN_TELL")) is None:
        return
    with contextlib.suppress(OSError):
        if _hvdrun is None:
            ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            ear.settimeout(1.0)
            with in_folder(pathlib.Path(path).parent) as folder:
                ear.connect(f"{folder}/{os.path.basename(path)}")
            _hvdrun = ear
            atexit.register(ear.close)
        _hvdrun.send(json.dumps(message).encode())


def hvdrun_folder() -> pathlib.Path | None:
    """Return the folder of the job on this host; None without hvdrun, or if it is verbose."""
    if "HVDRUN_TELL" not in os.environ or "HVDRUN_VERBOSE" in os.environ:
        return None
    return pathlib.Path(os.environ["HVDRUN_TELL"]).parents[1]


# Variables that TensorFlow, PyTorch, Keras, or what they import, read when they are imported.
_READ_BY_IMPORTS = re.compile(
    "(TF_(?!NUM_)|(KERAS|XLA|OMP|MKL|OPENBLAS|NVIDIA|TORCH|PYTORCH|HDF5_USE)_)"
)


def tell_imports() -> None:
    """Tell hvdrun what a later start of this rank may have ready.

    Raises:
        RuntimeError: this rank had it ready (``HVD_KEEP_IMPORTS``), and the script has then set
            what is read during imports, or would have imported another Keras.
    """
    if "HVDRUN_TELL" not in os.environ:
        return
    first = _first_environment(pathlib.Path("/proc/self"))
    now = dict(os.environ)
    names = {name for name in {*first, *now} if _READ_BY_IMPORTS.match(name)}
    changes = {name: now.get(name) for name in names if now.get(name) != first.get(name)}
    packages = ("tensorflow", "torch", "keras", "tf_keras")
    places = {name: getattr(sys.modules.get(name), "__file__", None) for name in packages}
    modules = {name: place for name, place in places.items() if place}
    if "HVDRUN_FORKED" not in os.environ:
        tell_hvdrun(command=sys.orig_argv, changes=changes, modules=modules)
        return
    late = [*changes]
    for name, path in modules.items():
        found = importlib.machinery.PathFinder.find_spec(name, sys.path)
        late += [name] * (found is None or found.origin != path)
    if late:
        raise RuntimeError(
            f"hvd.init: the script has chosen {', '.join(sorted(late))} too late: with "
            "HVD_KEEP_IMPORTS, its process has imported Keras before. Choose it in the environment "
            "of hvdrun, or unset HVD_KEEP_IMPORTS."
        )


def show_gpus(numbers: str) -> None:
    """Let CUDA see these GPUs alone, such as "0,2", in this process and those that it starts."""
    os.environ["CUDA_VISIBLE_DEVICES"] = numbers


def point_mpi4py_at(mpi_library: str) -> None:
    """Make a later import of mpi4py use this MPI library ("": none), unless one is chosen."""
    if mpi_library:
        os.environ.setdefault("MPI4PY_LIBMPI", os.path.realpath(mpi_library))


@contextlib.contextmanager
def chosen_transports(mpi_version: str) -> Iterator[None]:
    """Turn off unneeded transports of Open MPI 5 in a block, unless the user has chosen some."""
    # The one-sided transport over libfabric sleeps for a second in MPI_Init while it looks for
    # networks; hvd_keras does not use it. A process that no launcher has started needs no
    # transport, and the one over shared memory would leave a file in /dev/shm.
    match, name = re.match(r"Open MPI v(\d+)", mpi_version), "OMPI_MCA_btl"
    if not match or int(match[1]) < 5 or name in os.environ:
        yield
        return
    is_alone = not {"PMIX_RANK", "OMPI_COMM_WORLD_RANK"} & os.environ.keys()
    os.environ[name] = "self" if is_alone else "^ofi"
    try:
        yield
    finally:
        del os.environ[name]  # a job started from this process needs its own transports
