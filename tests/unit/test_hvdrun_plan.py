"""The commands that hvdrun makes for every engine, and what it refuses of hosts and files."""

import asyncio
import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_keras.launch import onhost
from hvd_keras.launch.errors import UsageError
from hvd_keras.launch.onhost import host_facts as probe
from hvd_keras.launch.onhost import sweep
from hvd_keras.launch.onhost.cores import usable_cores, usable_gpus
from hvd_keras.launch.run_job import difference
from hvd_keras.launch.start import command, hosts, slurm
from hvd_keras.launch.start.hosts import Host, Placement
from hvd_keras.launch.start.mpirun import find_mpirun
from hvd_keras.launch.start.remote_shell import Remains, RemoteShell
from tests.harness.launcher import FOREVER, wait_until

VERSIONS = {
    "Open MPI 4": "mpirun (Open MPI) 4.1.4",
    "Open MPI 5": "mpirun (Open MPI) 5.0.11",
    "MPICH": "HYDRA build details:\n    Version: 5.0.2",
    "Intel MPI": "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701",
}
AGENT = "--{0} {1}_agent '/bin/sh JOB_DIRECTORY/ssh' --{0} {1}_no_tree_spawn 1 "
KEEPALIVE = (
    "--{0} oob_tcp_keepalive_time 4 --{0} oob_tcp_keepalive_intvl 2 --{0} "
    "oob_tcp_keepalive_probes 4 --{0} {1} eth7 --mca btl_tcp_if_include eth7 "
)
ONHOST = Path(onhost.__file__).parent
VARIABLES = ("HVDRUN_JOB", "HVDRUN_ADDRESSES", "HVDRUN_SECRET")
PROGRAM = f"PYTHON -I -S {ONHOST} launch.onhost.worker"
EXPORT = "".join(f"-x {name} " for name in VARIABLES)
OPEN_MPI = "-H server1:2,server2:1 "
COMMANDS = {
    "Open MPI 4": "--use-hwthread-cpus --oversubscribe --bind-to none ROOT"
    + OPEN_MPI
    + AGENT.format("mca", "plm_rsh")
    + KEEPALIVE.format("mca", "oob_tcp_if_include")
    + EXPORT,
    "Open MPI 5": "--map-by slot:HWTCPUS:OVERSUBSCRIBE --bind-to none ROOT"
    + OPEN_MPI
    + AGENT.format("prtemca", "plm_ssh")
    + KEEPALIVE.format("prtemca", "prte_if_include")
    + EXPORT,
    **dict.fromkeys(
        ("MPICH", "Intel MPI"),
        "-machinefile JOB_DIRECTORY/machines -bootstrap ssh "
        "-bootstrap-exec JOB_DIRECTORY/ssh -iface eth7 ",
    ),
}


def fake(hvdrun, name: str, text: str) -> str:
    """A program that says this, in place of one that is not on every machine."""
    return hvdrun.program(name, f"cat << 'END'\n{text}\nEND")


@pytest.mark.parametrize("engine", VERSIONS)
def test_the_command_for_several_hosts(hvdrun, engine: str) -> None:
    path = fake(hvdrun, "a=b/mpirun", VERSIONS[engine])
    options = ["--mpirun", path, "-np", "3", "-H", "server1:2,server2:4", "--dry-run"]
    options += ["--network-interface", "eth7", "--ssh-port", "2222", "--mpi-args", "--extra 'a b'"]
    options += ["--ssh-identity-file", hvdrun.script("", "my key")]
    done = hvdrun.run(*options, sys.executable, "-c", "print(1)")
    assert (done.returncode, done.stderr) == (0, "")
    *settings, command, program = done.stdout.splitlines()
    root = "--allow-run-as-root " if os.geteuid() == 0 else ""
    start = 'sh -c \'unset TMPDIR; exec "$0" "$@"\' ' * (engine in ("MPICH", "Intel MPI"))
    expected = f"{path} -n 3 {COMMANDS[engine].replace('ROOT', root)}--extra 'a b' {PROGRAM}"
    assert command == start + expected.replace("PYTHON", sys.executable)
    assert subprocess.check_output(command, shell=True, text=True) == f"{VERSIONS[engine]}\n"
    assert program == f"each rank: {sys.executable} -c 'print(1)'"
    ssh = (
        "JOB_DIRECTORY/ssh: exec ssh -x "
        "-o BatchMode=yes -o ConnectTimeout=5 -o ServerAliveInterval=4 -o ServerAliveCountMax=3 "
        f"-o ControlMaster=no -p 2222 -i '{hvdrun.folder}/my key' \"$host\" "
    )
    (agent,) = (line for line in settings if line.startswith(ssh))
    assert ("rm -rf" in agent) == (engine in ("MPICH", "Intel MPI"))
    assert {"HVDRUN_JOB=JOB", "HVDRUN_SECRET=SECRET"} <= set(settings)
    machines = {f"JOB_DIRECTORY/machines: server{n}:{s}" for n, s in ((1, 2), (2, 1))}
    assert machines <= set(settings) or engine.startswith("Open MPI")


