"""Rows of results: compares two things that were measured in turn, as JSON or a table."""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def compare(
    what: str, ranks: int, against: str, ours: Sequence[float], theirs: Sequence[float]
) -> Row:
    """Makes one row. ``ours[i]`` and ``theirs[i]`` are seconds, measured one after the other.

    The ratio is the median of the pairs' ratios, so that a slow minute of the machine affects both
    sides; the quartiles show the spread.
    """
    pairs = list(zip(map(float, ours), map(float, theirs), strict=True))
    ratios = [a / b for a, b in pairs]
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if ratios[1:] else ratios * 3
    return {
        "what": what,
        "ranks": ranks,
        "against": against,
        "seconds": statistics.median(a for a, _ in pairs),
        "against_seconds": statistics.median(b for _, b in pairs),
        "difference_seconds": statistics.median(a - b for a, b in pairs),
        "ratio": quartiles[1],
        "quartiles": [quartiles[0], quartiles[2]],
        "repeats": len(pairs),
    }


def duration(seconds: float) -> str:
    """Formats a duration with three digits and a unit."""
    for unit, factor in (("s", 1), ("ms", 1e3)):
        if abs(seconds) * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def table(rows: Sequence[Row]) -> str:
    """Formats the rows as a Markdown table."""
    lines = [
        "| what | ranks | compared with | hvd_keras | the other | difference | ratio | quartiles "
        "| repeats |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["quartiles"]
        times = (row[name] for name in ("seconds", "against_seconds", "difference_seconds"))
        cells = (
            *(row["what"], row["ranks"], row["against"], *map(duration, times)),
            *(f"{row['ratio']:.3g}", f"{low:.3g} to {high:.3g}", row["repeats"]),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def show(rows: Sequence[Row], as_json: bool) -> None:
    """Prints the rows: as a line of JSON for run.py, or as a table."""
    if as_json:
        print(json.dumps({"benchmark": Path(sys.argv[0]).stem, "rows": rows}), flush=True)
    else:
        print(table(rows), flush=True)


def pyplot() -> Any:
    """Returns matplotlib's pyplot, for files that fit a light and a dark page."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for part in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"):
        pyplot.rcParams[part] = "#7d8794"
    pyplot.rcParams["savefig.transparent"] = True
    pyplot.rcParams["legend.framealpha"] = 0
    return pyplot
