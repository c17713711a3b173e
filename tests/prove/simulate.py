"""Simulates jobs on several hosts, with the engine and the transports as they ship, and faults.

See docs/protocol.md and native/tests/simulate. Each seed is a job, and runs twice. With
--mutants, breaks the core in one place after another; the simulation must notice each.
"""

import argparse
import os
import pathlib
import subprocess
import sys

from tests.gpu.mutants import Build, Mutant
from tests.prove.__main__ import BUILD, ROOT, build

PROGRAM = "tests/simulate_test"
CPU, ENGINE = "native/core/cpu", "native/core/engine"
# File, text that is there once, and what takes its place.
MUTANTS = (
    (f"{ENGINE}/engine.cc", "if (!agreement->all_propose(head)) return negotiate();", ""),
    (f"{ENGINE}/engine.cc", " && agreement->all_propose(head.fingerprint)", ""),
    (f"{ENGINE}/engine.cc", "agreed_ = std::move(agreement);", ""),
    (f"{ENGINE}/negotiation.cc", "    if (row.reduces)\n", "    if (row.has_root)\n"),
    (f"{ENGINE}/agreement.cc", "else if (other.absent < 0)", "else"),
    (f"{ENGINE}/agreement.cc", "absent = std::max(", "absent = std::min("),
    (f"{ENGINE}/agreement.cc", "|| row.signature != other.signature", ""),
    (f"{ENGINE}/texts.cc", "if (waiting.count > 0)", "if (false)"),
    (f"{ENGINE}/ends.cc", "left_over.swap(queue_);", ""),
    (f"{CPU}/mpi_wait.cc", "throw_if_aborted();  // after the sleep", "// after the sleep"),
    (f"{CPU}/mpi_wait.cc", "start_ += now - turned_;", ";"),
    # mpi_wait.cc without the check for an abort before a step: edges_test notices that.
    (
        f"{CPU}/mpi_wait.cc",
        "if (!notice.complete()) return false;",
        "while (!notice.complete()) {}",
    ),
    (f"{CPU}/mpi_wait.cc", "empty() ? behind : missing", "empty() ? missing : behind"),
    (
        f"{CPU}/mpi_transport.cc",
        "rank_ + power);\n    some = combine(some, others);",
        "rank_ + power);",
    ),
    (f"{CPU}/mpi_transport.cc", "> kLateSeconds) waiter_->check_aborted();", "< 0);"),
    (f"{CPU}/mpi_transport.cc", "if (all.least != all.most) along_.reset();", ""),
    (f"{CPU}/cluster_transport.cc", "if (all.least != all.most) along_.reset();", ""),
    (
        f"{CPU}/cluster_transport.cc",
        "if (counters.least(HostCounters::arrived) < published - 1) return false;",
        "",
    ),
    (f"{CPU}/inter_host.cc", "all_.summary.add(received_.summary);", ""),
    (f"{CPU}/inter_host.cc", "(last < beyond_ ? 2 : 1)", "1"),
    (f"{CPU}/host_counters.cc", "raise(rank_ / kRanksPerGroup, kind);", ""),
    (f"{CPU}/host_counters.cc", "std::min(first + kRanksPerGroup, size())", "first + 1"),
    (f"{CPU}/cluster_transport.cc", "if (host_ != root_host) std::memset(slice, 0, bytes);", ""),
    (
        f"{CPU}/kind_transport.cc",
        "agree(failed, nullptr, waiting_)->most == 0",
        "(agree(failed, nullptr, waiting_), failed.fingerprint == 0)",
    ),
    (
        f"{CPU}/cluster_transport.cc",
        "least(HostCounters::unpacked) + kWindow",
        "least(HostCounters::unpacked) + 2 * kWindow",
    ),
    (
        f"{CPU}/cluster_transport.cc",
        "started < counters.least(HostCounters::packed)",
        "started < packed",
    ),
    (
        f"{CPU}/cluster_transport.cc",
        "unpacked < counters.least(HostCounters::reduced, leaders)",
        "unpacked < complete",
    ),
    (f"{CPU}/cluster_collectives.cc", "in_slot[0].resize((h + 1) * most_local_, -1);", ""),
    (f"{CPU}/cluster_transport.cc", "&failed, 1, MPI_INT, MPI_MAX", "&failed, 1, MPI_INT, MPI_MIN"),
    (f"{CPU}/inter_host.cc", "beyond_.empty() ? slice_.factors : Factors()", "slice_.factors"),
    (f"{CPU}/inter_host.cc", "if (between_->done()) gather();", ""),
)


def mutant(path: str, old: str, new: str) -> Mutant:
    """Makes one, of a text that must be in the file once."""
    text = (ROOT / path).read_text()
    if text.count(old) != 1:
        sys.exit(f"tests/prove/simulate.py: '{old}' is {text.count(old)} times in {path}")
    return Mutant(path, text.index(old), old, new)


def notices(change: Mutant, number: int, seeds: int) -> str:
    """What the simulation says of a mutant; "" if it notices nothing."""
    original_build = Build(BUILD)
    folder = BUILD / "simulated" / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    original = original_build.compiled(change, PROGRAM, folder)
    if not original:
        sys.exit(f"{change} is no program")
    original_build.link(PROGRAM, original, folder)
    program = folder / pathlib.Path(PROGRAM).name
    command = [str(program), "0", str(seeds), str(os.cpu_count())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as simulation:
        assert simulation.stdout is not None
        said = next((line for line in simulation.stdout if line.startswith("FAILED")), "")
        simulation.terminate()
    program.unlink()
    return said.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--mutants", action="store_true", help="seeds: of each mutant")
    arguments = parser.parse_args()
    build(pathlib.Path(PROGRAM).name)
    if not arguments.mutants:
        ranks = 10_000 if arguments.seeds >= 100_000 else 2500  # 11 GB, or 1
        # Of small pieces: with larger pages it takes two thirds of the time.
        larger_pages = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        subprocess.run([str(BUILD / PROGRAM), "count", str(ranks)], check=True, env=larger_pages)
        numbers = [arguments.first, arguments.seeds, os.cpu_count()]
        os.execv(BUILD / PROGRAM, [str(BUILD / PROGRAM), *map(str, numbers)])
    survivors = 0
    for number, change in enumerate(mutant(*row) for row in MUTANTS):
        said = notices(change, number, arguments.seeds)
        survivors += not said
        print(f"{change}: {said or 'SURVIVES'}", flush=True)
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} mutants are noticed")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
