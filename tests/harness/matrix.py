"""A pytest plugin that writes a table of the comparisons with one process.

Use: ``-p tests.harness.matrix --matrix FILE``. It writes docs/tables/matrix.md (optimizers and
options, on 2 ranks). tests/plugin checks that this file matches what the tests write.
"""

import pathlib
import re

import hvd_keras as hvd

_CELL = re.compile(r"::test_every_optimizer_with_every_option\[(\w+)-(\w+)\]$")
_INTRODUCTION = """\
# Optimizers compared with one process

Two ranks with a batch of 4 each and one process with a batch of 8 train the same model for 12
steps, with each optimizer of Keras and each option that all of them have. "=": the final weights
have changed, are equal to rounding (absolute 1e-4, relative 1e-4), and on both ranks bit for bit.

The tests write this page, and cover sparse gradients, schedules, and wrapped, combined and custom
optimizers.

"""
_SHARES = re.compile(r"::test_shares_of_every_optimizer_with_every_option\[(\w+)-(\w+)\]$")
_ABOUT_SHARES = """
## State in shares

Two ranks train with `shard_state=True` and without. "≡": the final weights are equal bit for bit.
"refused": an error on every rank, because Adafactor's slots are small already (rows and columns),
and those of ScheduleFreeAdamW begin as copies of the weights. The tests also cover compression,
sparse gradients, loss scaling, process sets and XLA.

"""
_shares: dict[tuple[str, str], str] = {}
_outcomes: dict[tuple[str, str], str] = {}


def pytest_addoption(parser) -> None:
    parser.addoption("--matrix", type=pathlib.Path, help="write the table of optimizers here")


def pytest_runtest_logreport(report) -> None:
    cell = _CELL.search(report.nodeid)
    if cell and report.when == "call":
        _outcomes[cell[1], cell[2]] = "=" if report.passed else report.outcome
    share = _SHARES.search(report.nodeid)
    if share and report.when == "call":
        refused = share[1] in ("Adafactor", "ScheduleFreeAdamW")
        expected = "refused" if refused else "≡"
        _shares[share[1], share[2]] = expected if report.passed else report.outcome


def pytest_sessionfinish(session) -> None:
    if session.config.option.matrix and hvd.rank() == 0:
        text = _INTRODUCTION + _table(_outcomes) + _ABOUT_SHARES + _table(_shares)
        session.config.option.matrix.write_text(text)


def _table(outcomes: dict[tuple[str, str], str]) -> str:
    optimizers = sorted({optimizer for optimizer, _ in outcomes})
    options = list(dict.fromkeys(option for _, option in outcomes))
    rows = [["", *options], ["---"] + [":-:"] * len(options)]
    rows += [[name] + [outcomes.get((name, o), "") for o in options] for name in optimizers]
    return _markdown(rows)


def _markdown(rows: list[list[str]]) -> str:
    return "".join("|" + "|".join(row) + "|\n" for row in rows)
