"""hvdrun on several hosts: the environment of the ranks, bad input, how a job ends."""

import json
import os
import re
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hvd_keras.launch.start.mpirun import find_mpirun
from tests.harness import cluster
from tests.harness.hosts import Hosts
from tests.harness.launcher import wait_until

# A rank without MPI.
WHO = """
import os, signal, socket, sys, time
from hvd_keras.launch.onhost.worker import find_rank
rank = find_rank(os.environ)
"""


def script(folder: Path, text: str) -> list[str]:
    path = folder / "script.py"
    path.write_text(WHO + textwrap.dedent(text))
    return [sys.executable, str(path)]


def clean(hosts: Hosts) -> None:
    """Asserts that no process or file is left on any host when hvdrun has ended."""
    assert [(host.name, host.processes(), host.leftovers()) for host in hosts] == [
        (host.name, {}, []) for host in hosts
    ]


def test_a_job_on_three_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """Host, arguments, input, settings and output of four ranks; none runs on hvdrun's host.

    Of two variables that the script names, one is passed.
    """
    code = """
        print(socket.gethostname(), ascii(sys.argv[1:]), repr(sys.stdin.read()))
        names = "OMP_NUM_THREADS", "MINE", "KMP_X", "TMPDIR"
        print(*map(os.environ.get, names), os.getcwd(), os.environ.get("YOURS"))
        print(sorted(name for name in os.environ if name.startswith("HVDRUN")), file=sys.stderr)
        print("x" * 300_000)
        """
    arguments = ["a b", "it's", 'say "x"', "", "$HOME", "*", ":", "-np", "new\nline", "ü;true"]
    options = [
        "--no-init",
        "-H",
        "server2:1,server3:2",
        "--env",
        "MINE",
        "--output-dir",
        "out",
        "--verbose",
    ]
    text = tmp_path / "text"
    text.write_text("some\ntext" * 20_000)
    with text.open() as stdin:
        done = cluster.run(
            hosts[0],
            *options,
            *script(tmp_path, code),
            *arguments,
            folder=tmp_path,
            stdin=stdin,
            env=cluster.environment(MINE="$(mine)", YOURS="1", OTHERS="1", KMP_X="7"),
        )
    assert done.returncode == 0, done.stderr
    clean(hosts)
    number = re.search(r"^HVDRUN_JOB=(\w+)$", done.stderr, re.MULTILINE)[1]
    cores = int(re.search(r"\[0\] (\d+) ", done.stdout)[1])
    for rank, name in enumerate(("server2", "server3", "server3")):
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        given = repr("some\ntext" * 20_000) if rank == 0 else "''"
        threads = cores if rank == 0 else max(1, cores // 2)
        temporary = hosts[int(name[-1]) - 1].temporary
        assert lines == [
            f"[{rank}] {name} {arguments!a} {given}",
            f"[{rank}] {threads} $(mine) 7 {temporary}/hvdrun-{number}/tmp {tmp_path} None",
            f"[{rank}] {'x' * 300_000}",
        ]
        copy = (tmp_path / f"out/rank-{rank}.txt").read_text()
        assert [f"[{rank}] {line}" for line in copy.splitlines() if line[0] != "["] == lines
        assert f"[{rank}] ['HVDRUN_JOB', 'HVDRUN_TELL', 'HVDRUN_VERBOSE']\n" in done.stderr
    assert re.search(r"^HVDRUN_SECRET=SECRET$", done.stderr, re.MULTILINE)
    assert (
        "\nhvdrun: ranks on server2, server3 do not get YOURS, set here and read by the script; "
        "to pass on: --env YOURS\n"
    ) in done.stderr


def test_the_timeline_has_the_ranks_of_all_hosts(hosts: Hosts, tmp_path: Path) -> None:
    code = """
        import numpy as np
        import hvd_keras as hvd

        hvd.init()
        for _ in range(3):
            hvd.allreduce(np.ones(8, "float32"), name="gradients")
        """
    options = ["-H", "server2:1,server3:2", "--timeline", "timeline.json"]
    done = cluster.run(hosts[0], *options, *script(tmp_path, code), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "timeline.json").read_text())
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == dict(enumerate(f"rank {r} on server{2 + (r > 0)}" for r in range(3)))
    moved = [e["pid"] for e in events if e["name"] == "allreduce gradients"]
    assert sorted(moved) == sorted(3 * [*range(3)])
    assert not list(tmp_path.glob("timeline.json.*"))


