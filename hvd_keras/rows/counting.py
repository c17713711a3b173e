"""Looks into many files, of which each rank takes some."""

import sys
import time
from collections.abc import Callable

from hvd_keras.runtime import agree
from hvd_keras.runtime.process_sets import ProcessSet

_SECONDS = 5  # between lines of progress


def look_into_some(files: int, look: Callable[[int], None], process_set: ProcessSet) -> None:
    """Call ``look(number)`` for this rank's part of so many files; raise an error on all ranks."""
    mine = range(process_set.rank(), files, process_set.size())

    def look_into_mine() -> None:
        begun = told = time.monotonic()
        for done, number in enumerate(mine):
            look(number)
            if process_set.rank() == 0 and time.monotonic() - told > _SECONDS:
                told = time.monotonic()
                print(
                    f"hvd.data.files counts rows: {done + 1} of {len(mine)} files of rank 0 after "
                    f"{told - begun:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )

    agree.on_all_ranks("hvd.data.files", look_into_mine, process_set)
