"""One rank fails in every way that a process can: the job ends, says why, and leaves nothing.

Three ranks reduce in a loop. Rank 1 fails at step 20, after the first requests, which have a longer
deadline (docs/protocol.md).
"""

import dataclasses
import os
import re
import sys
import textwrap

import pytest

from tests.harness import ranks
from tests.harness.launcher import Launcher

SIZE = 3
DEADLINE = 2  # seconds
SETTINGS = {"HVD_TIMEOUT_SECONDS": str(DEADLINE), "HVD_STALL_WARNING_SECONDS": "1"}

# A row defines fault(), which rank 1 calls at step 20, or step().
HEAD = """
import os, pathlib, resource, signal, sys, time
import tensorflow as tf
import hvd_keras as hvd
hvd.init()
here = pathlib.Path(__file__).parent

def fault():
    pass

def step(i):
    hvd.allreduce(tf.ones(4), name="gradient")

def fails(i):
    return hvd.rank() == 1 and i == 20

"""
LOOP = """
for i in range(40):
    if i == 20:
        (here / f"maps-{hvd.rank()}").write_text(pathlib.Path("/proc/self/maps").read_text())
        hvd.barrier()
    if fails(i):
        (here / "fault").touch()
        fault()
    step(i)
"""


@dataclasses.dataclass
class Row:
    """A fault and its consequences.

    ``heard`` is what ranks 0 and 2 must print, ``summary`` a line that names the culprit (both are
    regular expressions). A ``status`` of None means any except 0. ``line`` is the line of the
    script that the postmortem must name: of a process that ends without a word, its last call.
    """

    code: str
    status: int | None = None
    summary: str = ""
    heard: str = ""
    line: str = "hvd.barrier()"


KILLED = r"killed by SIGKILL \(out of memory\? see dmesg\)"


def first(end: str) -> str:
    return f"hvdrun: rank 1 failed first: {end}$"


EARLY = r"hvdrun: rank 1 exited \(status 0\) while the others were still running$"
IN_VAIN = (
    r"hvdrun: ranks? [02, ]+ timed out waiting for another rank; the error above names that rank$"
)
MISSING = r"rank [02] waits for allreduce 'gradient', which rank 1 \(on .*\) has not submitted"

