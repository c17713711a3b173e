"""A pytest plugin that writes a table of the comparisons with one process.

Use: ``-p tests.harness.matrix --matrix FILE``. It writes docs/tables/matrix.md (optimizers and
options, on 2 ranks) and docs/tables/combinations.md (features in combination, on 3 ranks).
test_parallel.py checks that these files match what the tests write.
"""

import pathlib
import re

import hvd_keras as hvd

_CELL = re.compile(r"::test_every_optimizer_with_every_option\[(\w+)-(\w+)\]$")
_INTRODUCTION = """\
# Optimizers compared with one process

This table shows that two ranks train as one process does, for each optimizer of Keras and each
option that all of them have. Two ranks with a batch of 4 each and one process with a batch of 8
train the same model for 12 steps. "=": the final weights are equal to rounding (absolute 1e-4,
relative 1e-4), they have changed in training, and both ranks' weights are equal bit for bit.

The tests write this page. `tests/parallel/test_training.py` also covers sparse gradients,
schedules, wrapped and combined optimizers, and optimizers of the user's own.

"""
_SHARES = re.compile(r"::test_shares_of_every_optimizer_with_every_option\[(\w+)-(\w+)\]$")
_ABOUT_SHARES = """
## State in shares

The same for `hvd.DistributedOptimizer(optimizer, shard_state=True)`, compared with a training
without, on two ranks. "≡": the final weights are equal bit for bit. "refused": an error on every
rank, because Adafactor's slots are rows and columns, which are small already, and those of
ScheduleFreeAdamW begin as copies of the weights. `tests/parallel/test_shard_state.py` also covers
compression, sparse gradients, loss scaling, process sets, XLA, and what else is refused.

"""
_COMBINATION = re.compile(r"::test_features_in_combination\[(.+)\]$")
_COMBINATIONS = """\
# Features in combination

This table shows that features of hvd_keras work together. For each row, three ranks train with all
features of that row, and one process trains with the whole batch. "=": the final weights are equal
to rounding (absolute 1e-5, relative 1e-4), they have changed in training, and the weights that the
ranks share are equal bit for bit. Each pair of values of two columns occurs in at least one row.

| value | meaning |
| --- | --- |
| a set | a process set of two ranks, beside the third rank |
| one local | a layer that belongs to one rank alone (`hvd.PartialDistributedOptimizer`) |
| many | callbacks: metrics, early stopping, NaN check, CSV file and checkpoint |
| unbuilt | the model has no variables before `fit` |
| interrupted | training continues from `hvd.callbacks.Checkpoint` |
| refused | an error, see below |

`backward_passes_per_step` with a `MultiOptimizer` is an error, because its parts update
independently. Give each part `gradient_accumulation_steps` instead.

The tests write this page (`tests/parallel/test_combinations.py`).

"""
_shares: dict[tuple[str, str], str] = {}
_outcomes: dict[tuple[str, str], str] = {}
_combinations: list[list[str]] = []


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
    row = _COMBINATION.search(report.nodeid)
    if row and report.when == "call":
        values = row[1].split(", ")
        equal = "refused" if {"2 steps", "MultiOptimizer"} <= set(values) else "="
        _combinations.append([*values, equal if report.passed else report.outcome])


def pytest_sessionfinish(session) -> None:
    if session.config.option.matrix and hvd.rank() == 0:
        text = _COMBINATIONS + _combination_table()
        if _outcomes:
            text = _INTRODUCTION + _table(_outcomes) + _ABOUT_SHARES + _table(_shares)
        session.config.option.matrix.write_text(text)


def _table(outcomes: dict[tuple[str, str], str]) -> str:
    optimizers = sorted({optimizer for optimizer, _ in outcomes})
    options = list(dict.fromkeys(option for _, option in outcomes))
    rows = [["", *options], ["---"] + [":-:"] * len(options)]
    rows += [[name] + [outcomes.get((name, o), "") for o in options] for name in optimizers]
    return _markdown(rows)


def _combination_table() -> str:
    from tests.parallel.test_combinations import FEATURES

    head = [[*FEATURES, ""], ["---"] * len(FEATURES) + [":-:"]]
    return _markdown(head + _combinations)


def _markdown(rows: list[list[str]]) -> str:
    return "".join("|" + "|".join(row) + "|\n" for row in rows)
