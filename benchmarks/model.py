"""Simulates how long a training step takes on 8 to 4,096 GPUs.

    python benchmarks/model.py              # model.json, .md and .png in benchmarks/results
    python benchmarks/model.py --fit        # fits the fitted constants again
    python benchmarks/hosts.py --constants  # measures the measured constants again

A message of n bytes takes latency + n / bandwidth (Hockney, 1994,
https://doi.org/10.1016/S0167-8191(06)80021-9). Gradients become ready during backpropagation, whose
time is divided among the layers by their multiplications. Buckets are exchanged one at a time, in
order, each after an agreement.

MESSAGE, BYTE, SUM and CALL were measured with this project, FITTED was fitted to six published
points, and all other constants are published or settings of this project. Not modelled: the time
that ranks of a host wait for each other, copies between GPUs and host memory (which all but NCCL
need), the update of the weights, and improvements of NCCL since 2018 other than trees.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import report
from layers import Network, network

from hvd_keras.gradients import buckets
from hvd_keras.runtime.settings import Settings

HERE = Path(__file__).parent

# Measured on 2 virtual cores by hosts.py --constants. Seconds of a core for sending one message and
# receiving one, and for each of its bytes: Open MPI 5.0 over TCP between two namespaces, whose
# kernel does the work of both ends and of the switch. A network card with offloading needs less.
MESSAGE, BYTE = 8.8e-6, 0.8e-9
# Seconds for each byte that a rank packs, sums and unpacks, in memory.
SUM = 0.4e-9
# Seconds that an allreduce of 4 bytes adds to a tf.function, 2 ranks on a host; see latency.py.
CALL = 34e-6

# Published: images per second of one GPU with batches of 64, without exchange, and the points
# (hosts of 4 GPUs, efficiency) that Horovod reached over 25 Gbit/s RoCE with NCCL's ring. Those of
# 4 hosts and the rates of one GPU: README of Horovod 0.9, October 2017
# (https://github.com/horovod/horovod/pull/44); those of 128 hosts: Sergeev and Del Balso, 2018,
# https://arxiv.org/abs/1802.05799. ResNet-50 is not among them: its rate is to Inception v3's as in
# TensorFlow's own benchmarks of May 2017 (https://www.tensorflow.org/performance/benchmarks).
BATCH = 64
RATES = {"InceptionV3": 134.4, "ResNet101": 119.4, "VGG16": 130.9, "ResNet50": 134.4 * 219 / 142}
PUBLISHED = {
    ("InceptionV3", 4): 2022.6 / 16 / RATES["InceptionV3"],
    ("ResNet101", 4): 1746.2 / 16 / RATES["ResNet101"],
    ("VGG16", 4): 1787.4 / 16 / RATES["VGG16"],
    ("InceptionV3", 128): 0.90,
    ("ResNet101", 128): 0.90,
    ("VGG16", 128): 0.68,
}
GPUS_PER_HOST = 4
BANDWIDTH = 25e9 / 8
# Payload in a full Ethernet frame of TCP with time stamps.
TCP_SHARE = 1448 / 1514
# Horovod's defaults at that time.
FUSION_BYTES, CYCLE = 64 << 20, 5e-3
# Multiplications occur once forward, and once each for the gradients of inputs and weights.
FORWARD = 1 / 3

# As in hvd_keras/runtime/settings.py, native/core/cpu/cluster_transport.cc and mpi_transport.h.
BUCKET_BYTES = Settings().bucket_bytes
MESSAGE_BYTES, LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES = 64 << 10, 256 << 10, 1 << 20
WINDOW, FEW_HOSTS, MANY_HOSTS = 8, 64, 32
ELEMENT_BYTES = 4

# Fitted to all six points of PUBLISHED, see ``fit``: the share of the link's bandwidth that is
# reached, the seconds per hop of NCCL's ring, and the relative slowdown of computing caused by a
# concurrent exchange and by waiting for the slowest rank.
FITTED = (0.84, 18e-6, 0.07)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts with ``local`` ranks and one link each.

    ``bandwidth`` is in bytes per second and direction, ``latency`` in seconds per message.
    """

    hosts: int
    bandwidth: float
    latency: float
    local: int = 1

    @property
    def ranks(self) -> int:
        return self.hosts * self.local

    def agreement(self) -> float:
        """Seconds of an agreement of the hosts' first ranks: one message from each of them in each
        of log2 H steps, and in two more if they are many and no power of two."""
        steps = math.ceil(math.log2(self.hosts))
        if self.hosts > FEW_HOSTS and 2**steps != self.hosts:
            steps += 1
        return CALL + steps * (self.latency + MESSAGE)

    def ring(self, size: float) -> float:
        """Seconds of NCCL's ring through all ranks; it passes each host's link once."""
        sent = 2 * (self.ranks - 1) / self.ranks * size
        return 2 * (self.ranks - 1) * self.latency + sent / self.bandwidth

    def tree(self, size: float) -> float:
        """Seconds of two trees over the hosts with half of the data each (Sanders, Speck and Träff,
        2009, https://doi.org/10.1016/j.parco.2009.09.001), as in NCCL since 2.4."""
        hops = 2 * math.ceil(math.log2(self.hosts)) + 2 * (self.local - 1)
        return hops * self.latency + 2 * size / self.bandwidth

    def nccl(self, size: float) -> float:
        """Seconds of the faster of ring and tree."""
        return min(self.ring(size), self.tree(size))

    def messages(self, way: str) -> tuple[int, int]:
        """Returns the messages that a leader sends for one chunk, and how many of them, of this
        leader or others, must follow each other (native/core/cpu/inter_host.cc)."""
        if way == "auto":
            way = "direct" if self.hosts < MANY_HOSTS else "grid"
        if way == "grid":
            root = math.isqrt(self.hosts)
            columns = next((c for c in range(root, root // 2, -1) if self.hosts % c == 0), root)
            groups = self.hosts // columns
            return 2 * (math.ceil(self.hosts / groups) - 1) + 2 * (groups - 1), 4
        if way == "halving":  # and doubling, which the project does not have
            steps = 2 * math.ceil(math.log2(self.hosts))
            return steps, steps
        return 2 * (self.hosts - 1), 2 if way == "direct" else 2 * (self.hosts - 1)

    def between(self, size: float, way: str) -> "Exchange":
        """Simulates "auto", "direct", "grid", "halving" or "host ring": slices in pipelined chunks
        between the leaders, of which each rank is one."""
        chunk = min(max(MESSAGE_BYTES * self.ranks, LEAST_CHUNK_BYTES), MOST_CHUNK_BYTES)
        chunks = math.ceil(size / chunk)
        messages: float
        messages, steps = self.messages(way)
        sent = 2 * (self.hosts - 1) / self.hosts * size
        if size <= ELEMENT_BYTES:
            messages /= 2  # only one leader sums anything
        return Exchange(
            steps * self.latency * math.ceil(chunks / WINDOW),
            chunks * messages * MESSAGE,
            sent / self.local * BYTE + size * SUM,
            sent / self.bandwidth,
        )

    def auto(self, size: float) -> float:
        """Seconds of HVD_ALLREDUCE=auto."""
        return self.between(size, "auto").seconds

    def direct(self, size: float) -> float:
        """Seconds of HVD_ALLREDUCE=direct."""
        return self.between(size, "direct").seconds


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What takes time between hosts, in seconds: messages that follow each other, each leader's
    work for its messages and for their bytes, and the link."""

    latency: float
    messages: float
    bytes: float
    link: float

    @property
    def seconds(self) -> float:
        """All in all: a core and the link work at the same time."""
        return self.latency + max(self.messages + self.bytes, self.link)

    def on_shared_cores(self, leaders: int, cores: int) -> float:
        """The same, if so few cores do the work of all leaders."""
        return self.latency + max((self.messages + self.bytes) * leaders / cores, self.link)


@dataclasses.dataclass(frozen=True)
class Step:
    """Seconds of a step, of its computation, and of its exchange without overlap."""

    seconds: float
    compute: float
    exchange: float
    requests: int

    @property
    def efficiency(self) -> float:
        """The time of the computation as a share of the step."""
        return self.compute / self.seconds


def overlapped(
    layers: Network,
    forward: float,
    backward: float,
    exchange: Callable[[float], float],
    bucket_bytes: float = BUCKET_BYTES,
) -> Step:
    """Simulates a step whose buckets are exchanged while backpropagation continues.

    ``exchange`` returns the seconds of a request of so many bytes, its agreement included.
    """
    sizes, ready = list(layers.sizes)[::-1], layers.ready(forward, backward)
    end = total = 0.0
    requests = buckets.fill(sizes, bucket_bytes)
    for bucket in requests:
        taken = exchange(sum(sizes[i] for i in bucket))
        end = max(end, ready[bucket[-1]]) + taken
        total += taken
    return Step(end, forward + backward, total, len(requests))


def predict(
    layers: Network,
    hosts: int,
    bandwidth: float,
    latency: float,
    forward_seconds: float,
    backward_seconds: float,
    bucket_bytes: float = BUCKET_BYTES,
    local: int = 1,
    way: str = "auto",
) -> Step:
    """Simulates a step of hvd_keras.

    Args:
        layers: the variables' bytes and work.
        hosts: the number of hosts; with one, the exchange takes no time.
        bandwidth: payload in bytes per second that each host can send and, at the same time,
            receive: TCP_SHARE times that of a link that is throttled by the bytes of its frames.
        latency: seconds per message, in addition to the time of its bytes.
        forward_seconds, backward_seconds: times of one rank alone.
        bucket_bytes: HVD_BUCKET_BYTES.
        local: the number of ranks per host.
        way: "auto", "direct", "ring", "tree", or "nccl" for the faster of the last two.
    """
    cluster = Cluster(hosts, bandwidth, latency, local)

    def exchange(size: float) -> float:
        return 0.0 if hosts == 1 else cluster.agreement() + getattr(cluster, way)(size)

    return overlapped(layers, forward_seconds, backward_seconds, exchange, bucket_bytes)


def horovod(layers: Network, cluster: Cluster, forward: float, backward: float) -> Step:
    """Simulates a step of Horovod: each cycle sends all ready gradients, up to a limit."""
    sizes, ready = list(layers.sizes)[::-1], layers.ready(forward, backward)
    now = total = 0.0
    i = requests = 0
    while i < len(sizes):
        now = math.ceil(max(now, ready[i]) / CYCLE) * CYCLE
        size, i = sizes[i], i + 1
        while i < len(sizes) and ready[i] <= now and size + sizes[i] <= FUSION_BYTES:
            size, i = size + sizes[i], i + 1
        taken = cluster.ring(size)
        now, total, requests = now + taken, total + taken, requests + 1
    return Step(now, forward + backward, total, requests)


def pascals(
    name: str, layers: Network, hosts: int, how: str, constants: Sequence[float] = FITTED
) -> tuple[Step, float]:
    """Simulates a step in the published cluster; returns it and its efficiency to one GPU alone."""
    share, latency, slowdown = constants
    alone = BATCH / RATES[name]
    compute = alone * (1 + slowdown)
    parts = compute * FORWARD, compute * (1 - FORWARD)
    link = share * BANDWIDTH, latency
    if how == "horovod":
        step = horovod(layers, Cluster(hosts, *link, GPUS_PER_HOST), *parts)
    else:
        step = predict(layers, hosts, *link, *parts, local=GPUS_PER_HOST, way=how)
    return step, alone / step.seconds


def fit() -> tuple[Sequence[float], float]:
    """Returns the least-squares constants for PUBLISHED, and the root mean square error."""
    layers = {name: network(name) for name, _ in PUBLISHED}

    def error(constants: Sequence[float]) -> float:
        found = [pascals(n, layers[n], hosts, "horovod", constants)[1] for n, hosts in PUBLISHED]
        return float(np.sqrt(np.mean((np.array(found) - list(PUBLISHED.values())) ** 2)))

    grid = itertools.product(range(80, 101, 2), range(10, 41, 2), range(13))
    best = min(((a / 100, b / 1e6, c / 100) for a, b, c in grid), key=error)
    return best, error(best)


WAYS = {
    "horovod": "Horovod, NCCL's ring",
    "ring": "hvd_keras, NCCL's ring",
    "nccl": "hvd_keras, NCCL's ring or tree",
    "auto": "hvd_keras, over MPI",
}
# Between many hosts, and what is exchanged: one value, or the gradients of a step.
BETWEEN = {"direct": "direct", "grid": "grid", "halving": "halving", "host ring": "ring"}
LARGE = (1_000, 10_000)


def predictions() -> list[dict[str, Any]]:
    """Returns a row for each network, number of GPUs and algorithm."""
    rows = []
    for name, how, power in itertools.product(RATES, WAYS, range(3, 13)):
        gpus = 2**power
        step, efficiency = pascals(name, network(name), gpus // GPUS_PER_HOST, how)
        published = PUBLISHED.get((name, gpus // GPUS_PER_HOST)) if how == "horovod" else None
        row = {"network": name, "gpus": gpus, "way": how, **dataclasses.asdict(step)}
        rows.append(row | {"efficiency": efficiency, "published": published})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Formats the efficiencies as a Markdown table, published ones in parentheses."""
    heads = ("", "", *(f"{count:,}" for count in sorted({row["gpus"] for row in rows})))
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for (name, way), group in itertools.groupby(rows, lambda row: (row["network"], row["way"])):
        cells = [
            f"{row['efficiency']:.0%}" + (f" ({row['published']:.0%})" if row["published"] else "")
            for row in group
        ]
        lines.append(f"| {name} | {WAYS[way]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def costs() -> str:
    """Formats what a step costs with many ranks as a Markdown table, without overlap."""
    lines = [
        "| | ranks | | agreements | latency | messages | bytes | link | in all |",
        "|---" * 9 + "|",
    ]
    share, latency, _ = FITTED
    for name, ranks, way in itertools.product(("4 B", "ResNet50", "VGG16"), LARGE, BETWEEN):
        cluster = Cluster(ranks // GPUS_PER_HOST, share * BANDWIDTH, latency, GPUS_PER_HOST)
        sizes = [4] if name == "4 B" else list(network(name).sizes)[::-1]
        requests = [sum(sizes[i] for i in bucket) for bucket in buckets.fill(sizes, BUCKET_BYTES)]
        exchanges = [cluster.between(request, way) for request in requests]
        parts = [len(requests) * cluster.agreement()]
        for field in dataclasses.fields(Exchange):
            parts.append(sum(getattr(exchange, field.name) for exchange in exchanges))
        parts.append(parts[0] + sum(exchange.seconds for exchange in exchanges))
        cells = (name, f"{ranks:,}", BETWEEN[way], *map(report.duration, parts))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plots efficiency over GPUs, one panel per network; dots are published points."""
    pyplot = report.pyplot()
    figure, panels = pyplot.subplots(1, len(RATES), figsize=(13, 3.6), sharey=True, layout="tight")
    for panel, name in zip(panels, RATES, strict=True):
        for way, label in WAYS.items():
            mine = [row for row in rows if (row["network"], row["way"]) == (name, way)]
            curve = zip(*((row["gpus"], row["efficiency"]) for row in mine), strict=True)
            (line,) = panel.plot(*curve, label=label)
            dots = [(row["gpus"], row["published"]) for row in mine if row["published"]]
            panel.plot(*zip(*dots, strict=True) if dots else ([], []), "o", color=line.get_color())
        panel.set(title=name, xscale="log", xlabel="GPUs, 4 a host, 25 Gbit/s", ylim=(0, 1))
    panels[0].set_ylabel("efficiency; dots: published")
    panels[0].legend(fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="print the fitted constants")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="a folder")
    options = parser.parse_args()
    if options.fit:
        constants, error = fit()
        print(f"{constants}, root mean square error {error:.1%}")
    else:
        rows = predictions()
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "model.json").write_text(json.dumps(rows, indent=1) + "\n")
        (options.output / "model.md").write_text(
            f"# Scaling, simulated\n\n{table(rows)}\n\n{costs()}\n"
        )
        print(table(rows), costs(), sep="\n\n")
        if importlib.util.find_spec("matplotlib") is None:
            print("No plot, because matplotlib is missing: pip install 'hvd_keras[bench]'")
        else:
            plot(rows, options.output / "model.png")


if __name__ == "__main__":
    main()
