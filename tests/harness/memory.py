"""A control group with a small memory limit, so that the kernel kills its processes."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

BYTES = 64 << 20


@contextlib.contextmanager
def group() -> Iterator[Path | str]:
    """Yields a control group with a limit of 64 MiB, or the reason why there is none."""
    reason = ""
    for parent, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        made = Path("/sys/fs/cgroup", parent, f"hvd-keras-test-{os.getpid()}")
        try:
            made.mkdir()
        except OSError as error:
            reason = str(error)
            continue
        try:
            if (made / limit).exists():
                (made / limit).write_text(str(BYTES))
                yield made
                return
            reason = f"no {limit} in {made}"
        except OSError as error:
            reason = str(error)
        finally:
            made.rmdir()
    yield f"no control group for memory can be made here: {reason}"
