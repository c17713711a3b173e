"""The cores and threads that each rank of a host gets."""

import os
import sys

import pytest

from hvd_keras.launch.onhost.cores import (
    THREAD_VARIABLES,
    may_be_divided,
    own_cores,
    ranges,
    usable_cores,
    usable_gpus,
)
from hvd_keras.runtime.linux import cpu_quota

SHOW_CORES = "import os; print(*sorted(os.sched_getaffinity(0)))"


def cores_of_ranks(hvdrun, size, *options, **changes):
    command = ("-np", f"{size}", "--oversubscribe", *options, sys.executable, "-c", SHOW_CORES)
    done = hvdrun.run("--no-prefix", *command, env=hvdrun.environment | changes, status=0)
    return [set(map(int, line.split())) for line in done.stdout.splitlines()]


@pytest.mark.skipif(usable_cores() < 2, reason="one core cannot be divided")
def test_each_rank_has_cores_of_its_own(hvdrun):
    all_cores = os.sched_getaffinity(0)
    one, other = cores_of_ranks(hvdrun, 2)
    assert one
    assert other
    assert not one & other
    assert one | other == all_cores
    more = usable_cores() + 1
    assert cores_of_ranks(hvdrun, more) == [all_cores] * more
    assert cores_of_ranks(hvdrun, 2, "--no-bind") == [all_cores] * 2
    assert cores_of_ranks(hvdrun, 2, OMP_PROC_BIND="close") == [all_cores] * 2


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("nodes", [[0, 0], [1, 0]], ids=["one node", "the first GPU at node 1"])
def test_parts_are_whole_cores_near_the_gpu(tmp_path, threads, nodes):
    """Of a host with 2 NUMA nodes of 3 cores each; hyperthread 6 belongs to core 0, and so on."""
    for core in range(6 * threads):
        folder = tmp_path / f"devices/system/cpu/cpu{core}"
        (folder / f"node{core % 6 // 3}").mkdir(parents=True)
        (folder / "topology").mkdir()
        first = core % 6
        siblings = f"{first},{first + 6}" if threads == 2 else f"{first}"
        (folder / "topology/thread_siblings_list").write_text(f"{siblings}\n")
    for number, node in enumerate(nodes):
        gpu = tmp_path / f"bus/pci/drivers/nvidia/0000:0{number}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "numa_node").write_text(f"{node}\n")
    mask = set(range(6 * threads))
    parts = [own_cores(rank, 2, mask, tmp_path) for rank in range(2)]
    nodes_of_parts = [{core % 6 // 3 for core in part} for part in parts]
    assert nodes_of_parts == ([{1}, {0}] if nodes == [1, 0] else [{0}, {1}])
    assert parts[0] | parts[1] == mask
    four = [own_cores(rank, 4, mask, tmp_path) for rank in range(4)]
    assert sorted(core for part in four for core in part) == sorted(mask)
    assert all(
        {core % 6 for core in part}.isdisjoint(core % 6 for core in four[0]) for part in four[1:]
    )
    many = [own_cores(rank, 6 * threads, mask, tmp_path) for rank in range(6 * threads)]
    assert sorted(map(len, many)) == [1] * 6 * threads


def test_cores_that_differ_between_ranks_stay():
    """The user, or SLURM, has bound them."""
    assert may_be_divided([[0, 1], [0, 1]], 2, {})
    assert not may_be_divided([[0], [1]], 2, {})
    assert not may_be_divided([[0, 1], [0, 1]], 1, {})
    assert ranges([3, 0, 1, 2, 8]) == "0-3,8"


SHOW_THREADS = f"print(*[os.environ[name] for name in {THREAD_VARIABLES!r}])"


def test_thread_settings_of_the_user_stay(hvdrun):
    threads = max(1, usable_cores() // 2)
    done = hvdrun.python(2, SHOW_THREADS, env=hvdrun.environment | {"OMP_NUM_THREADS": "77"})
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] 77 {threads} {threads}" for rank in range(2)
    ]


def test_gpus_that_are_counted(tmp_path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia11", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    visible = {None: 3, "": 0, "-1": 0, "1": 1, "0,11": 2, "0,-1,1": 1, "MIG-a,MIG-b": 2}
    for value, count in visible.items():
        environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
        assert usable_gpus(environment, tmp_path) == count
    (tmp_path / "empty").mkdir()
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path / "empty") == 0


def test_a_quota_of_any_group_above_limits_the_cores(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("4:memory:/elsewhere\n0::/a/b\n")
    (tmp_path / "root/a/b").mkdir(parents=True)
    assert cpu_quota(membership, tmp_path / "root") == float("inf")
    (tmp_path / "root/a/b/cpu.max").write_text("max 100000\n")
    (tmp_path / "root/a/cpu.max").write_text("150000 100000\n")
    assert cpu_quota(membership, tmp_path / "root") == 1.5
    (tmp_path / "root/a/b/cpu.max").write_text("50000 100000\n")
    assert cpu_quota(membership, tmp_path / "root") == 0.5


def test_a_quota_of_the_first_version_of_control_groups_limits_the_cores(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("4:cpuset:/\n3:cpu,cpuacct:/pod/a\n0::/\n")
    folder = tmp_path / "root/cpu/pod"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    for quota, cores in (("-1", float("inf")), ("250000", 2.5)):
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        assert cpu_quota(membership, tmp_path / "root") == cores