@pytest.mark.parametrize("engine", VERSIONS)
def test_the_network_of_all_hosts_is_for_mpis_that_take_a_range(hvdrun, engine: str) -> None:
    near = [own for name, own in hosts._interfaces().items() if not own.is_loopback]
    if not near:
        pytest.skip("this host has no network")
    neighbour = next(one for one in near[0].network.hosts() if not hosts.is_here(str(one)))
    job = ("--mpirun", fake(hvdrun, "mpirun", VERSIONS[engine]), "-H", f"localhost:1,{neighbour}:1")
    done = hvdrun.run(*job, "--dry-run", "true")
    assert (done.returncode, done.stderr) == (0, "")
    assert (str(near[0].network) in done.stdout) == engine.startswith("Open MPI")


@pytest.mark.parametrize("engine", ["MPICH", "Open MPI 5"])
def test_open_mpi_needs_a_temporary_folder_without_blanks(hvdrun, engine: str) -> None:
    (hvdrun.folder / "two words").mkdir()
    environment = hvdrun.environment | {"TMPDIR": f"{hvdrun.folder}/two words"}
    job = ("--mpirun", fake(hvdrun, "mpirun", VERSIONS[engine]), "-H", "server1:1,server2:1")
    done = hvdrun.run(*job, "--dry-run", "true", env=environment)
    assert done.returncode == (2 if engine == "Open MPI 5" else 0), done.stderr
    assert ("Open MPI accepts no blank in its name" in done.stderr) == (engine == "Open MPI 5")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("engine", ["MPICH", "Open MPI 5"])
def test_hydra_needs_a_temporary_folder_for_programs(hvdrun, engine: str) -> None:
    path = fake(hvdrun, "mpirun", VERSIONS[engine])
    job = hvdrun.command("--mpirun", path, "-H", "server1:1,server2:1", "--dry-run", "true")
    mount = 'mount -t tmpfs -o noexec tmpfs "$TMPDIR" && exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, "-", *job],
        env=hvdrun.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == (2 if engine == "MPICH" else 0), done.stderr
    assert ("in which no program may run (noexec)" in done.stderr) == (engine == "MPICH")


