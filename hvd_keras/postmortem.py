"""``python -m hvd_keras.postmortem FOLDER``: which rank did something else first, and where.

Reads what the ranks of a failed job have left in the folder of ``hvdrun --postmortem``, or of
``HVD_POSTMORTEM``: see ``runtime/flight.py``. Needs no TensorFlow, so another machine may read it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import linecache
import os
import re
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

# The layout of the requests, as in native/core/engine/flight_recorder.h.
_HEAD = struct.Struct("8s i i Q 1024s 4096s")
_RECORD = struct.Struct("Q q q q Q Q I i 200s")
_MAGIC = b"hvdreq1\0"
#: In the order of the recorder's states.
STATES = ("", "waits for the others", "running", "done", "failed")
_DONE, _FAILED = 3, 4
# Where the workers of hvdrun --auto wait for the script, however long it computes.
_TURN = "allreduce 'auto.turn'"

# Behind them, the latest calls: by request, in a table with a place for each hash; each has its
# number, 0 for none, and the line as JSON.
FIRST_CALL = _HEAD.size + 200 * _RECORD.size
CALLS, CALL_BYTES = 64, 512
COUNT = struct.Struct("<Q")
FILE_BYTES = FIRST_CALL + CALLS * CALL_BYTES

# Of each rank, the requests and the lines of its error that are shown.
_LAST_REQUESTS, _ERROR_LINES = 5, 12


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of the script."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        text = f"{self.file}:{self.line}, in {self.function}"
        return f"{text}: {source}" if source else text


class Request(NamedTuple):
    """A request of one rank; times in nanoseconds since 1970, 0 if it has not come so far."""

    number: int
    submitted: int
    started: int
    ended: int
    fingerprint: int
    bytes: int
    state: int
    process_set: int
    identity: str


@dataclasses.dataclass
class Rank:
    """What one rank has left."""

    rank: int
    size: int
    leaving: str  # why it submitted nothing more; empty: it did not say so
    failure: str  # its latest error
    requests: list[Request]  # oldest first
    calls: dict[str, Place]  # by request, the latest last
    host: str
    has_stacks: bool
    raised: Place | None  # an uncaught exception
    stood: Place | None  # its main thread, when requests failed or the process was ended

    def open_requests(self) -> list[Request]:
        """Requests that have not succeeded, of those after the last of its process set that did."""
        done: dict[int, int] = collections.defaultdict(int)
        for request in self.requests:
            if request.state == _DONE:
                done[request.process_set] = request.number
        return [
            request
            for request in self.requests
            if request.state < _DONE
            or (request.state == _FAILED and request.number > done[request.process_set])
        ]

    def where(self) -> str:
        """Where its script was, in words; empty if nothing is known."""
        called = None
        if pending := self.open_requests():
            called = self.calls.get(pending[0].identity)
        if place := self.raised or called or self.stood:
            return f"was at {place}"
        latest = next(reversed(self.calls.values()), None)
        return f"last called hvd_keras at {latest}" if latest else ""


def read(folder: Path) -> dict[int, Rank]:
    """Read the files of all ranks in a folder.

    Raises:
        ValueError: none exist, or they come from another version.
    """
    ranks = {one.rank: one for one in map(_read_rank, folder.glob("rank-*.requests"))}
    if not ranks:
        starts = sorted(path.parent.name for path in folder.glob("*/rank-*.requests"))
        others = f", but its folders {', '.join(dict.fromkeys(starts))} have" if starts else ""
        raise ValueError(
            f"{folder} has no files rank-N.requests{others}. Expected the folder of one start of a "
            "failed job, which hvdrun --postmortem names at its end."
        )
    size = ranks[min(ranks)].size  # further ranks are of an earlier, larger job
    return {rank: one for rank, one in sorted(ranks.items()) if rank < size}


def _read_rank(path: Path) -> Rank:
    data = path.read_bytes()
    if len(data) != FILE_BYTES or not data.startswith(_MAGIC):
        raise ValueError(f"{path} is not of this version of hvd_keras ({FILE_BYTES} bytes).")
    _, rank, size, _, leaving, failure = _HEAD.unpack_from(data)
    records = sorted(_RECORD.iter_unpack(data[_HEAD.size : FIRST_CALL]))
    requests = [Request._make([*one[:-1], _text(one[-1])]) for one in records if one[0] > 0]
    calls, stacks = _calls(data), path.with_suffix(".stacks")
    return Rank(rank, size, _text(leaving), _text(failure), requests, calls, *_read_stacks(stacks))


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def _calls(data: bytes) -> dict[str, Place]:
    found = []
    for place in range(FIRST_CALL, FILE_BYTES, CALL_BYTES):
        (count,) = COUNT.unpack_from(data, place)
        if count > 0:
            found.append((count, json.loads(data[place + COUNT.size : place + CALL_BYTES])))
    return {request: Place(*line) for _, (request, *line) in sorted(found)}


def is_library(file: str, libraries: tuple[str, ...]) -> bool:
    """Whether a stack's file is in one of these folders, or none."""
    return file.startswith("<") or os.path.realpath(file).startswith(libraries)


