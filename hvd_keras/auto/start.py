"""Begins and ends automatic mode: the first rank runs the script, the others work for it.

For a notebook or another session that hvdrun has not started, hvdrun starts all ranks, and the
process of the first one stands in for the session, until that ends.
"""

import atexit
import contextlib
import functools
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import hvd_keras
from hvd_keras import lifecycle
from hvd_keras.agents.stand_in import Joining
from hvd_keras.auto import draws, hook, messages, pace, worker
from hvd_keras.auto.launching import SESSION
from hvd_keras.auto.run import function
from hvd_keras.launch.onhost.cores import THREAD_VARIABLES
from hvd_keras.patches import scaled_fit
from hvd_keras.runtime import flight, libraries, rank_info, settings
from hvd_keras.runtime.keras import is_legacy, replace, require
from hvd_keras.saving import storage

_is_stopped = False
_process = 0  # that runs the script


def auto(scale_batch: bool = False, np: int | None = None, hosts: str | None = None) -> None:
    """Let all ranks do the work of this script of one process together.

    To be called as a script's first line; ``hvdrun --auto`` does so. The first rank alone runs the
    script from here on, with the results of one process; the others never return from this call.
    They compute their rows of each batch for it, until it ends: docs/auto.md.

    With ``np`` or ``hosts``, in a notebook or a script that hvdrun has not started, it starts the
    others, and this process is the first rank. If one of them dies, a step that is
    divided raises an error; later steps are computed here alone.

    Args:
        scale_batch: as ``hvdrun --auto --scale-batch``: ``fit`` makes batches ``size()`` times
            larger, with a rate as much larger, and a warm-up; so it has other results.
        np: the number of ranks to start, with this one.
        hosts: where to start them, as ``hvdrun -H``, such as "a:2,b:2"; this host is the first.

    Raises:
        RuntimeError: the script calls ``hvd.init()``, too; or Keras is ``tf_keras``; or hvdrun
            cannot start the ranks.
        ValueError: ``np`` or ``hosts`` are given in a job that is started already, or another
            ``np`` than before.
    """
    global _process
    if _process:
        if np not in (None, rank_info.size()):
            raise ValueError(f"hvd.auto: got {np=}, expected {rank_info.size()}: it has begun.")
        return
    if rank_info.is_initialized():
        _refuse_init()
    if is_legacy:
        raise RuntimeError(hook.LEGACY.format("TF_USE_LEGACY_KERAS is set"))
    if np or hosts:
        _start_ranks(np, hosts, sys.executable, "-m", "hvd_keras.auto", SESSION)
    _process = os.getpid()
    replace(sys, "excepthook", _tell_briefly)
    settings.wait_without_limit()
    lifecycle.changes_keras = False  # Keras stays as one process has it, but for its steps
    lifecycle.init()
    replace(hvd_keras, "init", _refuse_init)
    if rank_info.size() == 1:
        return
    if rank_info.rank() > 0:
        worker.work()
        atexit._run_exitfuncs()
        os._exit(0)  # the end of the interpreter takes TensorFlow half a second
    save = functools.partial(storage.save, False)
    rows: list[tuple[Any, str, Callable[..., Any]]] = [
        *((keras.Model, f"make_{k}_function", hook.make) for k in ("train", "test", "predict")),
        (type(function(lambda: None)), "__call__", hook.call),
        (keras.optimizers.Optimizer, "apply", pace.note_update),
        (tf.compat.v1, "disable_eager_execution", _refuse_graphs),
        (tf.compat.v1, "disable_v2_behavior", _refuse_graphs),
        *draws.replacements,
        # hvdrun may end this process while it writes.
        *((owner, name, save) for owner, name in storage.writers()),
        (os, "_exit", _exit),
        (sys, "excepthook", _stop_and_print),
    ]
    if scale_batch:
        refuse = functools.partial(scaled_fit.refuse, "a call of train_on_batch", "model.fit")
        rows += [(keras.Model, "fit", scaled_fit.fit), (keras.Model, "train_on_batch", refuse)]
    for owner, attribute, new in rows:
        require(owner, attribute, "for automatic mode")
        replace(owner, attribute, new)
    atexit.register(pace.tell_untried)
    atexit.register(_stop)


