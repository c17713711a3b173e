"""Signals that hvdrun, its workers and scripts get."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from tests.harness.launcher import FOREVER, LIMIT, parent, send_signal, wait_until

NOTE_SIGNALS = """
    got = []
    signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    print("ready", flush=True)
    while not got: time.sleep(0.05)
    print("got it")
    """


def test_a_signal_of_the_users_reaches_the_scripts(hvdrun):
    process = hvdrun.start_ready(2, NOTE_SIGNALS)
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=LIMIT)
    assert (sorted(out.splitlines()), err, process.returncode) == (
        ["[0] got it", "[1] got it"],
        "",
        0,
    )


def test_a_signal_to_all_processes_of_the_job_ends_none(hvdrun):
    """SLURM sends it to those beside the scripts as well."""
    process = hvdrun.start_ready(2, NOTE_SIGNALS)
    for pid, line in hvdrun.processes().items():
        # Not mpirun, which passes it on: the second signal may meet a script that is ending.
        if "onhost.worker" in line and parent(pid) != process.pid:
            os.kill(pid, signal.SIGUSR1)
    assert process.wait(timeout=LIMIT) == 0, process.stderr.read()


def test_ranks_that_are_stopped_together_go_on(hvdrun):
    """For longer than a rank waits for others, as batch systems do with a job that they suspend."""
    hvdrun.environment["HVD_TIMEOUT_SECONDS"] = hvdrun.environment["HVD_FIRST_TIMEOUT_SECONDS"] = (
        "4"
    )
    process = hvdrun.start(
        2,
        """
        import hvd_keras as hvd
        hvd.init()
        hvd.allreduce([1.0])
        print("ready", os.getpid())
        while rank == 0 and not os.path.exists("go"): time.sleep(0.05)
        print(hvd.allreduce([rank + 1.0], op=hvd.Sum).numpy())
        """,
    )
    pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
    for number, seconds in (signal.SIGSTOP, 6), (signal.SIGCONT, 1):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(seconds)
    (hvdrun.folder / "go").touch()
    out, err = process.communicate(timeout=LIMIT)
    assert (sorted(out.splitlines()), process.returncode) == (["[0] [3.]", "[1] [3.]"], 0), err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_ranks(hvdrun, number):
    sleep = f"print('ready')\ntime.sleep({FOREVER})"
    process = hvdrun.start_ready(2, sleep, "--max-restarts", "1")
    assert len(hvdrun.processes()) > 2
    process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + number
    assert (out, err) == ("", f"hvdrun: {number.name} received; all ranks were ended\n")


@pytest.mark.parametrize("signalled", ["hvdrun", "workers"])
def test_a_rank_that_saves_its_work_has_time_for_it(hvdrun, signalled):
    """As when a batch system wants the host back."""
    text = f"""
        def save(*_):
            time.sleep({2 if signalled == "hvdrun" else "7 * rank"})
            open(f"saved-{{rank}}", "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("ready", flush=True)
        if {signalled == "workers"}:
            meet(2)
            os.kill(os.getppid(), signal.SIGTERM)
        time.sleep({FOREVER})
        """
    process = hvdrun.start_ready(2, text)
    if signalled == "hvdrun":
        process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=LIMIT) == (143 if signalled == "hvdrun" else 1)
    assert (hvdrun.folder / "saved-0").exists()
    assert (hvdrun.folder / "saved-1").exists()


def test_a_worker_that_is_asked_to_end_is_named(hvdrun):
    done = hvdrun.python(
        2, f"meet(2)\nif rank == 1: os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep({FOREVER})"
    )
    assert done.returncode == 143
    told = "hvdrun: rank 1 failed first: a signal that hvdrun did not send asked it to end\n"
    assert done.stderr.startswith(told)


def test_a_second_interrupt_does_not_wait(hvdrun):
    """Of two jobs whose mpirun does not react, the one that is interrupted twice ends first."""
    once, twice = (
        hvdrun.start_ready(1, f"print('ready')\ntime.sleep({FOREVER})") for _ in range(2)
    )
    for process in (once, twice):
        (mpirun_pid,) = (pid for pid in hvdrun.processes() if parent(pid) == process.pid)
        os.kill(mpirun_pid, signal.SIGSTOP)
        send_signal(process.pid, signal.SIGINT)
    assert twice.poll() is None
    twice.send_signal(signal.SIGINT)
    assert twice.wait(timeout=LIMIT) == 130
    assert once.poll() is None
    assert once.wait(timeout=LIMIT) == 130


def test_hvdruns_own_words_wait_for_no_reader(hvdrun):
    """Between two starts, too: only the first line, of the failure, has room in the pipe."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, bytes(4096 - 60))
    job = hvdrun.command("-np", "1", "--max-restarts", "1", "sh", "-c", "echo >> starts; exit 3")
    process = subprocess.Popen(job, cwd=hvdrun.folder, env=hvdrun.environment, stderr=writer)
    os.close(writer)
    starts = hvdrun.folder / "starts"
    wait_until(lambda: starts.exists() and starts.read_text() == "\n\n", "the restart")
    process.terminate()
    assert process.wait(timeout=LIMIT) in (3, 128 + signal.SIGTERM)
    os.close(reader)


def test_a_signal_between_two_starts(hvdrun):
    job = hvdrun.command("-np", "1", "--max-restarts", "9", "sh", "-c", "exit 3")
    process = subprocess.Popen(
        job, cwd=hvdrun.folder, env=hvdrun.environment, stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if "the next one comes in 8 s" in line:
            break
    else:
        pytest.fail("hvdrun has ended without a pause")
    process.terminate()
    _, told = process.communicate(timeout=LIMIT)
    assert process.returncode == 143
    assert "hvdrun: SIGTERM received before the restart\n" in told


def test_a_scripts_own_handler_outlives_shutdown(hvdrun):
    text = """
        import hvd_keras as hvd
        hvd.init()
        signal.signal(signal.SIGTERM, lambda *_: print("mine"))
        hvd.shutdown()
        os.kill(os.getpid(), signal.SIGTERM)
        """
    assert hvdrun.python(1, text).stdout == "[0] mine\n"


# A shell that starts a command in the background of its terminal, and later brings it to the front.
SHELL = """
import fcntl, os, signal, subprocess, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
process = subprocess.Popen(sys.argv[1:], preexec_fn=os.setpgrp)
while not os.path.exists("fg"): time.sleep(0.05)
os.tcsetpgrp(0, process.pid)
sys.exit(process.wait())
"""


def test_input_reaches_a_job_that_was_in_the_background(hvdrun):
    ours, theirs = pty.openpty()
    text = "if rank == 0:\n    open('asks', 'w').close()\n    print(input())"
    job = hvdrun.command("-np", "2", "--oversubscribe", sys.executable, hvdrun.script(text))
    shell = subprocess.Popen(
        [sys.executable, "-c", SHELL, *job],
        cwd=hvdrun.folder,
        env=hvdrun.environment,
        stdin=theirs,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until((hvdrun.folder / "asks").exists, "the start of rank 0")
    time.sleep(0.5)  # an end of the input would be there
    (hvdrun.folder / "fg").touch()
    os.write(ours, b"typed\n")
    out, _ = shell.communicate(timeout=LIMIT)
    assert (out, shell.returncode) == ("[0] typed\n", 0)
    os.close(ours)
    os.close(theirs)