def _read_stacks(path: Path) -> tuple[str, bool, Place | None, Place | None]:
    """The last fields of a `Rank`."""
    text = path.read_text(errors="replace") if path.exists() else ""
    first, *lines = text.splitlines() or ['{"host": "?", "libraries": []}']
    about = json.loads(first)
    libraries = tuple(about["libraries"])
    raised = stood = None
    section = None  # the innermost line of the script in this thread or exception
    what = ""
    for line in [*lines, "Thread (end)"]:
        if re.match(r"(Current thread|Thread|Exception|Fatal|py-spy:)", line):
            if section is not None:
                # faulthandler prints the main thread last, so it is the one that stays.
                raised, stood = (section, stood) if what == "Exception" else (raised, section)
            section, what = None, line.split()[0]
        frame = re.fullmatch(r'  File "(.*)", line (\d+) in (.*)', line)
        if frame and section is None and what != "py-spy:":
            file = frame[1]
            if not is_library(file, libraries):
                section = Place(file, int(frame[2]), frame[3])
    has_stacks = any(line.startswith(("Current", "Thread", "Exception")) for line in lines)
    return about["host"], has_stacks, raised, stood


def _find(ranks: dict[int, Rank]) -> tuple[list[int], str]:
    """Find which ranks did something else first, and what."""
    size = max(rank.size for rank in ranks.values())
    absent = [rank for rank in range(size) if rank not in ranks]
    raised = [n for n in ranks if ranks[n].raised and not _follows(ranks[n])]
    if absent and raised:  # the others may have ended well
        return raised, _end(ranks[raised[0]])
    if absent:
        lost = "has left no files: its host was lost or has a separate folder, or its disk was full"
        return absent, lost
    by_set: dict[int, dict[int, list[Request]]] = collections.defaultdict(dict)
    for rank in ranks.values():
        members = {request.process_set for request in rank.requests} | {0}
        for process_set in members:
            own = [r for r in rank.open_requests() if r.process_set == process_set]
            by_set[process_set][rank.rank] = own
    # A rank that waits in another process set may do so for the one that differed first.
    for may_wait in (False, True):
        for pending in by_set.values():
            alone = [n for n, own in pending.items() if own == ranks[n].open_requests()]
            if found := _differing(ranks, pending, [*pending] if may_wait else alone):
                return found
    culprits = _first_to_end(ranks, ranks)
    return culprits, _end(ranks[culprits[0]])


def _differing(
    ranks: dict[int, Rank], pending: dict[int, list[Request]], suspects: Sequence[int]
) -> tuple[list[int], str] | None:
    """Which suspects have open requests that are not those of the other ranks of a process set."""
    prints: dict[str, dict[int, int]] = {}  # by identity, of each rank
    for n, own in pending.items():
        for request in own:
            prints.setdefault(request.identity, {}).setdefault(n, request.fingerprint)
    missing = {identity: [n for n in suspects if n not in prints[identity]] for identity in prints}
    # That a rank was killed while it waited says nothing about those for which it waited.
    alive = [n for n in ranks if ranks[n].has_stacks] or [*ranks]
    missing = {
        identity: without
        for identity, without in missing.items()
        if without and identity != _TURN and not prints[identity].keys().isdisjoint(alive)
    }
    if missing:
        fewest = min(map(len, missing.values()))
        usual = _usual(ranks)
        tied = [identity for identity, without in missing.items() if len(without) == fewest]
        identity = next((one for one in tied if one in usual), tied[0])
        culprits = _first_to_end(ranks, missing[identity])
        calls = ranks[culprits[0]].open_requests()
        what = f"called {calls[0].identity}" if calls else _end(ranks[culprits[0]])
        return culprits, f"{what} while {names([*prints[identity]])} waited for {identity}"
    for identity, by_rank in prints.items():
        common, votes = collections.Counter(by_rank.values()).most_common(1)[0]
        if votes < len(by_rank):
            culprits = [n for n, fingerprint in by_rank.items() if fingerprint != common]
            return culprits, f"called {identity} with other arguments than the others"
    return None


