"""The flight recorder of a rank: files that say what it did last, read by ``postmortem``.

With ``HVD_POSTMORTEM=FOLDER`` each rank keeps two files there. One has its last requests (written
by the core) and the lines of the script that called hvd_keras last. It is mapped into memory, so it
also shows what a killed process did. The other has the stacks of its threads whenever requests
fail, or when the process is ended. They are removed if the ranks leave the job together.
"""

import contextlib
import faulthandler
import functools
import json
import mmap
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import traceback
from types import CodeType, FrameType, TracebackType
from typing import BinaryIO

from hvd_keras.postmortem import CALL_BYTES, CALLS, COUNT, FILE_BYTES, FIRST_CALL, is_library
from hvd_keras.runtime import libraries, log, rank_info, settings

# Seconds that py-spy may take.
_NATIVE_SECONDS = 10


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Folders whose files are not the user's script."""
    paths = sysconfig.get_paths()
    here = pathlib.Path(__file__).parents[1]
    ours = {str(here), str(here.with_name("callbacks"))}  # the latter in an editable installation
    added = [path for path in sys.path if path.endswith("-packages")]  # of the user, of Debian
    found = {paths["stdlib"], paths["purelib"], paths["platlib"], *added, *ours}
    return tuple(os.path.realpath(path) + os.sep for path in found)


@functools.lru_cache(maxsize=4096)
def is_script(file: str) -> bool:
    """Whether a file of Python code is the user's, not of a library."""
    return not is_library(file, _libraries())


class _Recorder:
    """The files of this rank."""

    _is_handler = False  # of crashes; then those of this process that follow are, too

    def __init__(self, folder: pathlib.Path, rank: int) -> None:
        self._paths = [folder / f"rank-{rank}.{what}" for what in ("requests", "stacks")]
        self._keep = False
        self._count = 0
        folder.mkdir(parents=True, exist_ok=True)
        for path in self._paths:
            path.unlink(missing_ok=True)  # do not truncate: another job may have it mapped
        self._calls: mmap.mmap | None = None
        self._written: list[tuple[str, CodeType, int] | None] = [None] * CALLS
        self._stacks: BinaryIO = self._paths[1].open("wb", buffering=0)
        about = {"host": socket.gethostname(), "pid": os.getpid(), "libraries": _libraries()}
        self._write(json.dumps(about))
        # The launcher ends the others like this when a rank has failed. Later handlers win.
        self._at_start = signal.getsignal(signal.SIGTERM)
        faulthandler.register(signal.SIGTERM, self._stacks, chain=True)
        if self._is_handler or not faulthandler.is_enabled():
            _Recorder._is_handler = True
            faulthandler.enable(self._stacks)
        # The core writes a byte when requests fail, and waits until it gets one back.
        self._own, self._core = socket.socketpair()
        with self._paths[0].open("w+b") as file:
            # A full disk fails here, and not where the memory is written (SIGBUS).
            os.posix_fallocate(file.fileno(), 0, FILE_BYTES)
            libraries.core().hvd_record_requests(file.fileno(), self._core.fileno())
            if settings.read().postmortem_is_asked:  # it takes microseconds of each call
                self._calls = mmap.mmap(file.fileno(), FILE_BYTES)
        self._listener = threading.Thread(target=self._listen, name="hvd_postmortem", daemon=True)
        self._listener.start()

    def forget(self) -> None:
        """Leave no stacks of a forked process, which is no rank; keep a handler of the script."""
        if signal.getsignal(signal.SIGTERM) == self._at_start:
            faulthandler.unregister(signal.SIGTERM)

    def _write(self, line: str) -> None:
        self._stacks.write(line.encode() + b"\n")

    def note_call(self, request: str) -> None:
        """Keep the script's line that asks for a request."""
        if self._calls is None:
            return
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not is_script(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return
        self._count += 1
        number = hash(request) % CALLS  # requests in one place: the later call stays
        place = FIRST_CALL + number * CALL_BYTES
        call = (request, frame.f_code, frame.f_lasti)
        if self._written[number] != call:  # a loop's call is the same each time
            code = frame.f_code
            line = [request[:200], code.co_filename, frame.f_lineno, code.co_name]
            text = json.dumps(line).encode()
            start, end = place + COUNT.size, place + CALL_BYTES
            if len(text) > end - start:
                return
            COUNT.pack_into(self._calls, place, 0)  # no call, if the process is killed meanwhile
            self._calls[start:end] = text.ljust(end - start)
            self._written[number] = call
        COUNT.pack_into(self._calls, place, self._count)

    def note_exception(self, kind: type[BaseException], trace: TracebackType | None) -> None:
        """Keep where an uncaught exception was raised."""
        self._keep = True
        self._write(f"Exception {kind.__name__} (most recent call first):")
        for frame, line in reversed(list(traceback.walk_tb(trace))):
            code = frame.f_code
            self._write(f'  File "{code.co_filename}", line {line} in {code.co_name}')

    def _listen(self) -> None:
        """Write stacks when the core tells that requests fail; it waits for that."""
        while self._own.recv(1):
            self._keep = True
            with contextlib.suppress(OSError, ValueError):
                self._write("")
                faulthandler.dump_traceback(self._stacks)
                self._write_native_stacks()
            with contextlib.suppress(OSError):  # the core has stopped waiting
                self._own.send(b"\0")

    def _write_native_stacks(self) -> None:
        program = shutil.which("py-spy")
        if program is None or not settings.read().postmortem_is_asked:
            return
        command = [program, "dump", "--native", "--pid", str(os.getpid())]
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, timeout=_NATIVE_SECONDS)
            self._write("py-spy:")
            self._stacks.write(done.stdout + done.stderr)

    def stop(self, *, keep: bool) -> None:
        """End the recording; remove the files unless requests have failed."""
        handler = signal.getsignal(signal.SIGTERM)
        faulthandler.unregister(signal.SIGTERM)  # which restores the handler of the start
        if handler != self._at_start and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        self._core.shutdown(socket.SHUT_RDWR)
        self._listener.join()
        self._own.close()
        self._core.close()
        if not self._is_handler:  # else a crash of MPI as it ends is still to be written
            self._stacks.close()
        if not keep and not self._keep:
            for path in self._paths:
                path.unlink(missing_ok=True)


