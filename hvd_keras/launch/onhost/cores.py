"""The cores and GPUs that a job may use, each rank's part of the cores, and its threads."""

import collections
import itertools
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from hvd_keras.runtime.linux import cpu_quota

THREAD_VARIABLES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
# By which users choose the cores of threads themselves.
_BINDING = ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


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
    """Thread counts that share these cores among `size` ranks.

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


def may_be_divided(
    masks: Collection[Collection[int]], usable: int, environment: Mapping[str, str]
) -> bool:
    """Whether each rank of a host may get cores of its own.

    Without that, Linux often wakes a rank on the core of the one that it has waited for, and leaves
    both there, which takes twice the time while another core is idle. The `masks`, the cores that
    each rank may use, differ if the user, or SLURM, has chosen them; a control group's quota leaves
    so many of them `usable`.
    """
    one, *others = map(set, masks)
    is_common = all(other == one for other in others)
    return is_common and 1 < len(masks) <= usable and not environment.keys() & {*_BINDING}


def own_cores(
    index: int, count: int, mask: Collection[int], system: Path = Path("/sys")
) -> set[int]:
    """Return the cores of one of a host's ranks: each gets some, and all are used.

    Ranks share no core, nor its hyperthreads unless there are too few, and get neighbours of one
    NUMA node. If there are as many GPUs as ranks, those with GPUs of the same node are neighbours.
    `index` is the rank's place among the `count` of the host, at most as many as the cores of the
    `mask`, which they may use; in `system` the kernel describes the host.
    """
    whole: dict[tuple[int, str], list[int]] = collections.defaultdict(list)
    for core in sorted(mask):
        folder = system / f"devices/system/cpu/cpu{core}"
        node = next((int(path.name[4:]) for path in folder.glob("node[0-9]*")), 0)
        threads = _read(folder / "topology/thread_siblings_list") or f"{core}"
        whole[node, threads].append(core)
    parts = [whole[key] for key in sorted(whole, key=lambda key: (key[0], whole[key]))]
    if len(parts) < count:
        parts = [[core] for part in parts for core in part]
    gpus = sorted(system.glob("bus/pci/drivers/nvidia/*:*"))
    nodes = [int(_read(gpu / "numa_node") or 0) for gpu in gpus]
    if len(nodes) == count:
        index = sorted(range(count), key=nodes.__getitem__).index(index)
    first, last = (len(parts) * number // count for number in (index, index + 1))
    return {core for part in parts[first:last] for core in part}


def ranges(cores: Collection[int]) -> str:
    """Return numbers as text, such as "0-3,8"."""
    by_run = itertools.groupby(enumerate(sorted(cores)), lambda pair: pair[1] - pair[0])
    runs = [[core for _, core in run] for _, run in by_run]
    return ",".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