ROWS = {
    "SIGKILL": Row("def fault(): os.kill(os.getpid(), signal.SIGKILL)", 137, first(KILLED)),
    "SIGSEGV": Row(
        "hvd.shutdown()\nhvd.init()\ndef fault(): os.kill(os.getpid(), signal.SIGSEGV)",
        139,
        first("killed by SIGSEGV"),
        line="signal.SIGSEGV)",
    ),
    "SIGTERM": Row(
        "def fault(): os.kill(os.getpid(), signal.SIGTERM)",
        143,
        first("killed by SIGTERM"),
        line="signal.SIGTERM)",
    ),
    "exception": Row(
        "def fault(): raise RuntimeError('bad luck')",
        1,
        first("exit status 1"),
        "AbortedError: .*rank 1 has left the job: RuntimeError: bad luck",
        line="raise RuntimeError",
    ),
    "an exception that cannot be shown": Row(
        """
        class Bad(Exception):
            def __str__(self):
                raise ValueError

        def fault():
            sys.stdout = sys.stderr = None
            raise Bad
        """,
        1,
        first("exit status 1"),
        "AbortedError: .*rank 1 has left the job: Bad",
        line="raise Bad",
    ),
    "an exception of which only a library's hook hears": Row(
        r"""
        def fault():
            sys.excepthook = lambda kind, value, trace: print(ascii(value), file=sys.stderr)
            raise RuntimeError("no picture: x\udce9")
        """,
        1,
        first("exit status 1"),
        r"AbortedError: .*rank 1 has left the job: RuntimeError: no picture: x\\udce9",
        line="raise RuntimeError",
    ),
    "MemoryError": Row(
        """
        hoard = []
        def fault():
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
            while True:
                hoard.append(bytearray(1 << 18))
        """,
        1,
        first("exit status 1"),
        "AbortedError: .*rank 1 has left the job: MemoryError",
        line="hoard.append",
    ),
    "sys.exit(0)": Row(
        "def fault(): sys.exit(0)",
        None,
        EARLY,
        "AbortedError: .*rank 1 has left the job: its script has ended",
    ),
    "sys.exit(3)": Row(
        "def fault(): sys.exit(3)",
        3,
        first("exit status 3"),
        "AbortedError: .*rank 1 has left the job: SystemExit: 3",
    ),
    "sys.exit(text)": Row(
        "def fault(): sys.exit('no rows\\nhere')",
        1,
        first("exit status 1"),
        r"AbortedError: .*rank 1 has left the job: SystemExit: no rows \(on",
    ),
    "os._exit(0)": Row("def fault(): os._exit(0)", 1, EARLY),
    "os._exit(3)": Row("def fault(): os._exit(3)", 3, first("exit status 3")),
    "MPI_Abort": Row(
        """
        def fault():
            from mpi4py import MPI
            MPI.COMM_WORLD.Abort(5)
        """,
        5,
        first("exit status 5"),
    ),
    # Rank 2 waits for rank 0, too, which waits for rank 1.
    "SIGSTOP": Row(
        """
        pair = hvd.add_process_set([0, 1])

        def step(i):
            if hvd.rank() < 2:
                hvd.allreduce(tf.ones(4), name="gradient", process_set=pair)
            hvd.barrier()

        def fault(): os.kill(os.getpid(), signal.SIGSTOP)
        """,
        75,
        IN_VAIN,
        heard=r"DeadlineExceededError: .*rank [02] waits for .* rank 1 \(on .*\) has not submitted",
        line="signal.SIGSTOP)",
    ),
    "sleep": Row(
        "def fault(): time.sleep(1000)",
        75,
        IN_VAIN,
        heard="DeadlineExceededError: .*" + MISSING,
        line="time.sleep(1000)",
    ),
    "skips one": Row(
        """
        def step(i):
            if not fails(i):
                hvd.allreduce(tf.ones(4), name=f"gradient {i}")
        """,
        heard="rank 1 has submitted: allreduce 'gradient 21'",
        line='name=f"gradient {i}")',
    ),
    # Later steps look alike, so the ranks notice only when one of them has no more steps.
    "skips one of many with one name": Row(
        """
        def step(i):
            if not fails(i):
                hvd.allreduce(tf.ones(4), name="gradient")
        """,
        heard="AbortedError: .*rank 1 has left the job: its script has ended",
        line='hvd.allreduce(tf.ones(4), name="gradient")',
    ),
    # Another thread might submit what the others wait for, so only the deadline helps.
    "broadcast against allreduce": Row(
        """
        def step(i):
            if fails(i):
                hvd.broadcast(tf.ones(4), 0, name="gradient")
            else:
                hvd.allreduce(tf.ones(4), name="gradient")
        """,
        heard="rank 1 has submitted: broadcast 'gradient'",
        line="hvd.broadcast(",
    ),
}

# Ranks that differ get an error, after which work continues; nobody catches the last one.
DIFFERENT = """
def differ(mine, other, *texts):
    try:
        (other if hvd.rank() == 1 else mine)()
    except tf.errors.FailedPreconditionError as error:
        for text in [*texts, *(f"rank {rank}: " for rank in range(hvd.size()))]:
            assert text in str(error), error
    else:
        raise SystemExit("no error")
    total = hvd.allreduce([hvd.rank() + 1], op=hvd.Sum, name="gradient")
    assert total == [6], total

def reduce(x, op=hvd.Sum):
    return lambda: hvd.allreduce(x, op=op, name="gradient")

def step(i):
    hvd.allreduce(tf.ones(4), name="gradient")
    if i == 20:
        four = tf.ones(4)
        differ(reduce(four), reduce(tf.ones(5)), "float32[4]", "float32[5]")
        differ(reduce(four), reduce(tf.ones(4, tf.int32)), "float32[4]", "int32[4]")
        differ(reduce(four), reduce(four, hvd.Max), "op=Sum", "op=Max")
        reduce(tf.ones(1000 if hvd.rank() == 1 else 500))()
"""
ROWS["different counts"] = Row(
    DIFFERENT,
    1,
    "hvdrun: rank [012] failed first: exit status 1$",
    r"rank 1: .*float32\[1000\]",
    line="return lambda: hvd.allreduce(",
)