@pytest.mark.parametrize("given", [True, False])
def test_the_command_in_an_allocation_of_slurm(hvdrun, given: bool) -> None:
    """No mpirun is needed."""
    srun = fake(hvdrun, "srun", "slurm 23.11.4")
    fake(hvdrun, "scontrol", "n1\nn2\nn3")
    environment = {"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "1,3(x2)"}
    environment["PATH"] = f"{hvdrun.folder}:/usr/bin:/bin"
    chosen = ["-H", "n1:2,n2:1"] if given else []
    done = hvdrun.run(
        *chosen, "--dry-run", sys.executable, "-V", env={**hvdrun.environment, **environment}
    )
    assert (done.returncode, done.stderr) == (0, "")
    *settings, command, _ = done.stdout.splitlines()
    interface = "pmix" if find_mpirun(None).abi == "openmpi" else "pmi2"
    assert command == (
        f"{srun} -n {3 if given else 7} --mpi={interface} --export=ALL --kill-on-bad-exit=1 "
        "--no-kill --cpu-bind=none --overlap --distribution=arbitrary "
        + PROGRAM.replace("PYTHON", sys.executable)
    )
    assert "SLURM_HOSTFILE=JOB_DIRECTORY/machines" in settings
    names = [line.split()[-1] for line in settings if line.startswith("JOB_DIRECTORY/machines:")]
    assert names == (["n1"] * 2 + ["n2"] if given else ["n1"] + ["n2"] * 3 + ["n3"] * 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-H", "a:0"], "-H got 'a:0'; expected a host name or IPv4 address"),
        (["-H", "a:x"], "-H got 'a:x'; expected a host name"),
        (["--hosts=-oProxyCommand=x"], "-H got '-oProxyCommand=x'; expected a host name"),
        (["-H", "a;b:1"], "-H got 'a;b:1'; expected a host name"),
        (["-H", "a..b:1"], "-H got 'a..b:1'; expected a host name"),
        (["-H", "a#b:1"], "-H got 'a#b:1'; expected a host name"),
        (["-H", "a:1,a:2"], "-H lists a twice; expected each host once"),
        (["-H", ","], "-H lists no host; expected for example server1:4"),
        (["-H", "localhost:1,127.0.0.1:1"], "or one entry if both are the same host"),
        (["-H", "localhost:1,127.0.0.1:1", "--dry-run"], "entry if both are the same host"),
        (["-H", "a" * 64], f"-H got '{'a' * 64}'; expected a host name"),
        (["-H", "a[1-99999999]"], "-H got 'a[1-99999999]'; expected ranges such as server[1-8]:4"),
        (["-H", "a[2-1]"], "-H got 'a[2-1]'; expected ranges such as server[1-8]:4"),
        (["-H", "a", "--hostfile", "b"], "got -H and --hostfile; expected one of them"),
        (["--hostfile", "absent"], "--hostfile got 'absent', which cannot be read"),
        (["--host-discovery-script", "false", "--wait-for-hosts", "9"], "ended with exit status 1"),
        (["-H", "a:1", "-np", "2", "--dry-run"], "-np got 2, but the hosts have 1 slots (a:1)"),
        (["-H", "a:1", "--ssh-port", "x"], "--ssh-port got 'x'; expected a positive integer"),
        (["-H", "a:1", "--ssh-identity-file", "x"], "--ssh-identity-file got 'x', which is not"),
        (["-H", "a:1", "--remote-shell", "absent x"], "--remote-shell got 'absent', which is not"),
        (["-H", "a:1", "--remote-shell", "sh", "--ssh-port", "1"], "got --remote-shell and an opt"),
        (["-H", "a:1", "--env", "ABSENT"], "--env got 'ABSENT'; expected the name of a"),
        (
            ["-n", "1", "--max-restarts", "-1"],
            "--max-restarts got '-1'; expected an integer of at least 0",
        ),
        (["-n", "1", "--min-np", "2"], "--min-np got 2; expected at most the number of ranks, 1"),
        (["-n", "2", "--max-np", "1"], "--max-np got 1; expected at least the number of ranks, 2"),
        (
            ["-H", "localhost:1", "--min-np", "2", "--max-restarts", "1"],
            "--min-np got 2; expected at most the number of ranks, 1",
        ),
    ],
)
def test_bad_hosts_and_options_are_refused(hvdrun, arguments, words) -> None:
    done = hvdrun.run(*arguments, sys.executable, "-V")
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_options_of_restarts_without_any_are_told(hvdrun) -> None:
    job = ("-n", "1", "--min-np", "1", "--restart-timeout", "9")
    told = "hvdrun: --min-np, --restart-timeout: no effect without restarts; add --max-restarts N\n"
    for more, expected in ([], told), (["--max-restarts", "1"], ""):
        assert hvdrun.run(*job, *more, "true", status=0).stderr == expected
    assert hvdrun.run(*job[:2], "true", status=0).stderr == ""


def test_other_systems_and_hosts_without_ipv4_are_refused() -> None:
    told = "import sys; sys.platform = 'darwin'; import hvd_keras.launch"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True)
    assert "hvdrun: got darwin; expected Linux" in done.stderr
    with pytest.raises(UsageError, match=r"no route to one of absent.invalid.*IPv4 addresses"):
        hosts.own_addresses(None, ["absent.invalid"])


def test_the_address_on_a_chosen_network() -> None:
    for chosen in ("lo", "127.0.0.0/8"):
        assert hosts.own_addresses(chosen, []) == ["127.0.0.1"]
    for wrong, told in (("lo,absent0", r"its range: lo \("), ("127.0.0.1/8", "has host bits")):
        with pytest.raises(UsageError, match=f"--network-interface got '{wrong}'.*{told}"):
            hosts.own_addresses(wrong, [])


