"""``python -m hvd_keras.timeline FILE``: opens a timeline in Perfetto by a link.

While a timeline is recorded, each rank appends its requests to a file of its own beside FILE
(native/core/engine/recorder.h). In the end `merge` makes one of them, in the Trace Event Format; so
does this program, while the job runs or after a failure. Perfetto (https://ui.perfetto.dev) runs in
the browser. It may fetch a file from port 9001 of the machine that the browser runs on, and from no
other, so this program serves the file there.
"""

from __future__ import annotations

import argparse
import collections
import glob
import itertools
import json
import os
import socket
import struct
import sys
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PERFETTO = "https://ui.perfetto.dev"
PORT = 9001  # the one that Perfetto's page allows

# Ranks that arrive within so many nanoseconds count as simultaneous.
TOGETHER = 100_000

# The layout of a request, as in native/core/engine/recorder.h.
_SERVED = struct.Struct("6Q 208s")


class Served(NamedTuple):
    """A request that has run on a rank; times in nanoseconds of its host's clock."""

    process_set: int
    turn: int  # of the process set; the same on all ranks
    ready: int
    start: int  # when all ranks had agreed on it: at the same moment
    end: int
    input_bytes: int
    title: bytes


def begin(file: Path, rank: int, size: int) -> int:
    """Make a rank's file and return its descriptor. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(f"{file}.rank-{rank}", flags, 0o666)
    os.write(descriptor, json.dumps([rank, size, socket.gethostname()]).encode() + b"\n")
    return descriptor


def merge(file: Path, *, keep: bool = False) -> str:
    """Make a timeline of its ranks' files, if there are any; remove these, unless told to `keep`.

    Returns which ranks are missing, as text. Raises OSError.
    """
    found = _parts(file)
    ranks: dict[int, tuple[str, list[Served]]] = {}
    size = 0
    for path in found:
        head, end, data = path.read_bytes().partition(b"\n")
        if not end:  # it was killed at once
            continue
        rank, there, host = json.loads(head)
        size = size or there
        if rank < size:  # else of an earlier job
            whole = len(data) // _SERVED.size * _SERVED.size  # a full disk may have cut the last
            ranks[rank] = host, [Served._make(one) for one in _SERVED.iter_unpack(data[:whole])]
    if found:
        file.write_text("[\n" + ",\n".join(map(json.dumps, _events(ranks))) + "\n]\n")
    for path in [] if keep else found:
        path.unlink()
    absent = sorted({*range(size)} - ranks.keys())
    return f"the timeline {file} lacks ranks {', '.join(map(str, absent))}" if absent else ""


def nth(file: Path, number: int) -> Path:
    """Return the file of a job's further timelines: that of the second `init()` has number 2."""
    return file.with_stem(f"{file.stem}-{number}") if number > 1 else file


def of_job(file: Path) -> Iterator[Path]:
    """Yield the first timeline of a job, and the further ones that there are."""
    yield file
    for number in itertools.count(2):
        further = nth(file, number)
        if not further.exists() and not _parts(further):
            return
        yield further


def remove(file: Path) -> None:
    """Remove the timeline of an earlier job, and what its ranks have left. Raises OSError."""
    parts = [path for one in of_job(file) for path in _parts(one)]
    for path in (file, *parts):  # a further one may be another job's
        path.unlink(missing_ok=True)


def _parts(file: Path) -> list[Path]:
    """Return the ranks' files, by rank."""
    found = file.parent.glob(f"{glob.escape(file.name)}.rank-*")
    own = [path for path in found if path.suffix[6:].isdecimal()]  # not what the user made of one
    return sorted(own, key=lambda path: int(path.suffix[6:]))


def _events(ranks: Mapping[int, tuple[str, Sequence[Served]]]) -> Iterator[dict[str, Any]]:
    """Yield a timeline's events: a process for each rank, with a row for each process set."""
    begun: dict[Any, int] = {}  # when a turn of a set began, on the first rank's clock
    waits: dict[Any, dict[int, int]] = collections.defaultdict(dict)
    shifts: dict[int, int] = {}
    for rank, (_, own) in ranks.items():
        shift = sorted(begun[one[:2]] - one.start for one in own if one[:2] in begun) or [0]
        shifts[rank] = shift[len(shift) // 2]
        for one in own:
            begun.setdefault(one[:2], one.start + shifts[rank])
            waits[one[:2]][rank] = one.start - one.ready
    first = min((own[0].ready + shifts[rank] for rank, (_, own) in ranks.items() if own), default=0)
    for rank, (host, own) in ranks.items():
        about = {"ph": "M", "pid": rank, "tid": 0}
        yield {**about, "name": "process_name", "args": {"name": f"rank {rank} on {host}"}}
        yield {**about, "name": "process_sort_index", "args": {"sort_index": rank}}
        for row in {one.process_set for one in own}:
            name = f"process set {row}" if row else "all ranks"
            yield {**about, "name": "thread_name", "tid": row, "args": {"name": name}}
        for one in own:
            last = _last(waits[one[:2]])
            title = one.title.rstrip(b"\0").decode(errors="replace")
            kind, _, name = title.partition(" ")
            told = {"kind": kind, "name": name, "bytes": one.input_bytes}
            told |= {"process_set": one.process_set, "last_rank": last}
            wait = "wait" if last in (None, rank) else f"wait for rank {last}"
            for what, begin, end in (wait, one.ready, one.start), (title, one.start, one.end):
                place = {"ph": "X", "pid": rank, "tid": one.process_set}
                times = {"ts": (begin + shifts[rank] - first) / 1e3, "dur": (end - begin) / 1e3}
                yield {**place, "name": what, **times, "args": told}


def _last(waits: Mapping[int, int]) -> int | None:
    """Return the rank that waited least, as it came last; None if all came together."""
    last = min(waits, key=waits.__getitem__)
    longer = sum(waits.values()) - waits[last] * len(waits)
    return last if longer >= TOGETHER * max(1, len(waits) - 1) else None


def serve(file: Path) -> None:
    """Print a link and serve the file, to Perfetto alone, until it has been fetched once.

    Raises:
        OSError: the file cannot be read, or the port is in use.
    """
    import http.server  # hvdrun, which merges, needs no server

    merge(file, keep=True)  # the ranks may go on writing
    content = file.read_bytes()
    path = "/" + urllib.parse.quote(file.name)
    fetched = False

    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = 1.0  # seconds; a browser may connect in advance, and send nothing

        def do_GET(self) -> None:
            nonlocal fetched
            if self.path != path:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", PERFETTO)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            fetched = True

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", PORT), Handler) as server:
        print(f"{PERFETTO}/#!/?url=http://127.0.0.1:{PORT}{path}", flush=True)
        while not fetched:
            server.handle_request()


def main() -> int:
    """Run the program; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hvd_keras.timeline",
        description="Prints a link that opens a timeline in Perfetto, and serves the file for it.",
    )
    parser.add_argument("file", type=Path, help="the file of hvdrun --timeline")
    file = parser.parse_args().file
    try:
        serve(file)
    except OSError as error:
        print(f"timeline: cannot serve {file} at port {PORT}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
