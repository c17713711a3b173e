"""What hvdrun waits for: descriptors, and times."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable, Iterable
from typing import Any

# Bytes that are taken from a pipe at once.
PIECE = 1 << 16


class Loop:
    """Calls those who wait for a descriptor when it is ready."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def close(self) -> None:
        """Forget everything; nothing else is closed."""
        self._selector.close()

    def watch(self, file: Any, ready: Callable[[], None], write: bool = False) -> None:
        """Call `ready` when `file` can be read, or with `write`, written as well."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
        try:
            self._selector.modify(file, events, ready)
        except KeyError:
            self._selector.register(file, events, ready)

    def forget(self, file: Any) -> None:
        """Undo `watch`."""
        # A closed socket has no number any more; its events have gone with it.
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(file)

    def watch_pipe(self, descriptor: int, take: Callable[[bytes], None]) -> None:
        """Give `take` what arrives, and an empty piece at the end."""
        os.set_blocking(descriptor, False)

        def ready() -> None:
            try:
                data = os.read(descriptor, PIECE)
            except BlockingIOError:
                return
            take(data)
            if not data:
                self.forget(descriptor)

        self.watch(descriptor, ready)

    def turn(self, patience: float, due: Iterable[float] = ()) -> bool:
        """Wait at most `patience` seconds, or until one of the times `due`, and handle events.

        Returns whether there were any.
        """
        wait = min([patience, *(moment - time.monotonic() for moment in due)])
        events = self._selector.select(max(0.0, wait))
        for key, _ in events:
            # A handler before this one may have forgotten it.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        return bool(events)
