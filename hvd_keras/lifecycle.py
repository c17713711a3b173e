"""`init` and `shutdown`: join and leave the job; a failure of one rank ends all ranks."""

import atexit
import contextlib
import ctypes
import enum
import functools
import importlib
import multiprocessing
import operator
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from hvd_keras import observe
from hvd_keras.runtime import (
    flight,
    gpu,
    libraries,
    log,
    mpi_library,
    rank_info,
    settings,
)
from hvd_keras.runtime.linux import cpu_quota
from hvd_keras.runtime.process_sets import (
    ProcessSet,
    add_process_set,
    added,
    forget_all,
    remove_process_set,
    world_ranks_of,
)

#: What depends on Keras's backend; its interface is that of ``patches.registry``.
backend: Any = importlib.import_module(settings.backend_module())

#: Whether `init` changes Keras; not where one rank alone runs a script.
changes_keras = True

# Seconds for which a failing rank waits until the others have received its error.
_ERROR_SECONDS = 2.0


class LeaveResult(enum.IntEnum):
    """How this rank left the job, as the core numbers and names it."""

    TOGETHER = 0  # all_left: all ranks left
    AWAITED = 1  # left_early: others still waited for this rank, and got its reason
    NO_ANSWER = 2  # no_answer: the others did not answer in time
    DESERTED = 3  # peer_left: another rank had left while this one waited for it
    TIMED_OUT = 4  # aborted: the ranks had waited for too long


# Seconds for which a rank stays alive after it has left. A rank that others waited for gives them
# time to print their errors; a rank that failed because of another one lets that one end first, so
# that the launcher sees which failed first.
_LINGER_SECONDS = {
    LeaveResult.AWAITED: 1.0,
    LeaveResult.DESERTED: 5.0,
    LeaveResult.TIMED_OUT: 0.5,
}

# The exit status of a failing rank: hvdrun learns which ranks failed because of another one.
_EXIT_STATUS = {
    LeaveResult.DESERTED: settings.DESERTED,
    LeaveResult.TIMED_OUT: settings.WAITED_IN_VAIN,
}

# Why a rank leaves whose script has ended without an error.
_NO_REASON = "its script has ended"

_guards_installed = False
_rank_process = 0  # the process that joined; a forked child has another id


def init(comm: Any = None, process_sets: Iterable[Any] | str | None = None) -> None:
    """Join the job: starts MPI, unless it is running, and the engine of this process.

    Call it once at the top of the script, on every rank. A second call only adds process sets that
    do not exist yet. Without a launcher the process is a job of size 1, in which everything works,
    and which needs no MPI.
    All ranks wait here for each other, for at most ``HVD_FIRST_TIMEOUT_SECONDS`` (1800; 0: no
    limit). After that the process ends with status 75, because a wait inside MPI cannot be
    interrupted.

    On a host with GPUs the process uses the GPU with the number ``local_rank()``, with memory
    growth, unless the script has called ``tf.config.set_visible_devices``. See docs/gpu.md.

    Args:
        comm: the processes of the job: an mpi4py communicator, or a list of ranks of
            ``MPI.COMM_WORLD``; all of them pass the same. Default: all processes. Processes
            outside it must call init() too, because MPI starts on all together; they get a
            ValueError.
        process_sets: ``hvd.ProcessSet`` objects, or lists of ranks, to add, the same on all ranks.
            (Horovod's ``"dynamic"`` is accepted; sets can be added at any time.)

    Raises:
        RuntimeError: MPI cannot be used (it was finalised, lacks ``MPI_THREAD_MULTIPLE``, was
            loaded twice, or does not belong to the launcher); or the host has fewer GPUs than
            processes; or TensorFlow has already initialized all GPUs; or the native libraries are
            missing or were built for another TensorFlow; or this process has left a job while
            other ranks waited for it.
        ValueError: an ``HVD_`` environment variable has an invalid value, or ``comm`` is no
            communicator or list of ranks, or does not contain this process, or a process set is
            invalid (see ``add_process_set``).
    """
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ValueError(
            f"hvd.init: process_sets is {process_sets!r}, expected hvd.ProcessSet objects or lists "
            'of ranks, or "dynamic".'
        )
    if _is_child_of_rank():
        return
    core = libraries.core()
    if rank_info.left_alone:
        raise RuntimeError(
            "hvd.init: this process left the job during a collective, so it cannot join again. "
            "Restart the job."
        )
    if not core.hvd_initialized():
        _join(comm)
    global _is_prepared
    if not _is_prepared:
        log.start(rank_info.rank())
        backend.pin(rank_info.local_rank(), rank_info.local_size())
        log.logger.info(
            "local rank %d of %d, rank %d of %d; %s",
            *(rank_info.local_rank(), rank_info.local_size(), rank_info.rank(), rank_info.size()),
            libraries.mpi_version().splitlines()[0],
        )
        if changes_keras:
            backend.install()
        flight.start()
        observe.start_publishing()
        _is_prepared = True
    _add_process_sets(process_sets)