def test_a_hostfile() -> None:
    text = "# all\nserver1\n\nserver2:3 # the big one\n10.0.0.7 slots=2\n"
    expected = [Host("server1"), Host("server2", 3), Host("10.0.0.7", 2)]
    assert hosts.parse_lines(text, "x") == expected
    with pytest.raises(UsageError, match="x has the line 'a b'; expected server1"):
        hosts.parse_lines("a b", "x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1\nn1\nn2\nn1\n", [Host("n1", 3), Host("n2", 1)]),  # PBS, LSF, SGE's machines
        ("n1 4 all.q@n1 UNDEFINED\nn2 2 all.q@n2 <NULL>\n", [Host("n1", 4), Host("n2", 2)]),  # SGE
        ("n1 slots=4 max_slots=8\nn2 slots = 2 max-slots=2\n", [Host("n1", 4), Host("n2", 2)]),
        ("server[9-11]:2", [Host(f"server{n}", 2) for n in (9, 10, 11)]),
        ("n[01-02,7]-ib slots=3", [Host(f"n{n}-ib", 3) for n in ("01", "02", "7")]),
    ],
)
def test_hostfiles_of_other_systems(text: str, expected: list[Host]) -> None:
    assert hosts.parse_lines(text, "x") == expected


def test_one_slot_on_each_host_of_a_batch_system(tmp_path, monkeypatch) -> None:
    (tmp_path / "nodes").write_text("n1\nn2\n")
    path = str(tmp_path / "nodes")
    assert hosts.read(path) == [Host("n1"), Host("n2")]
    monkeypatch.setenv("PBS_NODEFILE", path)
    assert hosts.read(path) == [Host("n1", 1), Host("n2", 1)]


def test_a_range_of_hosts() -> None:
    expected = [Host("a"), *(Host(f"n{n}", 2) for n in (1, 2, 5)), Host("b", 3)]
    assert hosts.parse("a,n[1-2,5]:2,b:3") == expected


@pytest.mark.parametrize(
    ("fact", "value", "words"),
    [
        ("python", "3.9.0", "has Python 3.9.0; expected {}, as here"),
        ("hvd_keras", None, "has no hvd_keras; expected {}, as here"),
        ("tensorflow", "2.20.0", "has TensorFlow 2.20.0; expected {}, as here"),
        ("keras", "3.0.0", "has Keras 3.0.0; expected {}, as here"),
        ("place", "/else/__init__.py", "has hvd_keras in /else/__init__.py; expected {}, as here"),
        ("directory", False, "has no folder /tmp; expected the folder in which hvdrun was started"),
        ("program", False, "has no program /bin/sh; expected it at the same path on all hosts"),
    ],
)
def test_a_host_that_differs_is_refused(fact: str, value: object, words: str) -> None:
    own = probe.look("/tmp", "/bin/sh")
    assert own[fact], "the probe finds nothing here"
    assert difference(own, own, "/tmp", "/bin/sh") == ""
    told = difference(own | {fact: value}, own, "/tmp", "/bin/sh")
    assert told == words.format(own[fact])


def test_ranks_fill_the_first_hosts_first() -> None:
    three = [Host("a", 2), Host("b", 4), Host("c", 1)]
    assert Placement(three, {}).share(3).hosts == [Host("a", 2), Host("b", 1)]
    assert Placement(three, {}).share(7).hosts == three
    two = Placement([Host("a", 2), Host("b", 4)], {})
    assert two.share(9).hosts == [Host("a", 3), Host("b", 6)]


