"""Joining and leaving the job, and this process's place in it."""

import atexit
import contextlib
import ctypes
import os
import sys
import time
from types import TracebackType
from typing import Any, NamedTuple

from hvd_keras import _library, exit_codes, log, settings

# How long a rank that fails waits for the others to hear of it.
_HEARD_SECONDS = 2.0

# How long a rank lives on, by how it left: one that others waited for lets them say so on their own
# output; these let it end first, so that the launcher sees who failed first.
_LAST_WORDS_SECONDS = {
    "together": 0.0,
    "alone": 1.0,
    "unheard": 0.0,
    "deserted": 5.0,
    "lost": 0.5,
}
_FAREWELLS = tuple(_LAST_WORDS_SECONDS)

# With what a rank ends that fails; hvdrun tells by it who only followed another.
_EXIT_STATUS = {"deserted": exit_codes.DESERTED, "lost": exit_codes.WAITED_IN_VAIN}

_guards_installed = False

# mpi4py takes the first MPI that it finds; that must be this one, also before init().
settings.point_mpi4py_at(_library.mpi_file())


class _Place(NamedTuple):
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: int


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins the job: starts MPI if nobody has, and the engine of this process.

    Call it once at the top of the script, on every rank. A second call does nothing. Without a
    launcher the process is a world of size 1, in which everything works. All ranks wait here for
    each other: for ``HVD_FIRST_TIMEOUT_SECONDS`` (1800; 0: for ever), then the process ends with
    status 75, since MPI cannot be left otherwise.

    On a host with GPUs the process gets that of its ``local_rank()``, with memory growth, unless
    the script has chosen with ``tf.config.set_visible_devices``. See docs/gpu.md.

    Args:
        comm: who makes up the job: an mpi4py communicator, or a list of ranks of
            ``MPI.COMM_WORLD``; all of these call ``init`` with the same. Default: all processes.
        process_sets: ``hvd.ProcessSet`` objects, or lists of ranks, to add at once, the same on all
            ranks. (Horovod's ``"dynamic"`` is allowed; sets can be added at any time.)

    Raises:
        RuntimeError: MPI cannot be used (it was finalised, gives fewer threads than
            ``MPI_THREAD_MULTIPLE``, or mpi4py uses another MPI library than hvd_keras), or the
            host has fewer GPUs than processes, or TensorFlow has already taken all GPUs.
        ValueError: an ``HVD_`` environment variable has an impossible value, or ``comm`` does not
            contain this process.
        ImportError: the native libraries are missing or do not fit this TensorFlow.
    """
    core = _library.core()
    if core.hvd_initialized():
        return
    arrival = settings.read().arrival  # which says so, if a variable is wrong
    _library.tensorflow_ops()
    _use_one_mpi()
    from hvd_keras import gpu  # which loads TensorFlow

    gpu.find_libraries()
    ranks, communicator = _members(comm)
    array = (ctypes.c_int * len(ranks))(*ranks)
    if arrival is not None:
        with contextlib.suppress(OSError):  # then hvdrun says less, should another rank not come
            arrival.touch()
    _flush()  # for a process that ends because another does not come
    if core.hvd_init(array, len(ranks), communicator) != 0:
        kind = ValueError if ranks or "HVD_" in core.hvd_error().decode() else RuntimeError
        raise kind(core.hvd_error().decode())
    _install_guards()
    gpu.pin(local_rank(), local_size())
    core.hvd_set_log(settings.read().log_number)
    log.start(rank())
    log.logger.info(
        "local rank %d of %d, rank %d of %d; %s",
        *(local_rank(), local_size(), rank(), size()),
        _library.mpi_version().splitlines()[0],
    )
    from hvd_keras import gradients, membership  # which need this module

    del gradients  # they are registered now
    if process_sets is not None and process_sets != "dynamic":
        for process_set in process_sets:
            membership.add_process_set(process_set)


def shutdown() -> None:
    """Leaves the job; waits until all ranks have. ``init()`` may follow.

    Runs by itself when the script ends. If other ranks still wait for a collective of this rank,
    they get an error that says that it has left.
    """
    core = _library.core()
    if core.hvd_initialized():
        core.hvd_leave(b"it called hvd.shutdown()", -1.0)
        from hvd_keras import process_sets  # which needs this module

        process_sets.forget_all()


def is_initialized() -> bool:
    """Whether ``init()`` was called (and not ``shutdown()`` after it)."""
    return bool(_library.core().hvd_initialized())


def rank() -> int:
    """This process's number in the job, from 0 to ``size() - 1``."""
    return _place().rank


def size() -> int:
    """How many processes train together."""
    return _place().size


def local_rank() -> int:
    """This process's number among those of its host, from 0 to ``local_size() - 1``."""
    return _place().local_rank


def local_size() -> int:
    """How many processes of the job run on this host."""
    return _place().local_size


def cross_rank() -> int:
    """The number of this host among those that have a process with this ``local_rank()``."""
    return _place().cross_rank


def cross_size() -> int:
    """How many hosts have a process with this ``local_rank()``."""
    return _place().cross_size


def is_homogeneous() -> bool:
    """Whether all hosts have as many processes of the job."""
    return bool(_place().homogeneous)


def _place() -> _Place:
    core = _library.core()
    if not core.hvd_initialized():
        raise ValueError(
            "hvd_keras is not initialised in this process. Call hvd.init() first, once, at the "
            "top of the script."
        )
    seven = (ctypes.c_int * 7)()
    core.hvd_place(seven)
    return _Place(*seven)


def _members(comm: Any) -> tuple[list[int], int | None]:
    """Ranks of the world (none: all), and the address of an MPI_Comm."""
    if comm is None:
        return [], None
    if hasattr(comm, "Get_group"):
        from mpi4py import MPI

        return [], MPI._addressof(comm)
    ranks = [int(rank) for rank in comm]
    if not ranks or len(set(ranks)) < len(ranks):
        raise ValueError(
            f"hvd.init: comm is {comm!r}, expected ranks of MPI.COMM_WORLD, each once, or an "
            "mpi4py communicator."
        )
    return ranks, None


def _use_one_mpi() -> None:
    """Two MPI libraries in one process would know nothing of each other."""
    if "mpi4py.MPI" in sys.modules:
        user, theirs = "mpi4py", sys.modules["mpi4py.MPI"].Get_library_version()
    else:
        user, theirs = "this process", _library.core().hvd_mpi_version().decode()
    theirs, ours = (text.strip("\0\n ") for text in (theirs, _library.mpi_version()))
    if theirs != ours:
        raise RuntimeError(
            f"{user} uses {theirs.splitlines()[0]!r}, hvd_keras was built with "
            f"{ours.splitlines()[0]!r}: one process needs one MPI. Call hvd.init() before "
            "importing mpi4py, or build hvd_keras with HVD_MPICXX set to the other's mpicxx."
        )


def _install_guards() -> None:
    """An error or an end of one rank must reach all: the others would wait for it for ever."""
    global _guards_installed
    if _guards_installed:
        return
    _guards_installed = True
    previous_hook = sys.excepthook
    process = os.getpid()

    def abort_all(
        kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        try:
            previous_hook(kind, value, traceback)
        finally:  # whatever becomes of it
            core = _library.core()
            if os.getpid() == process and core.hvd_initialized() and size() > 1:
                _flush()
                farewell = _leave(_first_line(kind, value), _HEARD_SECONDS)
                status = _EXIT_STATUS.get(farewell, 1)
                if settings.read().watched:
                    # MPICH and SLURM would kill what tells hvdrun of this end, too.
                    os._exit(status)
                core.hvd_abort(status)

    def at_exit() -> None:
        if os.getpid() != process:
            return  # a forked child is no rank, and has no engine
        core = _library.core()
        if core.hvd_initialized():
            _flush()
            _leave("its script has ended", -1.0)
        core.hvd_finalize()

    sys.excepthook = abort_all
    atexit.register(at_exit)


def _first_line(kind: type[BaseException], value: BaseException) -> str:
    try:
        return f"{kind.__name__}: {value}".splitlines()[0]
    except Exception:  # its own __str__ fails
        return kind.__name__


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, or nobody reads it
            stream.flush()


def _leave(reason: str, seconds: float) -> str:
    farewell: str = _FAREWELLS[_library.core().hvd_leave(reason.encode(), seconds)]
    if farewell == "alone":
        log.logger.error("left while others waited for it, so the job ends: %s", reason)
        _flush()
    time.sleep(_LAST_WORDS_SECONDS[farewell])
    return farewell
