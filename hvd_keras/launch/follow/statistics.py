"""What the ranks tell while they run: the table of `hvdrun --stats`, and Prometheus's metrics."""

import collections
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_keras.launch.errors import UsageError, refusing
from hvd_keras.launch.onhost.cores import ranges

# A rank is worth a sentence if the others waited for it for this part of the time, and this many
# times as long as for any other.
WORTH_A_WORD = 0.05
FAR_MORE = 2

WINDOW = 10  # of a rank's last messages, about one per second, over which rates are taken

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
class Statistics:
    """The ranks' last messages, in the latest start of a job."""

    size: int = 0
    starts: int = 0
    past: dict[int, collections.deque[Any]] = field(default_factory=dict)  # by rank

    def start(self, size: int) -> None:
        self.size, self.starts, self.past = size, self.starts + 1, {}

    def take(self, rank: int, host: str, numbers: Any) -> None:
        """Take a message: `hvd.stats()`, of `ranks` this one alone as `late`, and `training`."""
        past = self.past.setdefault(rank, collections.deque(maxlen=WINDOW))
        past.append({**numbers, "host": host})

    def collect(self) -> Iterator[Any]:
        """From prometheus_client: the metrics, made when they are asked for, in another thread."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        past = {rank: [*own] for rank, own in [*self.past.items()]}
        latest = {rank: own[-1] for rank, own in past.items()}
        yield GaugeMetricFamily("hvd_ranks", "Ranks of the job.", value=self.size)
        yield CounterMetricFamily("hvd_restarts", "By hvdrun.", value=max(0, self.starts - 1))
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


def recent(past: Sequence[Any]) -> dict[str, float | None]:
    """How a rank has fared in the last seconds, by its messages; None: not known.

    `waiting` is the share of time in which a request of this rank waited for other ranks, and
    `straggler` the share in which the others waited for this rank, both from 0 to 1.
    """
    old, new = past[0], past[-1]
    seconds = max(new["seconds"] - old["seconds"], 1e-9)
    waited = _spent(new, "waiting") - _spent(old, "waiting")
    awaited = new["late"]["awaited_seconds"] - old["late"]["awaited_seconds"]
    # Rates of the running fit alone; the training looks at its numbers when it likes.
    fit = [own["training"] for own in past if own["training"].get("at") is not None]
    while fit and fit[0]["steps"] > fit[-1]["steps"]:
        del fit[0]
    first, last = (fit[0], fit[-1]) if fit else ({}, {})
    trained = last.get("at", 0.0) - first.get("at", 0.0)
    count = last.get("steps", 0) - first.get("steps", 0)
    trains = count and None not in (first.get("samples"), last.get("samples"))
    return {
        "samples_per_second": (last["samples"] - first["samples"]) / trained if trains else None,
        "step_seconds": trained / count if count else None,
        "waiting": min(max(waited / seconds, 0.0), 1.0),
        "straggler": min(max(awaited / seconds, 0.0), 1.0),
    }


def _spent(own: Any, what: str) -> float:
    return float(sum(kind[f"{what}_seconds"] for kind in own["collectives"].values()))


def table(statistics: Statistics) -> str:
    """Return what the ranks have sent last (see docs/observing.md), in words."""
    stats = {rank: past[-1] for rank, past in sorted(statistics.past.items())}
    if not stats:
        return "no statistics: no rank has sent any. Ranks send them once a second after hvd.init()"
    missing = [str(rank) for rank in range(statistics.size) if rank not in stats]
    paragraphs = [_of_ranks(stats), _of_collectives(list(stats.values())), _conclusion(stats)]
    if missing:
        paragraphs.append(f"No statistics of rank {', '.join(missing)}.")
    return "statistics\n\n" + "\n\n".join(text for text in paragraphs if text)


def _of_ranks(stats: dict[int, Any]) -> str:
    rows = [["rank", "cores", "seconds", "waiting", "", "moving", ""]]
    rows[0] += ["came last", "others waited for it"]
    for rank, own in stats.items():
        late = own["late"]
        row = [str(rank), ranges(own["cores"]), f"{own['seconds']:.1f}"]
        for what in ("waiting", "moving"):
            spent = _spent(own, what)
            row += [f"{spent:.1f} s", f"{spent / max(own['seconds'], 1e-9):.0%}"]
        rows.append([*row, f"{late['last']} times", f"{late['awaited_seconds']:.1f} s"])
    return _aligned(rows)


def _of_collectives(stats: Sequence[Any]) -> str:
    """Of all ranks: requests of the rank with the most, bytes of all, mean times."""
    rows = [["collective", "requests", "bytes of all ranks", "waiting, mean", "moving, mean"]]
    for kind in sorted({kind for own in stats for kind in own["collectives"]}):
        counted = [own["collectives"][kind] for own in stats if kind in own["collectives"]]
        row = [kind, str(max(own["requests"] for own in counted))]
        row.append(_bytes(sum(own["bytes"] for own in counted)))
        for what in ("waiting_seconds", "moving_seconds"):
            row.append(f"{sum(own[what] for own in counted) / len(stats):.2f} s")
        rows.append(row)
    return _aligned(rows) if len(rows) > 1 else "No collective has run."


def _conclusion(stats: dict[int, Any]) -> str:
    awaited = {rank: own["late"]["awaited_seconds"] for rank, own in stats.items()}
    rank = max(awaited, key=lambda rank: awaited[rank])
    share = awaited.pop(rank) / max(stats[rank]["seconds"], 1e-9)
    runner_up = max(awaited.values(), default=0.0) / max(stats[rank]["seconds"], 1e-9)
    if share < max(WORTH_A_WORD, FAR_MORE * runner_up):
        return ""
    return f"The others waited for rank {rank} in {share:.0%} of the time."


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def parse_address(option: str, text: str) -> tuple[str, int]:
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
    registry.register(statistics)
    message = f"--metrics got {address}:{port}, where hvdrun cannot listen"
    with refusing(message, "; expected a free port of this host"):
        start_http_server(port, address, registry)