def test_ways_to_say_how_many_ranks(hvdrun) -> None:
    """On this host, and on one whose cores and GPUs are asked for.

    Both have Keras 9, where PYTHONPATH says, which hvdrun alone gets.
    """
    (hvdrun.folder / "keras-9.dist-info").mkdir()
    (hvdrun.folder / "keras-9.dist-info/METADATA").write_text("Name: keras\nVersion: 9\n")
    environment = hvdrun.environment | {"PYTHONPATH": str(hvdrun.folder)}
    shell = hvdrun.program("shell", 'unset PYTHONPATH\nshift\nexec sh -c "$@"')
    there = ("--remote-shell", shell, "-H", "server1", "--network-interface", "lo")
    scripted = (*there[:2], "--host-discovery-script", "echo server1", *there[4:])
    cores = usable_cores()
    for options, size in (
        (("-np2", "--oversubscribe"), 2),
        (("-npauto",), usable_gpus(os.environ) or cores),
        (("-np", "auto", "-H", "localhost:3"), 3),
        (("--nproc-per-node", "2", "-H", "localhost", "--oversubscribe"), 2),
        (("--nproc_per_node", "1"), 1),
        (there, cores),
        (("-np", "auto", *there), usable_gpus(os.environ) or cores),
        (("--nproc-per-node", "5", *there), 5),
        (("--nproc-per-node", "5", "-np", "3", *scripted), 3),
    ):
        done = hvdrun.run("--dry-run", *options, "true", env=environment)
        assert re.search(rf"^\S*mpirun -n {size} ", done.stdout, re.MULTILINE), (options, done)
    for options, told in (
        (("--nproc-per-node", "2", "-np", "2"), "expected -np alone"),
        (("-npx",), "-np got 'x'; expected a positive integer"),
    ):
        assert told in hvdrun.run("--dry-run", *options, "true").stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("hvdrun -np 2 --max-r", ["--max-restarts"]),
        ("hvdrun --ssh-", ["--ssh-port", "--ssh-identity-file"]),
        ("hvdrun train.py --max", []),
        ("hvdrun --min-num", []),  # horovodrun's names are not offered
    ],
)
def test_bash_completes_options(hvdrun, words: str, expected: list[str]) -> None:
    script = hvdrun.run("--completion").stdout
    *before, _ = words.split()
    ask = f"COMP_WORDS=({words}); COMP_CWORD={len(before)}; _hvdrun; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", script + ask], capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (expected, "")


def test_output_goes_to_a_file_of_each_rank_too(hvdrun) -> None:
    code = "print('out', rank)\nprint('err', rank, file=sys.stderr)"
    options = ("--oversubscribe", "--output-dir", "new/output", sys.executable)
    for size in ("3", "2"):  # what an earlier job has left there goes
        done = hvdrun.run("-np", size, *options, hvdrun.script(code))
    assert done.returncode == 0
    assert len([*(hvdrun.folder / "new/output").iterdir()]) == 2
    for rank in range(2):
        text = (hvdrun.folder / f"new/output/rank-{rank}.txt").read_text()
        assert sorted(text.splitlines()) == [f"err {rank}", f"out {rank}"]


@pytest.mark.parametrize("lines", [0, 200])
def test_the_culprits_traceback_is_near_the_end(hvdrun, lines) -> None:
    """It is repeated if it is far above."""
    code = f"""
        import atexit
        meet(2)
        if rank == 0:
            time.sleep(100)
        atexit.register(lambda: print("later\\n" * {lines}, end="", file=sys.stderr))
        raise ValueError("bad")
        """
    printed = hvdrun.python(2, code).stderr.splitlines()
    assert printed.count("[1] ValueError: bad") == 1
    cause = printed.index("hvdrun: rank 1 failed first: exit status 1")
    *text, other = printed[cause + 1 :]
    assert text[:1] == ["Traceback (most recent call last):"] * bool(lines)
    assert text.count("ValueError: bad") == bool(lines)
    assert other.startswith("hvdrun: rank 0: ")


def test_restarts_that_fail_at_once_are_no_hot_loop(hvdrun) -> None:
    """The pauses: none, 1 s, 2 s."""
    code = "open('starts', 'a').write(f'{time.monotonic()}\\n')\nsys.exit(3)"
    options = ("-n", "1", "--max-restarts", "3", sys.executable)
    done = hvdrun.run(*options, hvdrun.script(code), status=3)
    assert re.findall("the next one comes in (.*) s", done.stderr) == ["1", "2"]
    times = [float(line) for line in (hvdrun.folder / "starts").read_text().split()]
    assert len(times) == 4
    assert times[2] - times[1] > 1
    assert times[3] - times[2] > 2


def test_a_start_waits_for_a_list_of_hosts_that_is_away(hvdrun) -> None:
    """The discovery script lists no host, at the restart after it has failed."""
    (hvdrun.folder / "answers").mkdir()
    there = "echo localhost:1"
    for number, answer in enumerate(["true", there, "exit 3", "true", there]):
        (hvdrun.folder / "answers" / str(number)).write_text(answer)
    script = hvdrun.program("hosts.sh", "cd answers; set -- *; mv $1 now; . ./now")
    code = "if os.path.exists('again'): sys.exit(0)\nopen('again', 'w')\nsys.exit(3)"
    options = ("--host-discovery-script", script, "-np", "1", "--max-restarts", "1")
    options += ("--wait-for-hosts", "60")
    done = hvdrun.run(*options, sys.executable, hvdrun.script(code), status=0)
    said = [line for line in done.stderr.splitlines() if "failed first" not in line]
    none = f"--host-discovery-script {script} lists no host; expected for example "
    none += "server1:4,server2:4"
    assert said == [
        f"hvdrun: waiting for hosts (--wait-for-hosts): {none}",
        f"hvdrun: no hosts: --host-discovery-script {script} ended with exit status 3: ; "
        "expected lines such as server1:4 and exit status 0",
        f"hvdrun: no hosts: {none}",
        "hvdrun: restart 1 of 1: 1 rank on localhost:1",
    ]