def _is_child_of_rank() -> bool:
    """Whether multiprocessing has started this process in a rank, which imports the script again.

    Raises RuntimeError if the rank has started it in another way: MPI would take it for the rank.
    """
    if (rank := settings.parent_rank()) is None:
        return False
    text = f"hvd.init: rank {rank} has started this process, which is no rank"
    process = multiprocessing.current_process()
    # A fork server that imports the script is a main process, too.
    if process.name == "MainProcess" and not getattr(process, "_inheriting", False):
        raise RuntimeError(f"{text}. Leave hvd.init() out of what a rank starts.")
    log.logger.info("%s, so init() does nothing. Calls of hvd_keras need a rank", text)
    return True


# Whether what follows the joining is done: if it has failed, another init() does it.
_is_prepared = False


def _join(comm: Any) -> None:
    global _is_prepared
    _is_prepared = False
    core = libraries.core()
    settings.read()  # raises if a variable has a wrong value
    backend.load()
    mpi_library.refuse_two()
    gpu.find_libraries()
    ranks, communicator = _members(comm)
    if comm is None:
        _refuse_lost_environment()
    array = (ctypes.c_int * len(ranks))(*ranks)
    settings.tell_hvdrun(mark=settings.ARRIVED)
    settings.tell_imports()
    _flush()  # hvd_init ends the process if another rank does not come
    with settings.chosen_transports(libraries.mpi_version()):
        code = core.hvd_init(array, len(ranks), communicator, cpu_quota())
    hangup = signal.getsignal(signal.SIGHUP)
    if hangup is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, hangup)  # which UCX, loaded by Open MPI, has taken
    if code == libraries.INVALID_ARGUMENT:
        _install_guards()  # in a process outside of the job, MPI must end, too
        raise ValueError(core.hvd_error().decode())
    if code:
        raise RuntimeError(core.hvd_error().decode())
    global _rank_process
    _rank_process = os.getpid()
    if comm is None:
        _refuse_lonely_world()
    settings.tell_hvdrun(mark=settings.JOINED)
    if rank_info.size() < settings.launched()[2]:
        settings.tell_hvdrun(mark=settings.CHOSEN)
    rank_info.world_ranks = ranks if communicator is None else world_ranks_of(comm)
    if rank_info.size() > 1:
        settings.tell_children(rank_info.rank())
    _install_guards()
    core.hvd_set_log(settings.LOG_LEVELS.index(settings.read().log_level))


def shutdown() -> None:
    """Leaves the job and waits until all ranks have left. ``init()`` may be called again.

    Called automatically at the end of the script. If other ranks still wait for a collective of
    this rank, they get an error that names it, and this process cannot join a job again.
    """
    if rank_info.is_initialized() and os.getpid() == _rank_process:
        if _leave("it called hvd.shutdown()", -1.0) is not LeaveResult.TOGETHER:
            rank_info.left_alone = True
        forget_all()


def end(error: str, seconds: float) -> None:
    """Leave the job for good, as at the end of a script, in a process that lives on.

    Args:
        error: why this process fails, which the others show; empty if it does not.
        seconds: how long to wait for the others; negative: as long as they need.
    """
    if os.getpid() != _rank_process:
        return
    if is_last := rank_info.is_initialized():
        _leave(error or _NO_REASON, seconds)
        if error:
            rank_info.left_alone = True
            return
    elif error:
        return
    _finalize(is_last)


