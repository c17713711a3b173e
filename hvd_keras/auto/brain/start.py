"""Begins and ends: the first rank runs the script, the others work for it until it ends."""

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvd_keras import lifecycle
from hvd_keras.auto.brain import hook, messages, worker
from hvd_keras.auto.brain.run import function
from hvd_keras.runtime import rank_info, settings
from hvd_keras.runtime.keras import replace, require

_is_stopped = False
_process = 0  # that runs the script


def join() -> None:
    """Join the job. On the first rank this returns at once, on the others never.

    Keras stays as one process has it, but for the functions of its steps.
    """
    global _process
    _process = os.getpid()
    settings.wait_without_limit()
    lifecycle.changes_keras = False
    lifecycle.init()
    if rank_info.size() == 1:
        return
    if rank_info.rank() > 0:
        worker.work()
        sys.exit()
    rows: list[tuple[Any, str, Callable[..., Any]]] = [
        *((keras.Model, f"make_{k}_function", hook.make) for k in ("train", "test", "predict")),
        (type(function(lambda: None)), "__call__", hook.call),
        (os, "_exit", _exit),
        (sys, "excepthook", _stop_and_print),
    ]
    for owner, attribute, new in rows:
        require(owner, attribute, "for automatic mode")
        replace(owner, attribute, new)
    atexit.register(_stop)


def is_on() -> bool:
    """Whether this process has joined so."""
    return _process > 0


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
