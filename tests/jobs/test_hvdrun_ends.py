"""How jobs of hvdrun end: exit status, culprit, and nothing left behind."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading

import pytest

from hvd_keras.launch.onhost import sweep
from hvd_keras.runtime.settings import DESERTED
from tests.harness.launcher import FOREVER, LIMIT, parent, wait_until

# What hvdrun says of the others when rank 1 or 2 fails.
ENDED = "terminated by hvdrun because rank [12] failed"


def test_a_failing_rank_ends_the_others(hvdrun):
    done = hvdrun.python(2, f"meet(2)\nif rank == 0: time.sleep({FOREVER})\nsys.exit(3)", status=3)
    first, second = done.stderr.splitlines()
    assert first == "hvdrun: rank 1 failed first: exit status 3"
    assert re.fullmatch(f"hvdrun: rank 0: {ENDED}", second)


def test_a_killed_rank_is_named_with_its_signal(hvdrun):
    code = "print(rank)\nmeet(3)\nif rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
    done = hvdrun.python(3, f"{code}time.sleep({FOREVER})", status=128 + signal.SIGKILL)
    assert sorted(done.stdout.splitlines()) == ["[0] 0", "[1] 1", "[2] 2"]
    assert done.stderr.startswith(
        "hvdrun: rank 2 failed first: killed by SIGKILL (out of memory? see dmesg)\n"
    )
    assert len(re.findall(f"ranks? [01](, 1)?: {ENDED}", done.stderr)) in (1, 2)


def test_a_rank_that_left_early_is_no_culprit(hvdrun):
    done = hvdrun.python(
        2,
        """
        if rank == 0:
            open("pid", "w").write(str(os.getpid()))
            meet(2)
            os._exit(0)
        meet(2)
        while os.path.exists("/proc/" + open("pid").read()):
            time.sleep(0.02)
        sys.exit(4)
        """,
    )
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


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit('too few rows')"])
def test_an_exception_that_was_handled_is_not_why_a_rank_ended(hvdrun, end):
    text = f"""
        import logging
        import hvd_keras as hvd
        hvd.init()
        try: open("/no/cache")
        except OSError: logging.exception("going on without")
        print("and\\n" * 50, file=sys.stderr)
        {end}
        """
    assert hvdrun.python(1, text).stderr.count("Traceback") == 1


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


def test_a_worker_that_vanishes_is_reported(hvdrun):
    done = hvdrun.python(
        2, f"meet(2)\nif rank == 1: os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep({FOREVER})"
    )
    assert done.returncode not in (0, 2)
    assert "rank 1 failed first: killed before it could report\n" in done.stderr


def test_ranks_that_save_their_work_when_mpirun_dies_have_not_succeeded(hvdrun):
    """And a restart goes on from there."""
    text = """
        if os.path.exists("saved-0"):
            sys.exit(0)
        def save(*_):
            open(f"saved-{rank}", "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        meet(2)
        if rank == 0:
            worker = open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()
            os.kill(int(worker[1]), signal.SIGKILL)
        time.sleep(1000)
        """
    done = hvdrun.python(2, text)
    assert done.returncode not in (0, 2)
    assert "hvdrun: the job did not complete; mpirun ended with killed by SIGKILL" in done.stderr
    assert (hvdrun.folder / "saved-0").exists()
    for path in hvdrun.folder.glob("*-[01]"):
        path.unlink()
    restarts = ("--max-restarts", "1", "--oversubscribe", "-np", "2", sys.executable)
    done = hvdrun.run(*restarts, str(hvdrun.folder / "script.py"), status=0)
    assert "hvdrun: restart 1 of 1: 2 ranks on this host, " in done.stderr


@pytest.fixture
def in_memory():
    """A file of the user's in /dev/shm."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="train-") as file:
        file.write(bytes(4096))
        file.flush()
        yield file.name


def test_the_users_files_in_shared_memory_stay(hvdrun, in_memory):
    """A data set that a process of the job has mapped when it is ended."""
    daemon = f"""if True:
        import mmap, sys, time
        file = open({in_memory!r})
        data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        print("mapped", flush=True)
        time.sleep({FOREVER})"""
    text = f"""
        import subprocess
        command = [sys.executable, "-c", {daemon!r}]
        pipe = subprocess.PIPE
        subprocess.Popen(command, start_new_session=True, stdout=pipe).stdout.readline()
        """
    assert hvdrun.python(1, text).returncode == 0
    assert not [line for line in hvdrun.processes().values() if "mmap" in line]
    assert os.path.exists(in_memory)


def test_shared_memory_of_mpi_that_others_use_stays():
    """MPICH's, for example, of which one end is outside of the job."""
    path = f"/dev/shm/mpich_shm_{os.getpid()}"
    code = f"""if True:
        import mmap, sys, time
        file = open({path!r})
        data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        print("mapped", flush=True)
        time.sleep({FOREVER})"""
    with open(path, "wb") as file:
        file.write(bytes(4096))
    command = [sys.executable, "-c", code]
    marked = {**os.environ, "HVDRUN_JOB": f"test-{os.getpid()}"}
    mine, outside = (
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE) for env in (marked, os.environ)
    )
    try:
        for process in (mine, outside):
            process.stdout.readline()
        threading.Thread(target=mine.wait, daemon=True).start()  # no zombie
        assert sweep.sweep([marked["HVDRUN_JOB"]], 1.0) == []
        assert mine.wait(timeout=LIMIT) == -signal.SIGTERM
        assert os.path.exists(path)
    finally:
        outside.kill()
        outside.wait()
    assert sweep.sweep([], 0.0) == []
    wait_until(lambda: sweep.sweep([], 0.0) or not os.path.exists(path), "the end of the file")


