"""Measures the cells of docs/tables/combinations.md, and writes the page.

    python -m tests.parallel.features.measure [--triples SECONDS] [--only TEXT] [--keep]

Jobs of several ranks measure one case after the other; a job that dies or hangs has failed in its
present case, and another one goes on with the next. TensorFlow is imported in these jobs only.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
import time

from tests.harness import ranks
from tests.parallel.features import table

PAGE = pathlib.Path("docs/tables/combinations.md")
RESULTS = pathlib.Path("build/combinations.jsonl")
# No case takes nearly as long; nor does the start of a job.
SECONDS = 600
# TensorFlow does not free all memory.
CASES_PER_JOB = 100


def outcome(case: table.Case, folder: pathlib.Path) -> tuple[str, str]:
    """Measures a case; to be called by all ranks."""
    import hvd_keras as hvd
    from tests.parallel.features import situations

    of = hvd.global_process_set
    if "process set" in case.features:
        of = hvd.add_process_set(range(hvd.size() - 1))
    try:
        return situations.outcome(case, of, folder) if of.included() else ("", "")
    finally:
        hvd.barrier()
        if of is not hvd.global_process_set:
            hvd.remove_process_set(of)


def verdict(case: table.Case, result: str, text: str) -> str:
    """What the page shows: the result; "failed" if an error has another text than expected."""
    rule = table.rule(case)
    return result if rule is None or rule.text in text else "failed"


def _inside(cases: list[table.Case], until: float) -> None:
    """The program of each rank."""
    import hvd_keras as hvd
    from hvd_keras.runtime import agree

    hvd.init()
    with RESULTS.open("a") as file:

        def write(*values: str) -> None:
            if hvd.rank() == 0:
                file.write(json.dumps(values) + "\n")
                file.flush()

        for case in cases:
            if agree.gather_json("time is over", time.time() > until)[0]:
                break
            write(str(case), "failed", "")
            with tempfile.TemporaryDirectory() as mine:
                folder = pathlib.Path(agree.gather_json("folder", mine)[0])
                began = time.time()
                result = outcome(case, folder)
                write(str(case), *result, f"{time.time() - began:.1f}")
                agree.gather_json("folder is no longer used", None)


def _results() -> dict[str, list[str]]:
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {name: values for name, *values in map(json.loads, lines)}


def _measure(cases: list[table.Case], until: float = float("inf")) -> None:
    """Starts jobs until all cases have a result, or the time is over."""
    for kind in sorted({(case.ranks, case.is_legacy) for case in cases}):
        left = [case for case in cases if (case.ranks, case.is_legacy) == kind]
        left.sort(key=lambda case: sorted(case.alone))  # what one process does is done once
        while left and time.time() < until:
            _run_job(*kind, left[:CASES_PER_JOB], until)
            done = _results()
            left = [case for case in left if str(case) not in done]


def _run_job(size: int, is_legacy: bool, cases: list[table.Case], until: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "cases"
        file.write_text(json.dumps([until, *map(dataclasses.astuple, cases)]))
        output = pathlib.Path(folder) / "output"
        command = (sys.executable, "-m", "tests.parallel.features.measure", "--inside", str(file))
        # Ranks that wait for different collectives get an error soon.
        env = {"HVD_MISMATCH_SECONDS": "5", "TF_USE_LEGACY_KERAS": str(int(is_legacy))}
        job = ranks.start(size, *command, output=output, env=env)
        try:
            seen, when = 0, time.time()
            while job.poll() is None and time.time() - when < SECONDS:
                time.sleep(0.2)
                now = RESULTS.stat().st_size if RESULTS.exists() else 0
                if now != seen:
                    seen, when = now, time.time()
        finally:
            ranks.end(job)
        if job.returncode:
            name, values = list(_results().items())[-1] if _results() else ("", [])
            sys.stderr.write(f"{name}: {values}\n{output.read_text(errors='replace')[-3000:]}\n")
            if not values:
                raise SystemExit("no case was measured")


def main() -> None:
    """Measures, and writes the page if all its cells are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inside", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="cases whose names have this text; no page")
    parser.add_argument("--keep", action="store_true", help="continue a measurement")
    parser.add_argument("--triples", type=float, default=0, help="seconds for cases of three")
    parser.add_argument("--seed", type=int, default=1, help="of the order of these")
    options = parser.parse_args()
    if options.inside:
        until, *cases = json.loads(options.inside.read_text())
        return _inside([table.Case(tuple(names), situation) for names, situation in cases], until)
    from tests import conftest  # noqa: F401 (one thread, and no GPU)

    RESULTS.parent.mkdir(exist_ok=True)
    before = _results() if options.keep else {}
    RESULTS.write_text("".join(f"{json.dumps([k, *v])}\n" for k, v in before.items()))
    every = [*table.pairs(), *(table.triples(options.seed) if options.triples else ())]
    cases = [case for case in every if options.only in str(case) and str(case) not in before]
    _measure([case for case in cases if case in table.pairs()])
    for size, share in ((2, 0.9), (3, 0.1)):
        some = [case for case in cases if case not in table.pairs() and case.ranks == size]
        _measure(some, time.time() + share * options.triples)
    results = _results()
    found = {case: results[str(case)] for case in every if str(case) in results}
    shown = {case: verdict(case, *values[:2]) for case, values in found.items()}
    wrong = [case for case, result in shown.items() if result != table.expected(case)]
    for case in wrong:
        print(f"{case}: {table.expected(case)} was expected, and the result is", *found[case][:2])
    triples = len(shown.keys() - set(table.pairs()))
    print(f"{len(shown) - triples} pairs, {triples} triples, {len(wrong)} not as expected")
    if not options.only:
        PAGE.write_text(table.page(shown))
    return sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
