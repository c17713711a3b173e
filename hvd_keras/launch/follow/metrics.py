"""`hvdrun --metrics`: what the ranks tell, for Prometheus."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hvd_keras.launch.errors import UsageError, refusing
from hvd_keras.launch.follow.statistics import Statistics, recent

# By rank: the name, the help, the key of `recent` or of the running fit's numbers.
GAUGES = (
    ("hvd_samples_per_second", "Samples of this rank, of the last seconds.", "samples_per_second"),
    ("hvd_step_seconds", "Time of a training step, of the last seconds.", "step_seconds"),
    ("hvd_waiting_ratio", "Share of time in which this rank waited for others.", "waiting"),
    ("hvd_straggler_score", "Share of time in which the others waited for this rank.", "straggler"),
    ("hvd_loss", "Loss of the running epoch on this rank.", "loss"),
    ("hvd_epoch", "The running epoch.", "epoch"),
    ("hvd_gpu_memory_bytes", "Memory of its GPU in use.", "gpu_bytes"),
)

# The same for what only grows.
COUNTERS = (
    ("hvd_samples", "Samples of this rank in the running fit.", "samples"),
    ("hvd_steps", "Steps of the running fit.", "steps"),
)

# Counters by rank and collective: the name, the help, and the key of hvd.stats().
COLLECTIVES = (
    ("hvd_collectives", "Collectives that have run.", "requests"),
    ("hvd_bytes", "Bytes of this rank's inputs.", "bytes"),
    ("hvd_waiting_seconds", "Time until the other ranks were ready.", "waiting_seconds"),
    ("hvd_moving_seconds", "Time while data moved.", "moving_seconds"),
)


@dataclass(eq=False)  # prometheus_client keeps it in a dict
class Collector:
    """The metrics, made when they are asked for (in a thread of the server)."""

    statistics: Statistics

    def collect(self) -> Iterator[Any]:
        """From prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        statistics = self.statistics
        past = {rank: [*own] for rank, own in statistics.past.items()}
        latest = {rank: own[-1] for rank, own in past.items()}
        yield GaugeMetricFamily("hvd_ranks", "Ranks of the job.", value=statistics.size)
        yield CounterMetricFamily("hvd_restarts", "By hvdrun.", value=max(0, statistics.starts - 1))
        values = {rank: recent(own) | own[-1]["training"] for rank, own in past.items()}
        for family, metrics in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, text, key in metrics:
                metric = family(name, text, labels=("rank", "host"))
                for rank, numbers in latest.items():
                    if (value := values[rank].get(key)) is not None:
                        metric.add_metric((str(rank), numbers["host"]), value)
                yield metric
        for name, text, key in COLLECTIVES:
            counter = CounterMetricFamily(name, text, labels=("rank", "host", "collective"))
            for rank, numbers in latest.items():
                for kind, counted in numbers["collectives"].items():
                    counter.add_metric((str(rank), numbers["host"], kind), counted[key])
            yield counter


def parse(option: str, text: str) -> tuple[str, int]:
    """Parse `PORT` or `ADDRESS:PORT`, as an option has it. Raises UsageError."""
    address, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise UsageError(f"{option} got {text!r}; expected a port, or an address and a port")
    return address.strip("[]") or "127.0.0.1", int(port)


def serve(address: str, port: int, statistics: Statistics) -> None:
    """Serve the metrics at this address until this process ends. Raises UsageError."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise UsageError(
            "--metrics needs the package prometheus_client; run: pip install prometheus_client"
        ) from error
    registry = CollectorRegistry()
    registry.register(Collector(statistics))
    message = f"--metrics got {address}:{port}, where hvdrun cannot listen"
    with refusing(message, "; expected a free port of this host"):
        start_http_server(port, address, registry)
