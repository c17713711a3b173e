"""hvd_keras.run: results, errors, and unauthenticated connections."""

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback

import pytest

import hvd_keras
from tests.harness.launcher import LIMIT, having, wait_until

ENGINE = ["--oversubscribe"]


def test_results_come_in_the_order_of_the_ranks(monkeypatch) -> None:
    offset, stdout = 10, io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stdout)

    def work(a, *, b):
        from hvd_keras.launch.onhost.worker import find_rank

        rank = find_rank(os.environ)
        print("at work ━", rank)
        return {"rank": rank, "sum": a + b + offset, "much": bytes(3_000_000 * rank)}

    results = hvd_keras.run(work, (1,), {"b": 2}, np=3, options=ENGINE)
    assert results == [
        {"rank": rank, "sum": 13, "much": bytes(3_000_000 * rank)} for rank in range(3)
    ]
    printed = stdout.buffer.getvalue().decode()
    expected = [rf"[{rank}] at work \u2501 {rank}" for rank in range(3)]
    assert sorted(printed.splitlines()) == expected


def test_functions_of_the_main_program(tmp_path) -> None:
    """A notebook's are such; and those of a module beside it, not of one where it was started."""
    script = """
import hvd_keras
from helpers import triple
def helper(x):
    return x * 2
def work(x):
    return helper(x)
if __name__ == "__main__":
    print(hvd_keras.run(work, (21,)), hvd_keras.run(triple, (21,)))
"""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/main.py").write_text(script)
    (tmp_path / "scripts/helpers.py").write_text("def triple(x):\n    return x * 3\n")
    (tmp_path / "helpers.py").touch()
    command = [sys.executable, "scripts/main.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert (done.stdout, done.stderr, done.returncode) == ("[42] [63]\n", "", 0)


def test_an_exception_of_a_rank_is_one_here(capfd) -> None:
    # Python shows equal frames once.
    functions = ["def f0(): raise KeyError('no such thing')"]
    functions += [f"def f{i + 1}(): f{i}()" for i in range(40)]

    def work():
        if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
            for step in range(40):  # a progress bar
                print(f"\rstep {step}", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
            names = {}
            exec("\n".join(functions), names)
            names["f40"]()
        threading.Event().wait()

    with pytest.raises(RuntimeError) as caught:
        hvd_keras.run(work, np=2, options=ENGINE)
    assert "\rstep 38\rstep 39\n" in capfd.readouterr().err
    assert re.match(
        r"hvd_keras.run: hvdrun: rank 1 failed first: exit status 1\n"
        r"Traceback(.*\n)*KeyError: 'no such thing'\nhvdrun",
        str(caught.value),
    )


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (sys.exit, r"rank 1 failed first(.|\n)*called sys\.exit\(\)"),
        (os._exit, r"the function ended its process(.|\n)*rank 1 fa"),
    ],
)
def test_a_function_that_exits_has_no_result(end, text: str) -> None:
    def work():
        from hvd_keras.launch.onhost.worker import find_rank

        if find_rank(os.environ) == 1:
            end(0)
        return "a result"

    with pytest.raises(RuntimeError, match=text):
        hvd_keras.run(work, np=3, options=ENGINE)


def test_an_exception_that_a_function_prints_is_why_it_exits() -> None:
    def work():
        hvd_keras.init()
        try:
            os.stat("/no/data")
        except OSError:
            traceback.print_exc()
            sys.exit(1)

    with pytest.raises(RuntimeError, match="No such file or directory: '/no/data'"):
        hvd_keras.run(work)


def test_results_are_those_of_the_last_start(tmp_path) -> None:
    """A rank may have returned before another one failed."""
    mark = tmp_path / "mark"

    def work():
        from hvd_keras.launch.onhost.worker import find_rank

        rank = find_rank(os.environ)
        start = "second" if mark.exists() else "first"
        if start == "first" and rank == 1:
            wait_until((tmp_path / "returns").exists, "the other rank")
            time.sleep(1)
            mark.touch()
            raise ValueError("not yet")
        (tmp_path / "returns").touch()
        return start, rank

    results = hvd_keras.run(work, options=[*ENGINE, "--max-restarts", "1", "-np", "2"])
    assert results == [("second", 0), ("second", 1)]


def test_the_job_ends_with_a_caller_that_is_killed(tmp_path) -> None:
    """As a notebook's kernel is."""
    code = "import pathlib, time; pathlib.Path('started').touch(); time.sleep(1000)"
    script = f"import hvd_keras; hvd_keras.run(exec, ({code!r},))"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    caller = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, env={**os.environ, "TMPDIR": str(temporary)}
    )
    mark = f"TMPDIR={temporary}"
    wait_until((tmp_path / "started").exists, "the start of the function")
    assert len(having(mark)) > 3
    caller.kill()
    caller.wait(timeout=LIMIT)
    wait_until(lambda: not having(mark), "the end of the job")
    assert list(temporary.iterdir()) == []


def test_a_function_that_ends_with_status_2_is_not_refused() -> None:
    """As argparse ends a program."""
    with pytest.raises(RuntimeError, match="rank 0 failed first: exit status 2"):
        hvd_keras.run(sys.exit, (2,))


def test_an_exception_of_the_caller_ends_a_job_that_ignores_interrupts(tmp_path) -> None:
    """As hvdrun does if a shell's script has started the caller in its background."""
    code = "import pathlib, time; pathlib.Path('started').touch(); time.sleep(1000)"
    script = f"""
import signal, hvd_keras
def end(*_):
    raise TimeoutError("enough")
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, end)
hvd_keras.run(exec, ({code!r},))
"""
    command = [sys.executable, "-c", script]
    caller = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_until((tmp_path / "started").exists, "the start of the function")
    caller.send_signal(signal.SIGUSR1)
    _, told = caller.communicate(timeout=LIMIT)
    assert told.splitlines()[-1] == "TimeoutError: enough"


def test_what_cannot_start_is_refused() -> None:
    with pytest.raises(ValueError, match="-np got 10000, but this process may use"):
        hvd_keras.run(print, np=10000)
    with pytest.raises(ValueError, match="-H got 'a;b'; expected a host name"):
        hvd_keras.run(print, hosts="a;b")
    with pytest.raises(TypeError, match=r"got '--stats -H a', .* \['--stats', '-H', 'a'\]"):
        hvd_keras.run(print, options="--stats -H a")
