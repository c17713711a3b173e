"""A pytest plugin that writes the optimizers and options that were tested as a table.

``-p tests.harness.matrix --matrix FILE``; docs/matrix.md is such a file, and test_parallel.py sees
that it stays true.
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
_outcomes: dict[tuple[str, str], str] = {}


def pytest_addoption(parser) -> None:
    parser.addoption("--matrix", type=pathlib.Path, help="write the table of optimizers here")


def pytest_runtest_logreport(report) -> None:
    cell = _CELL.search(report.nodeid)
    if cell and report.when == "call":
        _outcomes[cell[1], cell[2]] = "=" if report.passed else report.outcome


def pytest_sessionfinish(session) -> None:
    if session.config.option.matrix and hvd.rank() == 0:
        session.config.option.matrix.write_text(_INTRODUCTION + _table())


def _table() -> str:
    optimizers = sorted({optimizer for optimizer, _ in _outcomes})
    options = list(dict.fromkeys(option for _, option in _outcomes))
    rows = [["", *options], ["---"] + [":-:"] * len(options)]
    rows += [[name] + [_outcomes.get((name, o), "") for o in options] for name in optimizers]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)