def script(code: str) -> str:
    return HEAD + textwrap.dedent(code) + LOOP


def check(launcher: Launcher, output: str) -> None:
    """The fault took place, the job ended by itself, and its shared memory is gone.

    Without the short deadline of SETTINGS the job would outlast the limit of the launcher.
    """
    assert (launcher.folder / "fault").exists(), output
    maps = "\n".join(path.read_text() for path in launcher.folder.glob("maps-*"))
    shared = set(re.findall(r"/dev/shm/\S+", maps))
    assert shared, "the ranks of a host share memory; this test no longer finds it"
    assert [path for path in shared if os.path.exists(path)] == []


def check_row(launcher: Launcher, row: Row) -> None:
    job = ("-np", str(SIZE), "--oversubscribe", "--postmortem", "postmortem", sys.executable)
    path = launcher.script(script(row.code))
    done = launcher.run(*job, path, env=launcher.environment | SETTINGS)
    check(launcher, done.stderr)
    assert done.returncode != 0
    assert row.status in (None, done.returncode), done.stderr
    assert re.search(row.summary, done.stderr, re.MULTILINE), done.stderr
    assert re.search(row.heard, done.stderr), done.stderr
    for rank in (0, 2):
        lines = [line for line in done.stderr.splitlines() if line.startswith(f"[{rank}]")]
        heard = rf"{row.heard}|Error, as on rank {2 - rank} "  # if both have the same error
        assert re.search(heard, "\n".join(lines)), done.stderr
        # The culprit's traceback says more, if it has one.
        if row.heard.startswith("AbortedError") and "its script has ended" not in row.heard:
            assert "Traceback" not in "\n".join(lines)
    where = r"^hvdrun: postmortem: rank 1 .*\n  rank 1 (?:was|last called hvd_keras) at (.*)$"
    told = re.search(where, done.stderr, re.MULTILINE)
    assert told, done.stderr
    assert told[1].startswith(f"{path}:"), told[1]
    assert row.line in told[1]


# The ranks hear of an end, or wait in vain: those of these rows end as those of the others do.
SLOW = [
    *("SIGKILL", "sys.exit(0)", "os._exit(0)", "sleep"),
    *("broadcast against allreduce", "different counts"),
    *("SIGSEGV", "SIGTERM", "an exception that cannot be shown", "MemoryError"),
    *("sys.exit(3)", "os._exit(3)"),
    *("skips one", "skips one of many with one name"),
]


@pytest.mark.parametrize(
    "name", [pytest.param(row, marks=[pytest.mark.slow] * (row in SLOW)) for row in ROWS]
)
def test_under_hvdrun(hvdrun: Launcher, name: str) -> None:
    check_row(hvdrun, ROWS[name])


@pytest.mark.parametrize("name", ["SIGSTOP", pytest.param("sleep", marks=pytest.mark.slow)])
def test_a_hang_ends_under_plain_mpirun(hvdrun: Launcher, name: str) -> None:
    """Without hvdrun nobody watches: the surviving ranks must end the job."""
    job = ranks.run_script(hvdrun.folder, SIZE, script(ROWS[name].code), timeout=900, **SETTINGS)
    check(hvdrun, job.output)
    assert job.status != 0, job.output
    assert re.search(MISSING, job.output), job.output