@pytest.mark.slow
def test_a_script_of_one_process(hosts: Hosts, tmp_path: Path) -> None:
    """By --auto on two hosts it prints what it prints alone, and leaves the same files."""
    cases = Path(__file__).parents[1] / "scripts" / "auto_cases.py"
    command = [sys.executable, str(cases), "files"]
    folders = tmp_path / "alone", tmp_path / "together"
    for folder in folders:
        folder.mkdir()
    environment = cluster.environment() | {"PYTHONDONTWRITEBYTECODE": "1"}  # not into TMPDIR
    alone = hosts[0].run(command, timeout=cluster.LIMIT, cwd=folders[0], env=environment)
    options = ["-H", "server2:1,server3:1", "--auto", "--no-prefix"]
    together = cluster.run(hosts[0], *options, *command, folder=folders[1])
    assert together.returncode == 0, together.stderr
    clean(hosts)
    mine, theirs = (re.findall(r"\d+\.\d+", job.stdout) for job in (alone, together))
    assert list(map(float, theirs)) == pytest.approx(list(map(float, mine)), rel=2e-3)
    one, two = ({*folder.glob("[!r]*"), *folder.glob("results/*")} for folder in folders)
    assert {path.name for path in one} == {path.name for path in two}


@pytest.mark.slow
def test_any_program_that_is_called_as_ssh_is(hosts: Hosts, tmp_path: Path) -> None:
    """Checks, mpirun and the clean-up reach the hosts through it, and its errors are told."""
    program = tmp_path / "reach"
    program.write_text(
        f"""#!/bin/sh
        echo "$1 $2" >> {tmp_path}/calls
        if [ "$2" = server3 ]; then echo reach: not mine >&2; exit 255; fi
        shift && exec ssh "$@"
        """
    )
    program.chmod(0o755)
    options = ["--remote-shell", f"{program} 'my option'"]
    command = script(tmp_path, "print('here')")
    done = cluster.run(hosts[0], *options, "-H", "server2:1", *command, folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[0] here\n"), done.stderr
    clean(hosts)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["my option server2"] * 3
    done = cluster.run(hosts[0], *options, "-H", "server2,server3", *command, folder=tmp_path)
    told = "server3 cannot be reached by reach: not mine; expected that `reach HOST true` works"
    assert (done.returncode, done.stderr) == (2, f"hvdrun: {told}\n")


@pytest.mark.slow
def test_ranks_that_end_at_different_times(hosts: Hosts, tmp_path: Path) -> None:
    """A worker whose report hvdrun has read does not end the others."""
    command = script(tmp_path, "time.sleep(0.01 * rank if rank else 1.5)")
    slots = "server1:1,server2:4,server3:4"
    options = ["--no-init", "--oversubscribe", "-H", slots]
    done = cluster.run(hosts[0], *options, *command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    clean(hosts)


def test_the_secret_is_on_no_command_line(hosts: Hosts, tmp_path: Path) -> None:
    command = script(tmp_path, "print('ready', flush=True)\ntime.sleep(1000)")
    with cluster.started(hosts, "-H", "server1:1,server2:1", *command, folder=tmp_path) as job:
        job.wait_for("ready", 2)
        (worker,) = (pid for pid in job.pids(1, r"python\S* -I -S \S+ launch.onhost.worker") if pid)
        environment = Path(f"/proc/{worker}/environ").read_bytes().decode()
        secret = re.search(r"HVDRUN_SECRET=([0-9a-f]{64})\0", environment)[1]
        lines = [line for host in hosts for line in host.processes().values()]
        assert len(lines) > 6
        assert not [line for line in lines if secret in line]
        job.signal(signal.SIGINT)
        assert job.wait() == 130
        clean(hosts)
        assert job.output.splitlines()[-1] == "hvdrun: SIGINT received; all ranks were ended"


def test_the_first_failure_is_named_with_its_host(hosts: Hosts, tmp_path: Path) -> None:
    command = script(tmp_path, "if rank == 1: raise ValueError('bad')\ntime.sleep(1000)")
    done = cluster.run(hosts[0], "-H", "server2:1,server3:1", *command, folder=tmp_path)
    clean(hosts)
    assert done.returncode == 1
    *_, error, cause, other = done.stderr.splitlines()
    assert cause == "hvdrun: rank 1 on server3 failed first: exit status 1"
    assert error == "[1] ValueError: bad"
    assert re.fullmatch(
        r"hvdrun: rank 0 on server2: terminated by hvdrun because rank 1 failed", other
    )


def test_a_daemon_is_named_if_its_rank_ends_before_anyone_has_looked(
    hosts: Hosts, tmp_path: Path
) -> None:
    code = """
        def parent(pid):
            return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]

        daemon = parent(os.getppid())
        print("ready", flush=True)
        while parent(os.getppid()) == daemon:
            time.sleep(0.001)
        sys.exit(3)
        """
    command = script(tmp_path, code)
    with cluster.started(hosts, "-H", "server1:1,server2:1", *command, folder=tmp_path) as job:
        job.wait_for("ready", 2)
        job.kill(1, cluster.DAEMON)
        status = job.wait()
        assert status == 1, job.output
        assert "mpirun's daemon on server2 died first, above rank 1" in job.output
    clean(hosts)


@pytest.mark.slow
def test_hvdrun_retries_a_host_that_it_cannot_reach_at_the_end(
    hosts: Hosts, tmp_path: Path
) -> None:
    code = """
        print("ready", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.1)
        """
    command = ["--no-init", "-H", "server1:1,server2:1", *script(tmp_path, code)]
    with cluster.started(hosts, *command, folder=tmp_path) as job:
        job.wait_for("ready", 2)
        hosts[1].refuse(22)
        (tmp_path / "go").touch()
        wait_until(lambda: not job.pids(0, "onhost.worker"), "the ranks have ended")
        time.sleep(3)
        assert job.process.poll() is None
        hosts[1].accept()
        assert job.wait() == 0
        clean(hosts)


def test_a_rank_that_leaves_without_an_error_is_no_success(hosts: Hosts, tmp_path: Path) -> None:
    """Processes that the rank has started are ended as well."""
    code = """
        import subprocess
        subprocess.Popen(["sleep", "1234"], start_new_session=True)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
        """
    done = cluster.run(
        hosts[0], "-H", "server2:1", "-np", "1", *script(tmp_path, code), folder=tmp_path
    )
    clean(hosts)
    assert done.returncode == 137
    cause = "hvdrun: rank 0 on server2 failed first: killed before it could report\n"
    assert done.stderr == cause


def test_problems_of_hosts_are_reported_before_anything_starts(
    hosts: Hosts, tmp_path: Path
) -> None:
    """One line per host, for all hosts at once."""
    touch = script(tmp_path, "open('touched', 'w')")
    hosts[2].run(["hostname", "server2"])
    try:
        chosen = ("-H", "server2:1,server3:1,10.77.0.99:1,server9:1")
        done = cluster.run(hosts[0], *chosen, *touch, folder=tmp_path)
    finally:
        hosts[2].run(["hostname", "server3"])
    assert done.returncode == 2
    told = dict(re.findall(r"^hvdrun: (\S+) (.*)$", done.stderr, re.MULTILINE))
    assert list(told) == ["10.77.0.99", "server9", "server3"]
    assert told["server3"].startswith("calls itself 'server2', as server2 does; expected distinct")
    assert told["10.77.0.99"].startswith("cannot be reached by ssh: ")
    assert "resolve" in told["server9"]
    many = cluster.run(hosts[0], "-H", "server2,server3", "-np", "99", *touch, folder=tmp_path)
    assert many.returncode == 2
    assert re.search(r"-np got 99, but the hosts have \d+ slots \(server2:\d+, ", many.stderr)
    assert not (tmp_path / "touched").exists()


def test_a_missing_folder_or_program_is_reported(hosts: Hosts, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    command = script(hidden, "")
    hosts[1].run(["mount", "-t", "tmpfs", "tmpfs", str(hidden)])
    (hidden / "sub").mkdir()
    program = hidden / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    try:
        told = [
            cluster.run(hosts[0], "-H", "server2:1", *words, folder=folder).stderr
            for folder, words in ((hidden / "sub", command), (tmp_path, [str(program)]))
        ]
    finally:
        hosts[1].run(["umount", str(hidden)])
    assert told[0].startswith(f"hvdrun: server2 has no folder {hidden}/sub; expected")
    assert told[1].startswith(f"hvdrun: server2 has no program {program}; expected")


@pytest.mark.skipif(
    find_mpirun(None).abi != "openmpi", reason="only Open MPI's files have a folder of the job's"
)
def test_a_host_without_room_for_the_jobs_files_is_reported(hosts: Hosts, tmp_path: Path) -> None:
    command = script(tmp_path, "time.sleep(1000)")
    hosts[1].run(["mount", "-o", "remount,ro", "/dev/shm"])
    try:
        done = cluster.run(hosts[0], "-H", "server1:1,server2:1", *command, folder=tmp_path)
    finally:
        hosts[1].run(["mount", "-o", "remount,rw", "/dev/shm"])
    clean(hosts)
    assert done.returncode == 126
    assert "hvdrun: rank 1 on server2 failed first: exit status 126\n" in done.stderr
    assert re.search(r"^\[1\] hvdrun: cannot start .* Read-only file system", done.stderr, re.M)


def test_a_second_interrupt_does_not_wait(hosts: Hosts, tmp_path: Path) -> None:
    """mpirun and a rank ignore the first one."""
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)"
    command = script(tmp_path, f"{code}\ntime.sleep(1000)")
    with cluster.started(hosts, "-H", "server1:1,server2:1", *command, folder=tmp_path) as job:
        job.wait_for("ready", 2)
        job.kill(0, cluster.MPIRUN, signal.SIGSTOP)
        job.signal(signal.SIGINT)
        job.signal(signal.SIGINT)
        assert job.wait() == 130
        clean(hosts)


@pytest.mark.parametrize("code", ["", "import hvd_keras as hvd\n        hvd.init()\n"])
def test_nothing_survives_where_all_ranks_had_ended(hosts: Hosts, tmp_path: Path, code) -> None:
    """When hvdrun is killed later: the ranks of another host still run."""
    code = f"""
        {code}
        print("ready", flush=True)
        if rank == 0: time.sleep(1000)
        """
    command = script(tmp_path, code)
    with cluster.started(hosts, "-H", "server2:1,server3:1", *command, folder=tmp_path) as job:
        job.wait_for("ready", 2)
        time.sleep(1)
        job.signal(signal.SIGKILL)
        job.wait()
        wait_until(lambda: not any(host.processes() for host in hosts), "the end of all ranks")
        if find_mpirun(None).abi == "mpich":  # its shared memory goes with the next job
            next_job = ["--no-init", "-H", "server2:1,server3:1", *script(tmp_path, "")]
            assert cluster.run(hosts[0], *next_job, folder=tmp_path).returncode == 0
        wait_until(lambda: not any(host.leftovers() for host in hosts[1:]), "the end of all files")
        hosts[0].clear()


RUN = """
import hvd_keras

def train(rate):
    import socket
    import hvd_keras as hvd
    hvd.init()
    total = hvd.allreduce([rate * (hvd.rank() + 1)], op=hvd.Sum)
    return socket.gethostname(), hvd.local_rank(), float(total[0])

if __name__ == "__main__":
    print(hvd_keras.run(train, (0.5,), hosts="server2:1,server3:2"))
"""


def test_a_function_on_several_hosts(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "call.py").write_text(RUN)
    command = [sys.executable, "call.py"]
    done = hosts[0].run(command, cwd=tmp_path, timeout=300, env=cluster.environment())
    clean(hosts)
    results = [("server2", 0, 3.0), ("server3", 0, 3.0), ("server3", 1, 3.0)]
    assert (done.stdout, done.returncode) == (f"{results}\n", 0), done.stderr


TRAIN = """
import keras, numpy as np
import hvd_keras as hvd

hvd.init()
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size()))
model.compile(optimizer=optimizer, loss="mse")
x = np.random.default_rng(0).normal(size=(96, 3)).astype("float32")
checkpoint = hvd.callbacks.Checkpoint("checkpoints")
data = hvd.data.shard((x, x.sum(1)), batch_size=8)
broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
model.fit(data, epochs=2, verbose=0, callbacks=[broadcast, checkpoint])
print("trained by", hvd.size(), "on", hvd.cross_size(), "hosts")
"""


def test_the_readme_can_be_followed(hosts: Hosts, tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    section = readme.partition("## On several hosts\n")[2].partition("\n## ")[0]
    commands = re.findall(r"^    (.*)", section, re.MULTILINE)
    assert len(commands) == 2
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
    mpirun = [
        line.replace("host", "server") for line in re.findall(r"^(mpirun .*?) +#", guide, re.M)
    ]
    commands += mpirun
    (tmp_path / "train.py").write_text(TRAIN)
    here = str(Path(sys.executable).parent)
    expected = ["all correct", "trained by 3 on 2 hosts", "trained by 4 on 2 hosts"]
    for command, words in zip(commands, expected, strict=True):
        as_root = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
        environment = cluster.environment(**dict.fromkeys(as_root * (command in mpirun), "1"))
        environment["PATH"] = f"{here}:{environment['PATH']}"  # ssh sets another one
        shell = ["bash", "-c", command]
        done = hosts[0].run(shell, cwd=tmp_path, timeout=300, env=environment)
        clean(hosts)
        assert done.returncode == 0, done.stderr
        assert words in done.stdout


def test_a_session_trains_on_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """As a notebook does: its process is the first rank, and the other host needs no script."""
    code = """
        import sys, keras, numpy as np, hvd_keras as hvd
        if len(sys.argv) > 1:
            hvd.auto(hosts=sys.argv[1])
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
        history = model.fit(x, x[:, :1], batch_size=16, epochs=2, verbose=0).history
        print(hvd.size() if len(sys.argv) > 1 else 1, *history["loss"])
        """
    path = tmp_path / "session.py"
    path.write_text(textwrap.dedent(code))
    env = {**os.environ, "HVD_AUTO": "divided"}  # also where one process is faster
    alone, both = (
        hosts[0].run([sys.executable, str(path), *where], timeout=900, env=env)
        for where in ([], ["server1:1,server2:1"])
    )
    assert both.returncode == 0, both.stderr
    assert "cannot be divided" not in both.stderr
    (_, *expected), (size, *found) = (map(float, job.stdout.split()) for job in (alone, both))
    assert size == 2
    assert found == pytest.approx(expected, rel=1e-5)
