"""`hvdrun --stats` in a terminal: a few lines at its bottom, below the ranks' output.

The output scrolls in the lines above, which the terminal is told to keep apart, so that the ranks'
progress bars and unfinished lines work as usual.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence

from hvd_keras.launch.follow.statistics import Recent, Statistics
from hvd_keras.launch.onhost.limits import SCREEN_REFRESH

# Ranks that are shown at most: those for which the others wait most.
SHOWN = 8

# Lines of the terminal that are left to the output at least.
OUTPUT_LINES = 8

# Length of the bar for the straggler score.
BAR = 10


class Screen:
    """The lines. `write` takes bytes for the terminal."""

    def __init__(self, statistics: Statistics, write: Callable[[bytes], None]) -> None:
        self._statistics, self._write = statistics, write
        self._shape = (0, 0, 0)  # columns and lines of the terminal, and our lines
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Draw now, and again and again."""
        with contextlib.suppress(OSError):  # the terminal is gone
            self._draw()
        self._timer = asyncio.get_running_loop().call_later(SCREEN_REFRESH, self.start)

    def stop(self) -> None:
        """Give the terminal back."""
        if self._timer is not None:
            self._timer.cancel()
        if self._shape[2]:
            self._write(b"\0337" + self._erased() + b"\033[r\0338")
        self._shape = (0, 0, 0)

    def _draw(self) -> None:
        columns, lines = os.get_terminal_size(2)
        ranks = self._statistics.recent()
        if not ranks:
            return
        count = min(len(ranks), SHOWN) + 2
        if count + OUTPUT_LINES > lines:
            count = 1  # a status line
        text = b""
        if self._shape != (columns, lines, count):
            # The cursor leaves the lines that become ours: it and what is above scroll up.
            text += b"\0337" + self._erased() + b"\033[r\0338"
            text += b"\n" * count + b"\033[%dA\0337\033[1;%dr\0338" % (count, lines - count)
            self._shape = (columns, lines, count)
        drawn = render(ranks, self._statistics.size, columns, count)
        text += b"\0337"
        for number, line in enumerate(drawn):
            text += b"\033[%d;1H\033[2K" % (lines - count + 1 + number) + line.encode()
        self._write(text + b"\0338")

    def _erased(self) -> bytes:
        _, lines, count = self._shape
        return b"".join(b"\033[%d;1H\033[2K" % (lines - n) for n in range(count))


def render(ranks: Sequence[Recent], size: int, columns: int, count: int) -> list[str]:
    """Make `count` lines: a summary, and a table of the ranks for which the others wait most."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    title = Text(_summary(ranks, size), style="reverse")
    title.truncate(columns, overflow="ellipsis", pad=True)
    console = Console(width=columns, force_terminal=True, highlight=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(title)
        if count > 1:
            table = Table(box=None, pad_edge=False, header_style="dim")
            for name in ("rank", "host", "samples/s", "step", "waiting", "straggler", ""):
                table.add_column(name, justify="left" if name in ("host", "") else "right")
            worst = sorted(ranks, key=lambda own: -own.straggler)[: count - 2]
            for own in sorted(worst, key=lambda own: own.rank):
                score = own.straggler
                style = "red" if score > 0.2 else "yellow" if score > 0.05 else "green"
                table.add_row(
                    *(str(own.rank), own.host, _number(own.samples_per_second)),
                    *(_milliseconds(own.step_seconds), f"{own.waiting:.0%}"),
                    *(f"{score:.2f}", Text("█" * round(score * BAR), style=style)),
                )
            console.print(table)
    return capture.get().splitlines()[:count]


def _summary(ranks: Sequence[Recent], size: int) -> str:
    parts = [f" hvdrun: {size} rank{'s' * (size != 1)}"]
    rates = [own.samples_per_second for own in ranks]
    if len(ranks) == size and None not in rates:
        parts.append(f"{_number(sum(filter(None, rates)))} samples/s")
    steps = [own.step_seconds for own in ranks if own.step_seconds is not None]
    if steps:
        parts.append(f"step {_milliseconds(sum(steps) / len(steps))}")
    if ranks[0].loss is not None:
        parts.append(f"loss {ranks[0].loss:.4g}")
    if ranks[0].epoch:
        parts.append(f"epoch {ranks[0].epoch}")
    worst = max(ranks, key=lambda own: own.straggler)
    if worst.straggler > 0.05:
        parts.append(f"waiting for rank {worst.rank}: {worst.straggler:.0%}")
    return " · ".join(parts)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.3g} ms"