def _usual(ranks: dict[int, Rank]) -> set[str]:
    """Return what has followed, earlier, the requests that all ranks served last."""
    usual = set()
    for rank in ranks.values():
        done = [request.identity for request in rank.requests if request.state == _DONE]
        usual |= {after for before, after in itertools.pairwise(done) if before == done[-1]}
    return usual


def _first_to_end(ranks: dict[int, Rank], among: Iterable[int]) -> list[int]:
    """Return the ranks that ended first, if any did: because of them the others were ended."""
    among = list(among)
    if len(among) == 1:
        return among
    for ended in (
        [n for n in among if ranks[n].raised and not _follows(ranks[n])],
        [n for n in among if ranks[n].leaving and not _follows(ranks[n])],
        [n for n in among if not ranks[n].has_stacks],
    ):
        if ended:
            return ended
    return among


def _follows(rank: Rank) -> bool:
    """Whether it ended because of another rank."""
    return " has left the job: " in rank.failure or "no progress for " in rank.failure


def _end(rank: Rank) -> str:
    if rank.leaving:
        return f"left the job ({rank.leaving})"
    return "made no further call" if rank.has_stacks else "was killed or ended without a message"


def names(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def conclusion(folder: Path) -> str:
    """Say in words which rank did something else first, and where in its script."""
    return _conclusion(read(folder))


def _conclusion(ranks: dict[int, Rank]) -> str:
    culprits, what = _find(ranks)
    lines = [f"{names(culprits)} {what}"]
    for rank in culprits:
        if rank in ranks and (where := ranks[rank].where()):
            lines.append(f"  rank {rank} {where}")
    return "\n".join(lines)


def report(folder: Path) -> str:
    """Return the conclusion, and each rank's last requests."""
    ranks = read(folder)
    paragraphs = [_conclusion(ranks)]
    every = [one for rank in ranks.values() for one in rank.requests]
    over = max((max(one.submitted, one.started, one.ended) for one in every), default=0)
    for rank in ranks.values():
        lines = [f"rank {rank.rank} on {rank.host}"]
        if where := rank.where():
            lines.append(f"  {where}")
        for request in rank.requests[-_LAST_REQUESTS:]:
            at = time.strftime("%H:%M:%S", time.localtime(request.submitted // 10**9))
            at += f".{request.submitted // 10**6 % 1000:03}"
            took = f"{max(0, (request.ended or over) - request.submitted) / 1e6:.1f} ms"
            state = STATES[request.state]
            set_ = f", process set {request.process_set}" if request.process_set else ""
            lines.append(f"  {at}  {request.identity}, {request.bytes} B{set_}: {state}, {took}")
        if rank.leaving:
            lines.append(f"  left the job: {rank.leaving}")
        if rank.failure:
            error = rank.failure.splitlines()[:_ERROR_LINES]
            lines += ["  error: " + error[0], *("    " + line for line in error[1:])]
        paragraphs.append("\n".join(lines))
    paragraphs.append(f"Stacks of all threads: {folder}/rank-N.stacks")
    return "\n\n".join(paragraphs)


def main() -> int:
    """Run the program; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hvd_keras.postmortem",
        description="Says which rank of a failed job did something else first, and where.",
    )
    parser.add_argument("folder", type=Path, help="the folder of hvdrun --postmortem")
    try:
        print(report(parser.parse_args().folder))
    except (OSError, ValueError) as error:
        print(f"postmortem: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
