"""What hvdrun says of errors of all ranks, and of what only rank 0 has."""

import re

import pytest

from tests.harness.launcher import LIMIT


@pytest.mark.parametrize("options", [(), ("--verbose",)])
def test_an_exception_of_all_ranks_is_printed_once(hvdrun, options) -> None:
    """Unless all tracebacks are wanted, or they differ."""
    text = """
        import hvd_keras as hvd
        hvd.linear_scaling
        meet(3)
        raise ValueError("oh" if rank < 2 else "no")
        """
    job = hvdrun.start(3, text, *options)
    _, told = job.communicate(timeout=LIMIT)
    assert job.returncode == 1
    printed = re.findall(r"^\[(\d)\] ValueError: (oh|no)$", told, re.MULTILINE)
    assert [text for _, text in printed].count("oh") == (2 if options else 1), told
    if not options:
        ((first, _),) = (one for one in printed if one[1] == "oh")
        same = f"[{1 - int(first)}] ValueError, as on rank {first} (hvdrun --verbose: where)\n"
        assert same in told
        summary = [line for line in told.splitlines() if line.startswith("hvdrun: rank")]
        if summary[0] == f"hvdrun: rank {first} failed first: exit status 1":
            assert f"hvdrun: rank {1 - int(first)}: failed in the same way" in summary


def test_input_of_another_rank_is_explained(hvdrun):
    done = hvdrun.python(2, "print('hello', input())\ntime.sleep(100)", input="you\n", status=1)
    assert "[1] EOFError: EOF when reading a line\n" in done.stderr
    assert "hvdrun: only rank 0 has standard input: read it there, and send it" in done.stderr
