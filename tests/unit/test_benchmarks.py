"""The benchmarks run with tiny sizes; they verify the values that they measure."""

import json
import math
import sys
from pathlib import Path

import pytest

from tests.harness import ranks

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"


@pytest.mark.timeout(450)
@pytest.mark.parametrize("only", ["latency", pytest.param("", marks=pytest.mark.slow, id="all")])
def test_smoke(tmp_path, only):
    chosen = ["--only", only] if only else []
    ranks.python(RUN, "--smoke", *chosen, "--output", tmp_path, status=0)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["smoke"]
    benchmarks = {row["benchmark"] for row in results["rows"]}
    assert benchmarks == {only} if only else len(benchmarks) > 5
    table = (tmp_path / "results.md").read_text()
    for row in results["rows"]:
        assert math.isfinite(row["ratio"]), row
        assert row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1], row
        assert row["seconds"] > 0 < row["against_seconds"], row
        assert row["what"] in table


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_algorithms_between_hosts():
    script = RUN.with_name("hosts.py")
    options = ["--many", 5, "--smoke", "--bytes", 4, 70000, "--json"]
    done = ranks.python(script, *options, status=0)
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    if not rows:
        pytest.skip(done.stderr)
    ways = {row["what"].rpartition(", ")[2] for row in rows}
    assert ways == {"direct", "grid", "MPI_Allreduce"}
    assert all(row["seconds"] > 0 for row in rows)


def test_an_unknown_benchmark_is_refused(tmp_path):
    done = ranks.python(RUN, "--only", "gradient", "--output", tmp_path)
    assert done.returncode == 2
    assert "gradients" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_environment_without_horovod_is_refused_at_once(tmp_path):
    done = ranks.python(
        RUN, "--only", "gradients", "--peer-python", sys.executable, "--output", tmp_path
    )
    assert done.returncode == 1
    assert "Give --peer-python the Python of an environment with Horovod" in done.stderr
    assert "gradients" not in done.stdout
    assert list(tmp_path.iterdir()) == []
