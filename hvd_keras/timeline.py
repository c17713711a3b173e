"""``python -m hvd_keras.timeline FILE``: opens a timeline in Perfetto by a link.

While a timeline is recorded, each rank appends its requests to a file of its own beside FILE
(native/core/engine/recorder.h). In the end, or here after a failure, `merge` makes one of them, in
the Trace Event Format. Perfetto (https://ui.perfetto.dev) runs in the browser. It may fetch a file
from port 9001 of the machine that the browser runs on, and from no other, so this program serves
the file there.
"""

from __future__ import annotations

import argparse
import collections
import glob
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
_SERVED = struct.Struct("5Q i 212s")


class Served(NamedTuple):
    """A request that has run on a rank; times in nanoseconds of its host's clock."""

    turn: int  # of its process set; the same on all ranks
    ready: int
    start: int  # when all ranks had agreed on it: at the same moment
    end: int
    bytes: int
    process_set: int
    title: bytes


def parts(file: Path) -> list[Path]:
    """Return the files of ranks that are not yet merged into a timeline."""
    return [*file.parent.glob(f"{glob.escape(file.name)}.rank-*")]


def clear(file: Path) -> None:
    """Make the file of a new timeline, still empty, and remove what an earlier one has left."""
    file.write_bytes(b"")
    for path in parts(file):
        path.unlink()


def begin(file: Path, rank: int) -> int:
    """Make a rank's file and return its descriptor. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(f"{file}.rank-{rank}", flags, 0o666)
    os.write(descriptor, json.dumps([rank, socket.gethostname()]).encode() + b"\n")
    return descriptor


def merge(file: Path) -> int:
    """Make a timeline of the files of its ranks, which it removes; return how many there were."""
    hosts: dict[int, str] = {}
    requests: dict[int, list[Served]] = {}
    found = parts(file)
    for path in found:
        head, end, data = path.read_bytes().partition(b"\n")
        if end:  # else the rank was killed at once
            rank, hosts[rank] = json.loads(head)
            whole = len(data) // _SERVED.size * _SERVED.size  # a full disk may have cut the last
            requests[rank] = [Served._make(one) for one in _SERVED.iter_unpack(data[:whole])]
    if found:
        with file.open("w") as out:
            events = map(json.dumps, _events(hosts, _aligned(requests)))
            out.write("[\n" + ",\n".join(events) + "\n]\n")
    for path in found:
        path.unlink()
    return len(found)


def _aligned(requests: Mapping[int, Sequence[Served]]) -> dict[int, list[Served]]:
    """Return the ranks' requests with times of the first rank's clock: a turn begins on all."""
    begun: dict[tuple[int, int], int] = {}
    aligned = {}
    for rank, own in sorted(requests.items()):
        differ = [begun[turn] - one.start for one in own if (turn := _turn(one)) in begun]
        shift = sorted(differ)[len(differ) // 2] if differ else 0
        aligned[rank] = [
            one._replace(ready=one.ready + shift, start=one.start + shift, end=one.end + shift)
            for one in own
        ]
        begun = {_turn(one): one.start for one in aligned[rank]} | begun
    return aligned


def _turn(one: Served) -> tuple[int, int]:
    return one.process_set, one.turn


def _last_ranks(requests: Mapping[int, Sequence[Served]]) -> dict[tuple[int, int], int | None]:
    """Return by turn the rank that waited least: it came last, unless all came together."""
    waited: dict[tuple[int, int], dict[int, int]] = collections.defaultdict(dict)
    for rank, own in requests.items():
        for one in own:
            waited[_turn(one)][rank] = one.start - one.ready
    found: dict[tuple[int, int], int | None] = {}
    for turn, waits in waited.items():
        last = min(waits, key=waits.__getitem__)
        others = max(1, len(waits) - 1)
        longer = (sum(waits.values()) - waits[last] * len(waits)) / others
        found[turn] = last if longer >= TOGETHER else None
    return found


def _events(
    hosts: Mapping[int, str], requests: Mapping[int, Sequence[Served]]
) -> Iterator[dict[str, Any]]:
    """Yield a timeline's events: a process for each rank, a row for each process set."""
    last_ranks = _last_ranks(requests)
    first = min((one.ready for own in requests.values() for one in own), default=0)
    for rank, own in requests.items():
        yield _named("process_name", rank, 0, name=f"rank {rank} on {hosts[rank]}")
        yield _named("process_sort_index", rank, 0, sort_index=rank)
        for number in {one.process_set for one in own}:
            row = f"process set {number}" if number else "all ranks"
            yield _named("thread_name", rank, number, name=row)
        for one in own:
            title = one.title.rstrip(b"\0").decode(errors="replace")
            kind, _, name = title.partition(" ")
            last = last_ranks[_turn(one)]
            told = {"kind": kind, "name": name, "bytes": one.bytes}
            told |= {"process_set": one.process_set, "last_rank": last}
            wait = "wait" if last in (None, rank) else f"wait for rank {last}"
            for what, begin, end in (wait, one.ready, one.start), (title, one.start, one.end):
                where = {"pid": rank, "tid": one.process_set}
                times = {"ts": (begin - first) / 1e3, "dur": (end - begin) / 1e3}
                yield {"ph": "X", "name": what, **where, **times, "args": told}


def _named(what: str, rank: int, row: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": row, "args": arguments}


def serve(file: Path) -> None:
    """Print a link and serve the file, to Perfetto alone, until it has been fetched once.

    Raises:
        OSError: the file cannot be read, or the port is in use.
    """
    import http.server  # hvdrun, which merges, needs no server

    merge(file)
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