def test_slurms_error_is_shown(hvdrun, monkeypatch) -> None:
    hvdrun.program("scontrol", "echo 'Unable to contact slurm controller' >&2\nexit 1")
    monkeypatch.setenv("PATH", f"{hvdrun.folder}:{os.environ['PATH']}")
    with pytest.raises(UsageError, match=r"`scontrol .*` ended .* 1: Unable to contact slurm"):
        asyncio.run(slurm.nodes({"SLURM_JOB_NODELIST": "n[1-3]"}))
    with pytest.raises(UsageError, match="got a heterogeneous SLURM allocation"):
        asyncio.run(slurm.nodes({"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_HET_SIZE": "2"}))


def test_all_hosts_are_cleaned_up_at_once(hvdrun) -> None:
    """Each of 150 waits until all have had their input, and answers then."""
    text = f"cat > /dev/null; touch here-$1; flock --shared gate true; echo {sweep.MARK}"
    reach = hvdrun.program("reach", f"cd {hvdrun.folder}; {text}")
    names = [f"n{number}" for number in range(150)]

    async def sweep_all() -> set[str]:
        work = asyncio.create_task(Remains(RemoteShell([reach])).sweep(names))
        with (hvdrun.folder / "gate").open("w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            while len([*hvdrun.folder.glob("here-*")]) < len(names) and not work.done():
                await asyncio.sleep(0.05)
            fcntl.flock(gate, fcntl.LOCK_UN)
        return await work

    assert asyncio.run(sweep_all()) == set()


def test_the_limit_is_that_of_each_host(hvdrun, monkeypatch) -> None:
    """Another process of a program that is called as ssh holds its output open."""
    monkeypatch.setattr(command, "ANSWER_TIMEOUT", 2.0)
    text = f"[ $1 = n1 ] && echo {sweep.MARK} && exit\nsleep {FOREVER} &\nsleep {FOREVER}"
    shell = RemoteShell([hvdrun.program("reach", text)])
    assert asyncio.run(Remains(shell).sweep(["n2", "n1", "n3"])) == {"n2", "n3"}


@pytest.mark.parametrize(
    "options",
    [
        ["-H", "n1:1", "--remote-shell", "./slow"],
        ["--host-discovery-script", "./slow", "-np", "1"],
    ],
)
def test_signals_are_handled_while_hosts_are_asked(hvdrun, options: list[str]) -> None:
    hvdrun.program("slow", f"touch asked\nsleep {FOREVER}")
    process = subprocess.Popen(
        hvdrun.command(*options, "true"),
        cwd=hvdrun.folder,
        env=hvdrun.environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until((hvdrun.folder / "asked").exists, "the question")
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=30)  # hosts have 60 s
    assert (process.returncode, told) == (143, "hvdrun: SIGTERM received before the start\n")
    wait_until(lambda: not hvdrun.processes(), "the end of the question")


def test_a_question_is_ended_at_any_moment_of_its_start() -> None:
    async def cancel_after(turns: int) -> None:
        task = asyncio.create_task(command.run(["sh", "-c", f"sleep {FOREVER}; true"]))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        assert await asyncio.wait([task], timeout=30) == ({task}, set())

    for turns in range(8):
        asyncio.run(cancel_after(turns))


def test_a_greeting_of_the_hosts_shell_is_no_answer(hvdrun, capsys) -> None:
    """And a clean-up that fails is told."""
    text = 'echo Welcome to $1\n[ "$1" = n1 ] && exec sh -c "$2"\nexit 3'
    shell = RemoteShell([hvdrun.program("reach", text)])
    lost = asyncio.run(Remains(shell, starts=["0"]).sweep(["n1", "n2"]))
    assert lost == set()
    told = f"it cannot run {sys.executable}: exit status 3: no output\n"
    assert capsys.readouterr().err == f"hvdrun: n2: the clean-up failed: {told}"
