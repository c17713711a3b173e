"""What hvdrun serves while a job runs: metrics for Prometheus."""

import json
import pathlib
import re
import socket
import urllib.request

from prometheus_client.openmetrics import parser

from hvd_keras.launch.follow.statistics import Statistics, recent
from tests.harness import launcher

DASHBOARD = pathlib.Path(__file__).parents[2] / "deploy" / "grafana.json"

# Rank 1 comes late to every step; it ends when the test has seen enough.
SCRIPT = """
import keras
import numpy as np
import hvd_keras as hvd

hvd.init()
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
x = np.full((64, 3), 1.0 + rank, "float32")

class Late(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if rank == 1:
            time.sleep(0.05)

    def on_epoch_end(self, epoch, logs=None):
        over = int(hvd.allreduce(np.int32(os.path.exists("enough")), op=hvd.Max, name="over"))
        self.model.stop_training = bool(over)

model.fit(x, x[:, :1], batch_size=4, epochs=100000, verbose=0,
          callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), Late()])
"""


def message(rank: int, second: float, **training: float) -> dict:
    """What a rank tells: the others wait for rank 1 for half of the time."""
    spent = {"requests": 3, "bytes": 8, "waiting_seconds": second / 4, "moving_seconds": 0.1}
    return {
        "rank": rank,
        "seconds": second,
        "collectives": {"allreduce": spent},
        "late": {"last": 7, "awaited_seconds": second / 2 * rank},
        "training": training,
    }


def told() -> Statistics:
    statistics = Statistics()
    statistics.start(2)
    for second in (1.0, 3.0):
        for rank in range(2):
            steps = {"steps": 10 * second, "samples": 40 * second * (1 + rank)}
            numbers = message(rank, second, at=second, loss=0.5, epoch=2, epochs=9, **steps)
            statistics.take(rank, "server", numbers)
    return statistics


def test_rates_are_those_of_the_last_seconds() -> None:
    first, late = map(recent, told().past.values())
    assert (first["samples_per_second"], late["samples_per_second"]) == (40, 80)
    assert first["step_seconds"] == late["step_seconds"] == 0.1
    assert (first["waiting"], first["straggler"], late["straggler"]) == (0.25, 0.0, 0.5)


def test_a_new_fit_and_a_restart_begin_anew() -> None:
    statistics = told()
    statistics.take(0, "server", message(0, 4.0, at=4.0, steps=2, samples=8))
    assert recent(statistics.past[0])["samples_per_second"] is None
    statistics.take(0, "server", message(0, 5.0, at=5.0, steps=4, samples=16))
    assert recent(statistics.past[0])["samples_per_second"] == 8
    statistics.start(2)
    values = {f.name: f.samples[0].value for f in statistics.collect() if f.samples}
    assert values == {"hvd_ranks": 2, "hvd_restarts": 1}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def scrape(port: int) -> dict[str, float]:
    """What the parser of OpenMetrics accepts, by names with labels in order."""
    url = f"http://127.0.0.1:{port}/metrics"
    request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text"})
    try:
        with urllib.request.urlopen(request) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            text = answer.read().decode()
    except OSError:
        return {}
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
            found[sample.name + f"{{{labels}}}" * bool(labels)] = sample.value
    return found


def test_metrics_of_a_job(hvdrun: launcher.Launcher) -> None:
    """Prometheus while the job runs, and the table at its end, name the late rank."""
    port = free_port()
    process = hvdrun.start(2, SCRIPT, "--stats", "--metrics", str(port))
    labels = f'host="{socket.gethostname()}",rank='
    score = f'hvd_straggler_score{{{labels}"%d"}}'
    found: dict[str, float] = {}
    queries = [t["expr"] for p in json.loads(DASHBOARD.read_text())["panels"] for t in p["targets"]]
    asked = {name for query in queries for name in re.findall(r"hvd_\w+", query)}
    asked.remove("hvd_gpu_memory_bytes")  # there is no GPU

    def has_all() -> bool:
        nonlocal found
        found = scrape(port)
        named = {name.partition("{")[0] for name in found}
        # On a busy machine the others are late, too, for a while.
        is_late = found.get(score % 1, 0) > max(0.3, 2 * found.get(score % 0, 1))
        return is_late and asked <= named

    launcher.wait_until(has_all, "all metrics")
    (hvdrun.folder / "enough").touch()
    out, err = process.communicate(timeout=launcher.LIMIT)
    assert process.returncode == 0, out + err
    assert found[f'hvd_samples_total{{{labels}"0"}}'] > 0
    assert found[f'hvd_bytes_total{{collective="allreduce",{labels}"0"}}'] > 0
    assert "The others waited for rank 1 in" in err.partition("hvdrun: statistics")[2]


def test_metrics_that_cannot_be_served(hvdrun: launcher.Launcher) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = hvdrun.run("-np", "1", "--metrics", port, "touch", "begun")
    assert done.returncode == 2
    assert (
        f"--metrics got 127.0.0.1:{port}, where hvdrun cannot listen: Address already in use"
        in done.stderr
    )
    for text in ("http", "0", "localhost:", "70000"):
        done = hvdrun.run("-np", "1", "--metrics", text, "touch", "begun", status=2)
        assert f"--metrics got {text!r}; expected a port, or an address and a port" in done.stderr
    assert not (hvdrun.folder / "begun").exists()


def test_a_missing_package(hvdrun: launcher.Launcher) -> None:
    hidden = hvdrun.folder / "hidden"
    hidden.mkdir()
    (hidden / "prometheus_client.py").write_text("raise ModuleNotFoundError('not installed')")
    environment = hvdrun.environment | {"PYTHONPATH": str(hidden)}
    done = hvdrun.run("-np", "1", "--metrics=9", "touch", "begun", env=environment, status=2)
    assert "run: pip install prometheus_client" in done.stderr
    assert not (hvdrun.folder / "begun").exists()