def test_a_forked_child_is_no_rank(hvdrun: Launcher) -> None:
    """A child process: neither its exit nor its exception ends the job or waits for the ranks."""
    code = """
        def step(i):
            if i == 20:
                for end in (lambda: sys.exit(hvd.shutdown()), lambda: 1 / 0):
                    child = os.fork()
                    if child == 0:
                        end()
                    os.waitpid(child, 0)
                assert os.path.exists(f"{os.environ['HVD_POSTMORTEM']}/rank-{hvd.rank()}.requests")
            hvd.allreduce(tf.ones(4), name="gradient")
        """
    env = hvdrun.environment | SETTINGS | {"HVD_POSTMORTEM": str(hvdrun.folder / "postmortem")}
    done = hvdrun.python(2, script(code), env=env, status=0)
    assert done.stderr.count("ZeroDivisionError") == 2


# Ranks that wait inside MPI, where no error can reach the script.
INSIDE_MPI = {
    "MPI_Init": (
        """
        rank = find_rank(os.environ)
        (here / f"here-{rank}").touch()
        if rank == 1:
            stop()
        while not (here / "here-0").exists() or not (here / "here-2").exists():
            time.sleep(0.1)
        hvd.init()
        """,
        r"rank 1 has not called hvd.init\(\)$",
        "hvd.init() waits for another rank",
    ),
    "MPI_Init, which all have reached": (
        """
        import tensorflow
        rank = find_rank(os.environ)
        (here / f"here-{rank}").touch()
        while len(list(here.glob("here-*"))) < 3:
            time.sleep(0.1)
        if rank == 1:
            libraries.core().hvd_init = lambda *_: stop()
        hvd.init()
        """,
        r"rank 1 has not returned from hvd.init\(\)$",
        "hvd.init() waits for another rank",
    ),
    "MPI_Finalize": (
        """
        hvd.init()
        if hvd.rank() == 1:
            libraries.core().hvd_finalize = lambda _: stop()
        """,
        "rank 1 has not returned from MPI_Finalize$",
        "MPI_Finalize waits for another rank",
    ),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("call", INSIDE_MPI)
def test_a_rank_stops_while_the_others_are_inside_mpi(hvdrun: Launcher, call: str) -> None:
    code, summary, heard = INSIDE_MPI[call]
    head = """
import os, pathlib, signal, time
import hvd_keras as hvd
from hvd_keras.runtime import libraries
from hvd_keras.launch.onhost.worker import find_rank
here = pathlib.Path(__file__).parent

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

"""
    # In the last case the ranks do not wait for each other's imports, which take seconds.
    first = {"HVD_FIRST_TIMEOUT_SECONDS": str(DEADLINE)} if call != "MPI_Finalize" else {}
    done = hvdrun.python(
        SIZE, head + textwrap.dedent(code), env=hvdrun.environment | SETTINGS | first
    )
    assert done.returncode == 75, done.stderr
    assert re.search("timed out waiting for another rank; " + summary, done.stderr, re.MULTILINE)
    assert f"hvd_keras WARNING: no progress for 1 s: {heard}" in re.sub(
        " rank .:", ":", done.stderr
    )
    assert f"hvd_keras ERROR: no progress for 2 s: {heard}" in re.sub(" rank .:", ":", done.stderr)


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ("barrier", "rank 0 has left the job: its script has ended, and waits for rank 1 "),
        ("shutdown", "MPI_Finalize waits for another rank"),
    ],
)
def test_a_rank_that_goes_on_after_the_others_have_ended_is_named(hvdrun, last, told) -> None:
    text = f"""
        import time
        import hvd_keras as hvd
        hvd.init()
        seconds = 5 * hvd.rank()  # longer than the deadline, which is for collectives
        hvd.{last}()
        time.sleep(seconds)
        """
    done = hvdrun.python(2, text, env=hvdrun.environment | SETTINGS, status=0)
    assert re.search(rf"no progress for \d s: {told}", done.stderr), done.stderr
    assert "the job ends" not in done.stderr


def test_an_error_before_another_init_ends_the_job(hvdrun: Launcher) -> None:
    text = """
        import hvd_keras as hvd
        hvd.init()
        rank = hvd.rank()
        hvd.shutdown()
        if rank == 1:
            raise ValueError("between two jobs")
        hvd.init()
        """
    done = hvdrun.python(2, text, env=hvdrun.environment | SETTINGS)
    assert "rank 1 failed first: exit status 1" in done.stderr, done.stderr
