"""What hvdrun and the ranks both ask of Linux."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[str]:
    """Yield a short path of a folder, because a socket's address has at most 107 characters."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def cpu_quota(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> float:
    """Cores' worth of time that control groups leave this process; inf without a limit.

    A group is bound by its own limit and by those of all groups above it. In version 1 the groups
    for CPUs lie in a folder, and each limit in two files.
    """
    try:
        lines = membership.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return float("inf")
    quota = float("inf")
    for number, controllers, group in (line.split(":", 2) for line in lines):
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        leaf = root / ("" if number == "0" else "cpu") / group.strip("/")
        names = ["cpu.max"] if number == "0" else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        for folder in (leaf, *leaf.parents):
            try:
                limit, period = " ".join((folder / name).read_text() for name in names).split()
            except (OSError, ValueError):
                continue
            if limit not in ("max", "-1"):
                quota = min(quota, int(limit) / int(period))
    return quota