_recorder: _Recorder | None = None


def _forget() -> None:
    if _recorder is not None:
        _recorder.forget()


os.register_at_fork(after_in_child=_forget)  # once, however often a process joins jobs


def start() -> None:
    """Begin to record, if a folder for it is set; after the job has begun."""
    global _recorder
    folder = settings.read().postmortem
    if folder is None:
        return
    try:
        _recorder = _Recorder(folder, rank_info.rank())
    except OSError as error:
        if not settings.read().postmortem_is_asked:
            return  # hvdrun then says less after a failure
        raise ValueError(
            f"HVD_POSTMORTEM is '{folder}', where rank {rank_info.rank()} cannot make a file: "
            f"{error.strerror}. Name a folder that every rank may write to, or unset it."
        ) from error


def note_call(request: str) -> None:
    """Keep the line of the script that asks for a request, such as ``"allreduce 'x'"``."""
    if _recorder is not None:
        _recorder.note_call(request)


def note_exception(kind: type[BaseException], trace: TracebackType | None) -> None:
    """Keep where an uncaught exception was raised."""
    if _recorder is not None:
        with contextlib.suppress(Exception):  # no memory, perhaps
            _recorder.note_exception(kind, trace)


def stop(*, keep: bool) -> None:
    """End the recording; ``keep`` the files if the ranks have not left the job together."""
    global _recorder
    if _recorder is not None:
        try:
            _recorder.stop(keep=keep)
        except OSError as error:
            log.logger.error("cannot remove the files of HVD_POSTMORTEM: %s", error)
    _recorder = None