# As many times the parent of a rank: its worker, mpirun, hvdrun.
KILLED = {"a rank": 0, "mpirun": 2, "hvdrun": 3}


@pytest.mark.parametrize("killed", KILLED)
def test_no_shared_memory_of_mpi_is_left(hvdrun, killed):
    pytest.importorskip("mpi4py")
    text = f"""
        import re
        from mpi4py import MPI
        MPI.COMM_WORLD.allreduce(rank)
        paths = re.findall(r"/dev/shm/\\S+", open("/proc/self/maps").read())
        print(*paths, file=open(f"paths-{{rank}}", "w"), flush=True)
        meet(2)
        if rank == 1:
            pid = os.getpid()
            for _ in range({KILLED[killed]}):
                pid = int(open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[1])
            os.kill(pid, signal.SIGKILL)
        time.sleep({FOREVER})
        """
    assert hvdrun.python(2, text).returncode != 0
    used = {
        path for rank in range(2) for path in (hvdrun.folder / f"paths-{rank}").read_text().split()
    }
    assert used
    if killed == "hvdrun":  # its workers end what is left
        wait_until(lambda: not hvdrun.processes(), "the end of the ranks")
    assert not [path for path in used if os.path.exists(path)]


def test_a_rank_that_ignores_requests_is_killed(hvdrun):
    text = f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep({FOREVER})
        """
    process = hvdrun.start_ready(2, text, "--stop-timeout", "1")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=LIMIT) == 143


def test_the_line_where_a_rank_hangs_is_named(hvdrun):
    text = f"""
        import hvd_keras as hvd
        hvd.init()
        for _ in range(20): hvd.barrier()
        if rank == 1:
            time.sleep({FOREVER})
        hvd.barrier()
        """
    limits = {"HVD_STALL_WARNING_SECONDS": "1", "HVD_TIMEOUT_SECONDS": "5"}
    done = hvdrun.python(2, text, env=hvdrun.environment | limits, status=75)
    warned = re.findall(
        r"no progress for (\d) s: .* \(the job ends in (\d) s\)$", done.stderr, re.M
    )
    assert len(warned) > 1
    assert {int(waited) + int(left) for waited, left in warned} <= {4, 5}
    *_, told, place = done.stderr.splitlines()
    assert told.startswith("hvdrun: postmortem: rank 1 made no further call while rank 0 waited")
    assert re.fullmatch(rf"  rank 1 was at .*script\.py:\d+, .*: time\.sleep\({FOREVER}\)", place)


def test_a_rank_that_ends_before_another_has_joined_ends_the_job(hvdrun):
    """MPI_Init would wait for it."""
    done = hvdrun.python(
        2, "if rank == 1: sys.exit(0)\nimport hvd_keras as hvd\nhvd.init()", timeout=LIMIT / 2
    )
    assert done.returncode != 0
    early = "hvdrun: rank 1 exited (status 0) while the others were still running\n"
    assert early in done.stderr


def test_a_ranks_reports_survive_the_removal_of_its_files(hvdrun):
    """As by systemd-tmpfiles, after ten days, or by a script that empties $TMPDIR.

    And what the rank has opened is closed at its end.
    """
    text = """
        import warnings
        import hvd_keras as hvd

        warnings.simplefilter("always", ResourceWarning)
        hvd.init()
        for folder, _, files in os.walk(os.path.dirname(os.environ["TMPDIR"])):
            if "/rank-" in folder:
                for file in files:
                    try:
                        os.unlink(os.path.join(folder, file))
                    except FileNotFoundError:  # the other rank was faster
                        pass
        """
    done = hvdrun.python(2, text)
    assert (done.returncode, done.stderr) == (0, "")


def test_output_of_what_a_rank_has_left_behind_does_not_keep_hvdrun(hvdrun):
    done = hvdrun.run("-np", "1", "sh", "-c", "echo mine; yes & exit 0")
    assert (done.returncode, done.stdout[:9]) == (0, "[0] mine\n")


def test_a_temporary_folder_of_any_name(hvdrun):
    folder = hvdrun.temporary / "a,b c"
    folder.mkdir()
    done = hvdrun.run("-np", "1", "echo", "x", env=hvdrun.environment | {"TMPDIR": str(folder)})
    assert (done.stdout, done.stderr, done.returncode) == ("[0] x\n", "", 0)
    folder.rmdir()


def test_temporary_files_of_killed_ranks_are_removed(hvdrun):
    text = """
        import tempfile
        tempfile.NamedTemporaryFile(delete=False)
        os._exit(3)
        """
    assert hvdrun.python(1, text).returncode == 3
    assert not list(hvdrun.temporary.iterdir())


@pytest.mark.parametrize("reaction", ["signal.SIG_DFL", "signal.SIG_IGN"])
def test_nothing_survives_a_killed_hvdrun(hvdrun, reaction):
    text = f"signal.signal(signal.SIGTERM, {reaction})\nprint('ready')\ntime.sleep({FOREVER})"
    process = hvdrun.start_ready(2, text)
    process.kill()
    process.wait(timeout=LIMIT)
    wait_until(lambda: not hvdrun.processes(), "the end of the ranks")
    assert not list(hvdrun.temporary.iterdir())


def test_nothing_survives_a_killed_hvdrun_whose_disk_is_full(hvdrun):
    disk = str(hvdrun.temporary)
    mount = ["mount", "-t", "tmpfs", "-o", "nr_inodes=100", "none", disk]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        daemon = f"import time; time.sleep({FOREVER})"
        text = f"""
            import subprocess
            subprocess.Popen([sys.executable, "-c", {daemon!r}], start_new_session=True)
            print("ready")
            time.sleep({FOREVER})
            """
        process = hvdrun.start_ready(2, text)
        with contextlib.suppress(OSError):
            for number in range(100):
                (hvdrun.temporary / f"other-{number}").touch()
        process.kill()
        process.wait(timeout=LIMIT)
        wait_until(lambda: not hvdrun.processes(), "the end of the ranks")
        assert not list(hvdrun.temporary.glob("hvdrun-*"))
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_the_command_dies_with_its_worker(hvdrun):
    process = hvdrun.start_ready(1, f"print('ready')\ntime.sleep({FOREVER})")
    own = r"\S+ -I -S \S+ launch.onhost.worker"
    (worker,) = (pid for pid, line in hvdrun.processes().items() if re.match(own, line))
    (command,) = (pid for pid in hvdrun.processes() if parent(pid) == worker)
    (mpirun_pid,) = (pid for pid in hvdrun.processes() if parent(pid) == process.pid)
    os.kill(mpirun_pid, signal.SIGSTOP)  # so that nobody else ends the command
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: command not in hvdrun.processes(), "the end of the command")
    os.kill(mpirun_pid, signal.SIGCONT)
    assert process.wait(timeout=LIMIT) not in (0, 2)


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


@pytest.mark.parametrize(("extra", "told"), [("--absent 1", "absent"), ("env -i", "got no rank")])
def test_an_error_of_mpirun_or_a_worker_is_shown_when_no_rank_started(hvdrun, extra, told):
    done = hvdrun.run("-np", "1", "--mpi-args", extra, sys.executable, "-c", "print(1)")
    assert done.returncode not in (0, 2)
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert "hvdrun: rank 0: did not start\n" in done.stderr


# The command line


def test_a_script_may_end_with_the_status_of_a_rank_that_follows_another(hvdrun) -> None:
    """75 is also EX_TEMPFAIL of sysexits.h, so the script may exit with it, too."""
    script = """
        import hvd_keras as hvd
        hvd.init()
        sys.exit(75 * hvd.rank())
    """
    done = hvdrun.python(2, script, status=75)
    assert "rank 1 failed first: exit status 75" in done.stderr


@pytest.mark.slow
def test_a_rank_that_left_keeps_its_status_if_it_ends_last(hvdrun) -> None:
    """The one that waited for it ends first; mpirun would then kill the one that is to blame."""
    script = """
        import atexit
        def linger():
            while not os.path.exists("here-0"):
                time.sleep(0.02)
            pid = int(open("pid-0").read())
            while os.path.exists(f"/proc/{pid}"):
                time.sleep(0.02)
            time.sleep(0.5)  # in which mpirun would kill this rank
            open("lingered", "w").close()
            os._exit(3)
        if rank == 1:
            atexit.register(linger)  # before hvd_keras, so that it runs after this rank has left
        import hvd_keras as hvd
        hvd.init()
        if rank == 1:
            sys.exit(3)
        open("pid-0", "w").write(str(os.getpid()))
        open("here-0", "w").close()
        hvd.allreduce(1.0, name="alone")
    """
    done = hvdrun.python(2, script, status=3)
    assert (hvdrun.folder / "lingered").exists()
    summary = [line for line in done.stderr.splitlines() if line.startswith("hvdrun: rank ")]
    assert summary == [
        "hvdrun: rank 1 failed first: exit status 3",
        f"hvdrun: rank 0: was waiting for a rank that left (exit status {DESERTED})",
    ]