def _finalize(is_now: bool) -> None:
    """Let MPI end. If all ranks leave now, one that another does not join there ends the job."""
    settings.tell_hvdrun(mark=settings.LEAVING)
    libraries.core().hvd_finalize(is_now)
    settings.tell_hvdrun(mark=settings.ENDED)


def _add_process_sets(process_sets: Iterable[Any] | str | None) -> None:
    if process_sets is None or isinstance(process_sets, str):
        return  # "dynamic"
    there = [process_set.ranks for process_set in added()]
    new: list[ProcessSet] = []
    try:
        for wanted in process_sets:
            process_set = wanted if isinstance(wanted, ProcessSet) else ProcessSet(wanted)
            is_there = process_set.process_set_id is not None
            # A list of ranks whose set exists needs nothing; an object must be registered itself.
            if not is_there and (process_set is wanted or process_set.ranks not in there):
                new.append(add_process_set(process_set))
                there.append(process_set.ranks)
    except (TypeError, ValueError):  # on every rank
        for process_set in new:
            remove_process_set(process_set)
        raise


def _members(comm: Any) -> tuple[list[int], int | None]:
    """Ranks of MPI.COMM_WORLD (empty: all), and the address of an MPI_Comm."""
    if comm is None:
        return [], None
    if hasattr(comm, "Get_group"):
        from mpi4py import MPI

        if comm == MPI.COMM_NULL:
            raise ValueError(
                "hvd.init: comm is MPI.COMM_NULL, so this process is not among those of the job. "
                "Call hvd.init only on those that are."
            )
        return [], MPI._addressof(comm)
    try:
        ranks = [operator.index(rank) for rank in comm]
    except TypeError:
        ranks = []
    if not ranks or len(set(ranks)) < len(ranks):
        raise ValueError(
            f"hvd.init: comm is {comm!r}, expected ranks of MPI.COMM_WORLD, each once, or an "
            "mpi4py communicator. Of several communicators, give that of the whole job as comm, "
            "and the others as process_sets=[hvd.ProcessSet(other), …]."
        )
    return ranks, None


def _refuse_lost_environment() -> None:
    """Raise if this process is one of several that cannot find each other; MPI may end it then."""
    launcher, count = settings.launched_above()
    if count > 1 and not settings.is_launched():
        raise RuntimeError(
            f"hvd.init: {launcher} started {count} processes, but what it starts (env -i, sudo, a "
            "script) removes the variables by which they find each other. Let it keep all that "
            "begin with OMPI_, PMI, SLURM_ or HVD. If this process is to train alone, call "
            "hvd.init(comm=[0])."
        )
    launcher, name, count = settings.launched(launchers=settings.OTHERS)
    # srun may start one such launcher.
    if count > 1 and settings.launched()[0] in ("", "srun") and not settings.is_launched():
        raise RuntimeError(
            f"hvd.init: {launcher} has started {count} processes ({name}={count}), which would "
            f"train apart, as MPI cannot join them. Start the script with hvdrun -np {count}. If "
            f"this process is to train alone, unset {name}, or call hvd.init(comm=[0])."
        )


def _refuse_lonely_world() -> None:
    """Raise if a launcher started several processes, but each is alone in its MPI's world."""
    launcher, _, count = settings.launched()
    if rank_info.size() > 1 or count == 1:
        return
    _leave("it is alone in its MPI's world", _ERROR_SECONDS)
    raise RuntimeError(
        f"hvd.init: {launcher} started {count} processes, but each is alone in its MPI's world, "
        f"because their MPI, {libraries.core().hvd_mpi_file().decode()}, is another one. Start the "
        "script with hvdrun, which takes the mpirun of that MPI, or set HVD_MPI_LIBRARY to the "
        "library of your launcher's MPI; with srun, pass --mpi=pmix for Open MPI and --mpi=pmi2 "
        "for MPICH. If this process is to train alone, call hvd.init(comm=[0])."
    )


