"""The simulation is correct in cases with a known result, and close to published points."""

import itertools
import re
import sys
from pathlib import Path

import pytest

from hvd_keras.gradients import buckets

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import layers  # noqa: E402
import model  # noqa: E402

NETWORKS = {name: layers.network(name) for name in layers.NAMES}
FOREVER = 1e30


def test_the_stored_layers_are_the_networks():
    trainable = {"ResNet50": 25_583_592, "InceptionV3": 23_817_352, "VGG16": 138_357_544}
    for name, parameters in trainable.items():
        assert sum(NETWORKS[name].sizes) == 4 * parameters
    assert len(NETWORKS["ResNet101"].sizes) == len(NETWORKS["ResNet101"].work) == 418


def test_one_host_loses_nothing():
    step = model.predict(NETWORKS["VGG16"], 1, 1e6, 1e-3, 0.1, 0.2)
    assert (step.efficiency, step.exchange) == (pytest.approx(1), 0)


def test_without_backpropagation_nothing_can_overlap():
    step = model.predict(NETWORKS["ResNet50"], 3, 12.5e6, 1e-4, 1.0, 0.0)
    assert step.seconds == pytest.approx(1.0 + step.exchange)
    assert step.exchange > 2 * 2 / 3 * 102e6 / 12.5e6


def test_what_can_overlap_does():
    """Two gradients, ready after 1 and 2 seconds of backpropagation, take one second each."""
    two = layers.Network([2 << 20, 2 << 20], [1, 1])
    step = model.overlapped(two, 1.0, 2.0, lambda size: size / (2 << 20), 2 << 20)
    assert (step.seconds, step.exchange, step.requests) == (4.0, 2.0, 2)
    slow = model.overlapped(two, 1.0, 2.0, lambda size: size / (1 << 20), 2 << 20)
    assert slow.seconds == 6.0  # the second waits for the first
    assert model.overlapped(two, 1.0, 2.0, lambda size: 2.0, 4 << 20).requests == 2


@pytest.mark.parametrize("way", ["auto", "direct", "ring", "tree", "nccl"])
def test_more_bandwidth_never_hurts_and_more_latency_never_helps(way):
    def seconds(bandwidth, latency):
        return model.predict(NETWORKS["VGG16"], 16, bandwidth, latency, 0.1, 0.2, way=way).seconds

    faster = [seconds(10**e, 1e-5) for e in range(7, 13)]
    later = [seconds(1e9, 10**-e) for e in range(7, 1, -1)]
    assert faster == sorted(faster, reverse=True)
    assert faster[0] > 2 * faster[-1]
    assert later == sorted(later)
    assert later[0] < later[-1]


def test_a_host_sends_the_least_that_is_possible():
    for hosts, size in itertools.product((2, 3, 100), (1e8, 1e9)):
        cluster = model.Cluster(hosts, 1e9, 0)
        assert cluster.ring(size) == pytest.approx(2 * (hosts - 1) / hosts * size / 1e9)
        assert cluster.direct(size) >= cluster.ring(size) * 0.999999
    assert model.Cluster(3, 1e6, 0).direct(1e8) == pytest.approx(2 * 2 / 3 * 1e8 / 1e6)


def test_many_hosts_pay_for_their_messages(monkeypatch):
    """Two messages to and from each other host of the group per chunk, however small."""
    monkeypatch.setattr(model, "BYTE", 0)
    monkeypatch.setattr(model, "SUM", 0)
    cluster = model.Cluster(1000, FOREVER, 0)
    assert cluster.direct(1 << 20) == pytest.approx(2 * 999 * model.MESSAGE)
    assert cluster.direct(4 << 20) == pytest.approx(8 * 999 * model.MESSAGE)
    assert cluster.auto(1 << 20) == pytest.approx(2 * (24 + 39) * model.MESSAGE)  # 25 by 40
    assert model.Cluster(31, FOREVER, 0).messages("auto") == (60, 2)
    assert model.Cluster(37, FOREVER, 0).messages("auto") == (2 * 6 + 2 * 5, 4)  # 6 by 6, and one
    assert model.Cluster(64, FOREVER, 0).messages("halving") == (12, 12)


def test_shared_cores_do_the_work_of_all():
    exchange = model.Cluster(8, FOREVER, 1e-3).between(1 << 20, "direct")
    assert exchange.on_shared_cores(8, 8) == exchange.seconds
    work = exchange.seconds - exchange.latency
    assert exchange.on_shared_cores(8, 2) == pytest.approx(exchange.latency + 4 * work)


def test_the_steps_of_an_agreement_grow_with_the_logarithm():
    seconds = [model.Cluster(2**power, FOREVER, 1e-5).agreement() for power in range(5, 13)]
    steps = [later - earlier for earlier, later in itertools.pairwise(seconds)]
    assert steps == pytest.approx([1e-5 + model.MESSAGE] * 7)


def test_published_points_are_met():
    """Within three percentage points, with three constants fitted to all six points."""
    for (name, hosts), efficiency in model.PUBLISHED.items():
        _, predicted = model.pascals(name, NETWORKS[name], hosts, "horovod")
        assert predicted == pytest.approx(efficiency, abs=0.03), (name, hosts)
    constants, error = model.fit()
    assert constants == pytest.approx(model.FITTED)
    assert error < 0.02


def test_the_settings_are_those_of_the_project():
    def number(name, file):
        text = (ROOT / file).read_text()
        factor, bits = re.search(rf"{name}(?:: int)? = (\d+) << (\d+)", text).groups()
        return int(factor) << int(bits)

    transport = "native/core/cpu/cluster_transport.cc"
    assert number("FIRST_BYTES", "hvd_keras/gradients/buckets.py") == buckets.FIRST_BYTES
    assert number("bucket_bytes", "hvd_keras/runtime/settings.py") == model.BUCKET_BYTES
    header = (ROOT / "native/core/cpu/mpi_transport.h").read_text()
    assert f"kFewRanks = {model.FEW_HOSTS};" in header
    assert number("kMessageBytes", transport) == model.MESSAGE_BYTES
    assert number("kLeastChunkBytes", transport) == model.LEAST_CHUNK_BYTES
    assert number("kMostChunkBytes", transport) == model.MOST_CHUNK_BYTES
    header = (ROOT / "native/core/cpu/cluster_transport.h").read_text()
    assert f"kWindow = {model.WINDOW};" in header
    algorithms = (ROOT / "native/core/cpu/inter_host.cc").read_text()
    assert f"kManyHosts = {model.MANY_HOSTS};" in algorithms


def test_the_first_bucket_is_small_and_large_gradients_travel_alone():
    sizes = [700_000, 400_000, 900_000, 30 << 20, 10 << 20, 6 << 20, 1]
    assert buckets.fill(sizes, 16 << 20) == [[0], [1, 2], [3], [4, 5], [6]]
    assert buckets.fill([1, 2, 3], 16 << 20) == [[0, 1, 2]]


def test_rows_make_a_table():
    rows = model.predictions()
    assert {row["gpus"] for row in rows} == {2**power for power in range(3, 13)}
    assert all(0 < row["efficiency"] < 1 for row in rows)
    table = model.table(rows).splitlines()
    assert len(table) == 2 + len(layers.NAMES) * len(model.WAYS)
    assert all(line.count("|") == table[0].count("|") for line in table)
    costs = model.costs().splitlines()
    assert len(costs) == 2 + 3 * len(model.LARGE) * len(model.BETWEEN)
    assert all(line.count("|") == costs[0].count("|") for line in costs)
