"""How many cores and GPUs a job may use, and the thread counts that follow from it."""

import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path

THREAD_VARIABLES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def cpu_quota(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> float:
    """Cores' worth of time that control groups leave this process; inf without a limit.

    A group is bound by its own limit and by those of all groups above it. In version 1 the groups
    for CPUs lie in a folder, and each limit in two files.
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return float("inf")
    quota = float("inf")
    for number, controllers, group in lines:
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


def usable_cores() -> int:
    """Cores that this process may use: its affinity mask, limited by a control group's quota."""
    return max(1, int(min(len(os.sched_getaffinity(0)), cpu_quota())))


def usable_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that this process may use: those of the host, limited by CUDA_VISIBLE_DEVICES."""
    found = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in devices.iterdir())
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not found:
        return found
    # CUDA ignores what follows an invalid entry.
    names = itertools.takewhile(lambda name: name.strip() not in ("", "-1"), visible.split(","))
    return len(list(names))


def thread_settings(
    size: int, environment: Mapping[str, str], cores: int, *, several_hosts: bool = False
) -> dict[str, str]:
    """Thread counts that share a host's cores among its `size` ranks.

    What the user has set is left alone. Without them each rank's TensorFlow starts a thread per
    core. With several hosts at least two ops run at a time: with one, TensorFlow goes
    through all layers before it computes the first weight's gradient, and nothing could cross the
    network meanwhile.
    """
    threads = max(1, cores // size)
    counts = dict.fromkeys(THREAD_VARIABLES, threads)
    if several_hosts:
        counts["TF_NUM_INTEROP_THREADS"] = max(2, threads)
    return {name: str(count) for name, count in counts.items() if name not in environment}