# An import of this package has put the package there.
vars(hvd_keras)["auto"] = auto


def _refuse_init(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "hvdrun --auto is for scripts of one process, and this one calls hvd.init(). Leave out "
        "--auto: hvdrun -np N train.py."
    )


def _refuse_graphs(disable: Callable[[], None]) -> None:
    raise RuntimeError(
        f"hvdrun --auto divides steps of TensorFlow 2, and this script calls {disable.__name__}. "
        "Leave out --auto, and see docs/migrating.md."
    )


def _stop() -> None:
    """Let the others end, unless this is a fork."""
    global _is_stopped
    if not _is_stopped and os.getpid() == _process:
        _is_stopped = True
        with contextlib.suppress(tf.errors.OpError):  # a rank has left the job
            messages.command(messages.STOP)


def _exit(really: Callable[[int], None], status: int) -> None:
    """Replace ``os._exit``, which ends a script with no word to the others."""
    if os.getpid() == _process and rank_info.is_initialized():
        _stop()
        lifecycle.end("", 2.0)  # seconds, for which it waits for the others
    really(status)


def _stop_and_print(print_it: Callable[..., Any], kind: Any, value: Any, trace: Any) -> None:
    """Replace ``sys.excepthook``: the others end well, so that this error alone is shown."""
    _stop()
    print_it(kind, value, trace)


def _tell_briefly(hook: Callable[..., Any], kind: Any, value: Any, trace: Any) -> None:
    """Replace ``sys.excepthook``: of what is refused, show the script's line, not all calls."""
    found = re.search("hvdrun --auto.*", str(value))
    if found is None or settings.read().all_tracebacks:
        hook(kind, value, trace)
        return
    own = [frame for frame in traceback.extract_tb(trace) if flight.is_script(frame.filename)][-1:]
    places = [f'File "{frame.filename}", line {frame.lineno}, {frame.line}' for frame in own]
    print(*places, f"{kind.__name__}: {found[0]}", sep="\n", file=sys.stderr)


# What stays the session's own: its folder for temporary files outlives the job.
_OWN = (*THREAD_VARIABLES, "TMPDIR")


def _start_ranks(np: int | None, hosts: str | None, *command: str) -> None:
    """Start ranks, and make this process the first one, which has not joined their job yet.

    Args:
        np: how many.
        hosts: where; this host is the first.
        command: what they run, with a path added to it; the first rank stands in there.

    Raises:
        ValueError: this process is in a job already.
        RuntimeError: hvdrun cannot start them.
    """
    if settings.launched()[0]:
        raise ValueError(
            f"hvd.auto: got np={np}, hosts={hosts!r} in a job of {settings.launched()[0]}, which "
            "has started the ranks. Leave both out."
        )
    with tempfile.TemporaryDirectory(prefix="hvd_keras-") as folder:
        path = str(Path(folder, "first"))
        joining = Joining(path)
        where = ["-H", hosts] if hosts else ["--oversubscribe"]
        where += ["-np", str(np)] if np else []
        hvdrun = [sys.executable, "-m", "hvd_keras.hvdrun", *where, "--no-bind", "--no-init"]
        # Ctrl-C is for the session alone.
        job = subprocess.Popen(
            [*hvdrun, *command, path], stdin=subprocess.DEVNULL, start_new_session=True
        )
        first = _joined(joining, job)
    settings.read.cache_clear()
    # While the thread holds the connection open, the process of the first rank lives.
    threading.Thread(target=_give_up_after, args=[first], daemon=True).start()


def _joined(joining: Joining, job: "subprocess.Popen[bytes]") -> socket.socket:
    while True:
        try:
            return joining.join(0.1, lambda name: name not in _OWN)
        except TimeoutError:
            if job.poll() is not None:
                raise RuntimeError(
                    "hvd.auto: hvdrun could not start the ranks, and has printed why. The first "
                    "of the hosts must be this one."
                ) from None


def _give_up_after(first: socket.socket) -> None:
    """When hvdrun ends the job, as a worker has died, let nothing wait for it."""
    first.recv(1)
    libraries.core().hvd_give_up(b"a worker of hvd.auto has ended, and hvdrun has printed why")
