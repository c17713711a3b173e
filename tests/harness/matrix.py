"""A pytest plugin that writes what was compared with one process as a table.

``-p tests.harness.matrix --matrix FILE``; docs/matrix.md (optimizers and options, on 2 ranks) and
docs/combinations.md (features in combination, on 3 ranks) are such files, and test_parallel.py sees
that they stay true.
"""

import pathlib
import re

import hvd_keras as hvd

_CELL = re.compile(r"::test_every_optimizer_with_every_option\[(\w+)-(\w+)\]$")
_INTRODUCTION = """\
# What was compared with one process

Written by the tests. For each optimizer of Keras and each option that all of them have: two ranks
with a batch of 4 each and one process with a batch of 8 train the same model for 12 steps. "=": the
weights are equal to rounding (absolute 1e-4, relative 1e-4) and have moved, and both ranks' are
equal bit for bit. `tests/parallel/test_training.py` has these and more: sparse gradients,
schedules, wrapped and combined optimizers, users' own.

"""
_COMBINATION = re.compile(r"::test_features_in_combination\[(.+)\]$")
_COMBINATIONS = """\
# Features in combination

Written by the tests. Three ranks train with all features of a row at once, and so does one process
with the whole batch; "=": the weights are equal to rounding (absolute 1e-5, relative 1e-4) and have
moved, and those that the ranks share are equal bit for bit. Any two values of two columns meet in
some row. "A set" is a process set beside another rank; a "local" layer belongs to one rank alone
(`hvd.PartialDistributedOptimizer`); "many" callbacks are metrics, early stopping, NaN check, CSV
file and checkpoint; "unbuilt" models have no variables before `fit`; "interrupted" ones go on from
`hvd.callbacks.Checkpoint`.

"refused": `backward_passes_per_step` with a `MultiOptimizer` is an error, for its parts update by
themselves. Give each part `gradient_accumulation_steps` instead.

"""
_outcomes: dict[tuple[str, str], str] = {}
_combinations: list[list[str]] = []


def pytest_addoption(parser) -> None:
    parser.addoption("--matrix", type=pathlib.Path, help="write the table of optimizers here")


def pytest_runtest_logreport(report) -> None:
    cell = _CELL.search(report.nodeid)
    if cell and report.when == "call":
        _outcomes[cell[1], cell[2]] = "=" if report.passed else report.outcome
    row = _COMBINATION.search(report.nodeid)
    if row and report.when == "call":
        values = row[1].split(", ")
        equal = "refused" if {"2 steps", "MultiOptimizer"} <= set(values) else "="
        _combinations.append([*values, equal if report.passed else report.outcome])


def pytest_sessionfinish(session) -> None:
    if session.config.option.matrix and hvd.rank() == 0:
        text = _INTRODUCTION + _table() if _outcomes else _COMBINATIONS + _combination_table()
        session.config.option.matrix.write_text(text)


def _table() -> str:
    optimizers = sorted({optimizer for optimizer, _ in _outcomes})
    options = list(dict.fromkeys(option for _, option in _outcomes))
    rows = [["", *options], ["---"] + [":-:"] * len(options)]
    rows += [[name] + [_outcomes.get((name, o), "") for o in options] for name in optimizers]
    return _markdown(rows)


def _combination_table() -> str:
    from tests.parallel.test_combinations import FEATURES

    head = [[*FEATURES, ""], ["---"] * len(FEATURES) + [":-:"]]
    return _markdown(head + _combinations)


def _markdown(rows: list[list[str]]) -> str:
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)
