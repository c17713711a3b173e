"""The table that `hvdrun --stats` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# A rank is worth a sentence if the others waited for it for this part of the time, and this many
# times as long as for any other.
WORTH_A_WORD = 0.05
FAR_MORE = 2


def table(statistics: Mapping[int, Any], size: int) -> str:
    """What the ranks have sent at their ends (see docs/observing.md), in words."""
    stats = dict(sorted(statistics.items()))
    if not stats:
        return "hvdrun: no statistics: no rank finished after hvd.init()"
    missing = [str(rank) for rank in range(size) if rank not in stats]
    paragraphs = [_of_ranks(stats), _of_collectives(list(stats.values())), _conclusion(stats)]
    if missing:
        paragraphs.append(f"No statistics of rank {', '.join(missing)}, which did not finish.")
    return "hvdrun: statistics\n\n" + "\n\n".join(text for text in paragraphs if text)


def _of_ranks(stats: dict[int, Any]) -> str:
    rows = [["rank", "seconds", "waiting", "", "moving", "", "came last", "others waited for it"]]
    for rank, own in stats.items():
        late = own["ranks"][rank]
        row = [str(rank), f"{own['seconds']:.1f}"]
        for what in ("waiting", "moving"):
            spent = sum(kind[f"{what}_seconds"] for kind in own["collectives"].values())
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
    awaited = {rank: own["ranks"][rank]["awaited_seconds"] for rank, own in stats.items()}
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