def _install_guards() -> None:
    """Notify all ranks, which would wait forever, if an uncaught exception or the end comes."""
    global _guards_installed
    if _guards_installed:
        return
    _guards_installed = True
    previous_hook, previous_exit = sys.excepthook, sys.exit
    process, reason = os.getpid(), _NO_REASON

    def abort_all(
        kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        try:
            if (line := _other_rank_left(value)) and not settings.read().all_tracebacks:
                print(f"{kind.__name__}: {line} (hvdrun --verbose: where)", file=sys.stderr)
            else:
                previous_hook(kind, value, traceback)
        finally:  # even if the hook fails
            if os.getpid() == process and _is_ending():
                _end_all(kind, value, traceback)

    def at_exit() -> None:
        if os.getpid() != process:
            return  # a forked child is not a rank, and has no engine
        if (error := _uncaught()) is not None:  # a library has replaced our hook
            _end_all(type(error), error, error.__traceback__)
        if is_last := rank_info.is_initialized():
            _flush()
            _leave(reason, -1.0)
        elif error is not None:
            return  # other ranks may wait in init(), where this one has failed or will not come
        _finalize(is_last)
        if log.has_failed:
            _flush()
            os._exit(1)

    @functools.wraps(previous_exit)
    def exit_with_reason(status: Any = None, /) -> NoReturn:
        nonlocal reason  # no hook hears of a SystemExit
        if threading.current_thread() is threading.main_thread():
            reason = _first_line(SystemExit, SystemExit(status)) if status else _NO_REASON
        previous_exit(status)

    sys.excepthook, sys.exit = abort_all, exit_with_reason
    atexit.register(at_exit)


def _end_all(
    kind: type[BaseException], value: BaseException, traceback: TracebackType | None
) -> None:
    """Leave the job, if it has other ranks, with an error, and end this process."""
    if not rank_info.left_alone and (not rank_info.is_initialized() or rank_info.size() == 1):
        return
    _flush()
    exit_status = 1
    flight.note_exception(kind, traceback)
    if not rank_info.left_alone:
        left = _leave(_first_line(kind, value), _ERROR_SECONDS)
        exit_status = _EXIT_STATUS.get(left, 1)
        if left in _EXIT_STATUS:
            settings.tell_hvdrun(mark=settings.FOLLOWS)
    if settings.read().watched:
        # MPICH and SLURM would also kill the process that reports to hvdrun.
        os._exit(exit_status)
    libraries.core().hvd_abort(exit_status)


def _uncaught() -> BaseException | None:
    """Return the error that has ended the script, if one has."""
    # An error that ends the script starts in a module's frame without a caller. Errors of
    # callbacks, which libraries print, do not.
    trace = getattr(sys, "last_traceback", None)
    if trace is None or trace.tb_frame.f_back is not None:
        return None
    is_module = trace.tb_frame.f_code.co_name in ("<module>", "_run_module_as_main")
    return sys.last_value if is_module else None


def _is_ending() -> bool:
    """Whether ``sys.excepthook`` runs because an exception ends the script."""
    # Libraries print errors with it that they cannot raise, and scripts those that they have
    # caught. Then the body of a module, usually of the script, still runs.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            return False
        frame = frame.f_back
    return threading.current_thread() is threading.main_thread()


def _other_rank_left(value: BaseException) -> str:
    """Return the line of an error that names the rank whose own error has caused it, if one has."""
    if type(value).__name__ != "AbortedError":  # of TensorFlow's, or of hvd_keras
        return ""
    line = next((line for line in str(value).splitlines() if " has left the job: " in line), "")
    return "" if f": {_NO_REASON}" in line else line  # then no other error tells why


def _first_line(kind: type[BaseException], value: BaseException) -> str:
    try:
        return f"{kind.__name__}: {value}".splitlines()[0]
    except Exception:  # its own __str__ fails
        return kind.__name__


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, or nobody reads it
            stream.flush()


def _leave(reason: str, seconds: float) -> LeaveResult:
    left = LeaveResult(
        libraries.core().hvd_leave(reason.encode(errors="backslashreplace"), seconds)
    )
    if left is LeaveResult.AWAITED:
        log.logger.error("left while others waited for it, so the job ends: %s", reason)
        _flush()
    observe.stop_publishing()
    if left is LeaveResult.TOGETHER:
        observe.merge_timeline()
    flight.stop(keep=left is not LeaveResult.TOGETHER)
    time.sleep(_LINGER_SECONDS.get(left, 0.0))
    return left
