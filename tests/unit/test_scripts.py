"""Ordinary scripts, run as users run them: those marked fast. `make scripts` runs all."""

import textwrap

import pytest

from tests.scripts import driver

FAST = [script for script in driver.scripts() if script.fast]

# Without TensorFlow: what a script declares, what it does, and what the driver must report.
PRELUDE = """
import os, sys
import numpy as np
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))
def save(*arrays):
    np.savez(f"{os.environ['RESULT']}/{rank}", *arrays)
"""
CASES = {
    "good": ("equal", "save([1.0], [2.0])", None),
    "ranks": ("differ-ok", "save([1.0 + rank * 1e-7])", "the ranks differ"),
    "size": ("equal", "save([1.0 + size * 1e-3])", "differ from one process by 0.001"),
    "other-size": ("differ-ok", "save([1.0 + size * 1e-3])", None),
    "nan": ("equal", "save([np.nan])", "not finite"),
    "no-result": ("equal", "rank == 1 or save([1.0])", "results of 1 ranks alone, of 1 of 2"),
    "raises": ("equal", "save([1.0]); assert rank == 0", "2 ranks: exit status"),
    "caught": ("equal", "save([1.0]); sys.stderr.write('Traceback (most recent call last)')",
               "alone: exit status 0"),
    "noisy": ("equal", "save([1.0]); sys.stderr.write('hvd_keras: look')", "on stderr"),
    "no-error": ('error "look"', "save([1.0])", "exit status 0, expected an error"),
    "error": ('error "look"', "save([1.0]); assert size == 1, 'look'", None),
    "other-error": ('error "look"', "save([1.0]); assert size == 1, 'no'", "expected an error"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_driver_finds(name: str, tmp_path) -> None:
    expect, body, problem = CASES[name]
    path = tmp_path / f"{name}.py"
    path.write_text(f'"""A script.\n\nexpect: {expect}\n"""\n{PRELUDE}{textwrap.dedent(body)}\n')
    found = "\n".join(driver.Script(path).problems())
    assert problem in found if problem else not found


@pytest.mark.cases(1)
@pytest.mark.parametrize("script", FAST, ids=lambda script: script.name)
def test_script(script: driver.Script) -> None:
    assert script.missing() == []
    assert "\n".join(script.problems()) == ""
