"""Checkpoints under faults: killed writers, damage, full disks, killed jobs."""

import contextlib
import importlib.util
import pathlib
import random
import subprocess
import textwrap

import h5py
import numpy as np
import pytest

from hvd_keras.saving import storage
from tests.harness import ranks
from tests.harness.launcher import Launcher

KILLS = 25

# The parent kills its children, which save without a pause. All values of a checkpoint equal its
# number, so a mixture of two would show. TensorFlow has no threads yet, so fork is safe.
KILL_LOOP = """
import os, pathlib, random, signal, sys, time
import numpy as np
from hvd_keras.saving import storage

folder, kills, moment = pathlib.Path(sys.argv[1]), int(sys.argv[2]), random.Random(0)

def save(number):
    values = [np.full(200_000, number, "float32") for _ in range(10)]  # 8 MB in all
    variables = [storage.Variable(f"v{i}", False, value) for i, value in enumerate(values)]
    path = storage.path_of(folder, number, 0)
    storage.write(path, {"number": number}, variables)
    storage.prune(path, 2)

def newest():
    path = storage.files(folder)[0]
    content = storage.read(path)
    number = content.metadata["number"]
    assert path == storage.path_of(folder, number, 0)
    assert len(content.variables) == 10
    assert all((v.value == number).all() for v in content.variables), "a mixture"
    return number

begun, torn = 1, 0
save(begun)
for _ in range(kills):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        for number in range(begun + 1, 10**5):
            save(number)
            os.write(writing, b"saved")
        os._exit(0)
    os.read(reading, 5)
    time.sleep(moment.uniform(0, 0.1))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(writing)
    told = begun + 1
    while os.read(reading, 5):
        told += 1
    os.close(reading)
    torn += any(path.name.startswith(".") for path in folder.iterdir())
    storage.remove_unfinished(folder)
    assert all(path.name.startswith("checkpoint-") for path in folder.iterdir())
    begun = newest()
    assert begun in (told, told + 1), f"{told} was saved, {begun} is there"
print(f"{kills} kills, {torn} in mid write, none lost")
"""


@pytest.mark.slow
def test_killed_writers_lose_no_checkpoint(tmp_path: pathlib.Path) -> None:
    result = ranks.python("-c", KILL_LOOP, tmp_path, KILLS, status=0)
    print(result.stdout)
    assert result.stdout.startswith(f"{KILLS} kills, ")
    assert int(result.stdout.split()[2]) > 0, "no kill came in mid write"


def written(path: pathlib.Path) -> list[np.ndarray]:
    """Writes a checkpoint of 100 kB."""
    generator = np.random.default_rng(0)
    values = [generator.normal(size=n).astype("float32") for n in (20_000, 3, 5_000)]
    variables = [storage.Variable(f"v{i}", False, value) for i, value in enumerate(values)]
    storage.write(path, {"epoch": 1}, variables)
    return values


def same(path: pathlib.Path, values: list[np.ndarray]) -> bool:
    """Whether the file contains these values; False if it is reported as damaged."""
    try:
        content = storage.read(path)
    except storage.DamagedError:
        return False
    for variable, value in zip(content.variables, values, strict=True):
        np.testing.assert_array_equal(variable.value, value, err_msg="silently wrong")
    assert content.metadata == {"epoch": 1}
    return True


def test_damage_is_never_silent(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "checkpoint-00001-0000000.h5"
    values = written(path)
    whole = path.read_bytes()
    assert same(path, values)
    moment = random.Random(0)
    for offset in [*range(600), *(moment.randrange(len(whole)) for _ in range(1000))]:
        damaged = bytearray(whole)
        damaged[offset] ^= 1 << moment.randrange(8)
        path.write_bytes(damaged)
        assert not same(path, values), f"a flipped bit in byte {offset} is not seen"
    for offset in range(0, len(whole), 4096):
        zeroed = whole[:offset] + bytes(len(whole[offset : offset + 4096])) + whole[offset + 4096 :]
        path.write_bytes(zeroed)
        assert same(path, values) == (zeroed == whole)
    for length in [0, 1, 511, 512, 513, *range(1000, len(whole), 7919), len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert not same(path, values)
    path.write_bytes(whole + b"\0")
    assert not same(path, values)
    path.write_bytes(whole)
    assert same(path, values)


def test_damage_is_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "checkpoint-00001-0000000.h5"
    written(path)
    whole = path.read_bytes()
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = 1
    for data, reason in [
        (b"", "empty"),
        (b"a text", "does not begin like a checkpoint"),
        ((tmp_path / "other.h5").read_bytes(), "does not begin like a checkpoint"),
        (whole[:-9], f"has {len(whole) - 9} bytes, but {len(whole)} were written"),
        (whole[:-1] + b"?", "SHA-256"),
    ]:
        path.write_bytes(data)
        with pytest.raises(storage.DamagedError, match=reason):
            storage.verify(path)


def test_prune_keeps_the_last_ones_and_drops_those_of_a_training_given_up(
    tmp_path: pathlib.Path,
) -> None:
    positions = [(0, 50), (1, 0), (1, 50), (2, 0), (7, 0), (123456, 0)]
    for position in positions:
        storage.path_of(tmp_path, *position).touch()
    (tmp_path / "notes.txt").touch()
    order = [storage.path_of(tmp_path, *position) for position in reversed(positions)]
    assert storage.files(tmp_path) == order
    storage.prune(storage.path_of(tmp_path, 2, 0), 2)
    assert storage.files(tmp_path) == [
        storage.path_of(tmp_path, 2, 0),
        storage.path_of(tmp_path, 1, 50),
    ]
    assert (tmp_path / "notes.txt").exists()


@pytest.fixture
def small_disk(tmp_path: pathlib.Path):
    """Mounts a file system of 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_without_any_space_is_named(small_disk: pathlib.Path) -> None:
    """HDF5 reads again what could not be written, and fails of its own."""
    path = small_disk / "checkpoint-00001-0000000.h5"
    with contextlib.suppress(OSError), (small_disk / "other").open("wb", 0) as file:
        while True:
            file.write(bytes(1 << 12))
    for sizes in ([300_000] * 2, [3] * 300, [1, 300_000]) * 3:
        values = [storage.Variable(f"v{i}", False, np.ones(size)) for i, size in enumerate(sizes)]
        for note in ("", "note" * 800):
            with pytest.raises(OSError, match="No space left"):
                storage.write(path, {"note": note}, values)
    assert [path.name for path in small_disk.iterdir()] == ["other"]


TRAIN = """
import hashlib, os, signal
import keras, numpy as np
import hvd_keras as hvd
from hvd_keras.saving import storage

hvd.init()
keras.utils.set_random_seed(hvd.rank())
model = keras.Sequential(
    [
        keras.Input((200,)),
        keras.layers.Dense(300, activation="relu"),
        keras.layers.Dropout(0.3),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(1),
    ]
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(), shard_state={in_parts})
model.compile(optimizer, loss="mse")
random = np.random.default_rng(0)
rows = random.normal(size=(160, 200)).astype("float32"), random.normal(size=160)
checkpoint = hvd.callbacks.Checkpoint({folder!r}, save_freq=2)
data = hvd.data.shard(rows, batch_size=8)
print("begins with epoch", checkpoint.initial_epoch, flush=True)

finish, files = storage._block, []

def die_in_mid_write(disk, name, training):
    files.append(name)
    if hvd.rank() == {in_parts} and len(files) == {file}:
        os.kill(os.getpid(), signal.SIGKILL)
    return finish(disk, name, training)

storage._block = die_in_mid_write

broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
warmup = hvd.callbacks.LearningRateWarmupCallback(0.01 * hvd.size(), warmup_epochs=2)
model.fit(data, epochs=4, verbose=0, callbacks=[broadcast, warmup, checkpoint])
state = [v.numpy().tobytes() for v in (*model.weights, *model.optimizer.variables)]
print("ends with", hashlib.sha256(b"".join(state)).hexdigest(), flush=True)
"""


def end(output: str) -> set[str]:
    return {line.partition("ends with ")[2] for line in output.splitlines() if "ends with" in line}


@pytest.mark.parametrize("in_parts", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_killed_job_started_again_ends_as_if_undisturbed(
    tmp_path: pathlib.Path, in_parts: bool
) -> None:
    """Rank 0 is killed while it writes a file, or rank 1 a part; the others at that moment."""

    def run(name: str, size: int, file: int = 0) -> ranks.Job:
        script = TRAIN.format(folder=str(tmp_path / name), file=file, in_parts=in_parts)
        return ranks.run_script(tmp_path, size, textwrap.dedent(script))

    undisturbed = run("undisturbed", 2)
    assert undisturbed.status == 0, undisturbed.output
    torn = run("killed", 2, file=12)  # of 5 an epoch
    assert torn.status != 0
    assert end(torn.output) == set()
    assert any(path.name.startswith(".") for path in (tmp_path / "killed").iterdir())
    copy = tmp_path / "killed, one rank"
    copy.mkdir()
    left = storage.files(tmp_path / "killed")
    newest = next(path for path in left if not path.name.endswith("-0000000.h5"))
    for path in newest.parent.glob(f"{newest.stem}.*"):
        (copy / path.name).write_bytes(path.read_bytes())
    again = run("killed", 2)
    assert again.status == 0, again.output
    assert "begins with epoch 0" not in again.output, again.output
    assert "Traceback" not in again.output, again.output  # of what is read ahead
    assert "damaged" not in again.output, again.output
    assert end(again.output) == end(undisturbed.output)
    assert len(end(again.output)) == (2 if in_parts else 1)  # with the shares of each rank
    alone = run(copy.name, 1)  # twice as many batches an epoch
    assert alone.status == 0, alone.output
    assert "begins with epoch 2" in alone.output, alone.output
    assert "are used again" not in alone.output, alone.output


# Finds the processes that have the imports ready, with the number of their children.
SERVERS = """
def servers():
    found, parents = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if "hvdrun: has imported" in open(f"/proc/{name}/cmdline").read():
                if os.readlink(f"/proc/{name}/cwd") == os.getcwd():
                    status = open(f"/proc/{name}/status").read()
                    parents[int(name)] = int(re.search(r"PPid:\\s+(\\d+)", status)[1])
                    found[int(name)] = open(f"/proc/{name}/task/{name}/children").read().split()
        except OSError:
            continue
    return {name: found[name] for name in found if parents[name] not in found}
"""

# Prints what a new Python would have, and what must differ between the ranks; ends otherwise in
# each start.
AGAIN = """
import glob, os, re, resource, signal, sys, time, warnings
warm = "keras" in sys.modules
first = open("/proc/self/environ").read().split(chr(0))
assert dict(os.environ) == dict(line.split("=", 1) for line in first if line)
os.environ["PYTHONWARNINGS"] = "ignore"  # for programs that this one may start
import random
import keras, numpy as np, tensorflow as tf
import hvd_keras as hvd

hvd.init()
start = len(glob.glob("start-*"))
hvd.barrier()
draws = [np.random.random(), random.random(), float(keras.random.uniform(()))]
draws.append(float(tf.random.uniform(())))
if "torch" in sys.argv:
    import torch
    draws.append(float(torch.rand(())))
others = hvd.allgather_object(draws)
assert all(len(set(column)) == 2 for column in zip(*others)), others
own = [__name__, __file__, sys.argv, sys.path, os.getcwd(), len(os.sched_getaffinity(0))]
own += [open("/proc/self/limits").read(), os.getpgid(0) == os.getpid(), sys.flags]
own += re.findall("(?:Umask|SigBlk).*", open("/proc/self/status").read())
own += [signal.getsignal(number) for number in (1, 2, 10, 13, 15, 17)]
own += [os.nice(0), sys.stdin.encoding, sys.stdout.line_buffering, sys.stdin.read()]
own.append(sorted(name for name in os.environ if not name.startswith(("HVDRUN_", "HVD_KEEP"))))
own += [os.path.isdir(os.environ["TMPDIR"]), sys.modules["__main__"].own is own, sys.orig_argv]
own += [("ignore", None, Warning, None, 0) in warnings.filters, type(__builtins__)]
own.append(open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0))[1:])
print(start, warm, own, flush=True)
if "once" in sys.argv:
    sys.exit()
hvd.barrier()
if hvd.rank() == 0:
    open(f"start-{start}", "w").close()
if start == 0 or start == 1 and hvd.rank() == 0:
    while not servers():
        time.sleep(0.05)
    os.kill(os.getpid(), 9) if start == 0 and hvd.rank() == 1 else None
    if start == 1:
        os.kill(os.getppid(), signal.SIGSTOP)
        os.execv(sys.executable, [sys.executable, "-c", "import sys; sys.exit(3)"])
elif start == 2:
    def fail():
        raise ValueError("the last start")
    fail()
time.sleep(1000)
"""


@pytest.mark.parametrize("way", ["script", pytest.param("module", marks=pytest.mark.slow)])
def test_a_restart_needs_no_imports(hvdrun: Launcher, way: str) -> None:
    """A rank that is forked with them is as a new process would be, and ends like one."""
    (hvdrun.folder / "again.py").write_text(SERVERS + AGAIN)
    words = ["again.py", "a b"] if way == "script" else ["-m", "again", "a b"]
    if importlib.util.find_spec("torch") is not None and way == "script":
        words.append("torch")
    done = hvdrun.run("-np", "2", "--oversubscribe", "--max-restarts", "2", *words)
    lines = [line.partition("] ")[2].split(" ", 2) for line in done.stdout.splitlines()]
    assert sorted(line[:2] for line in lines) == [
        *(["0", "False"] for _ in range(2)),
        *([start, "True"] for start in "12" for _ in range(2)),
    ]
    assert len({line[2] for line in lines}) == 1, done.stdout
    assert "hvdrun: rank 1 failed first: killed by SIGKILL" in done.stderr
    assert "hvdrun: rank 0 failed first: exit status 3" in done.stderr
    assert "hvdrun: restart 2 of 2: 2 ranks" in done.stderr
    before, _, after = done.stderr.partition("Traceback (most recent call last):\n")
    rank = before.splitlines()[-1]  # the other's lines may be between
    first = next(line for line in after.splitlines() if line.startswith(rank))
    assert "again.py" in first if way == "script" else "runpy" in first, done.stderr
    assert "ValueError: the last start" in done.stderr
    assert done.returncode == 1


def test_imports_are_kept_between_jobs(hvdrun: Launcher) -> None:
    """A rank that is forked from what an earlier job has imported is as a new process would be."""
    (hvdrun.folder / "again.py").write_text(SERVERS + AGAIN)
    job = ["-np", "2", "--oversubscribe", "again.py", "a b", "once"]
    kept = [hvdrun.run(*job) for _ in range(2)]
    hvdrun.forks = False
    fresh = hvdrun.run(*job)
    hvdrun.forks = True
    for done, warm in ((fresh, "False"), *((done, "True") for done in kept)):
        assert done.returncode == 0, done.stderr
        expected = fresh.stdout.replace("] 0 False ", f"] 0 {warm} ").splitlines()
        assert sorted(done.stdout.splitlines()) == sorted(expected)


@pytest.mark.slow
def test_imports_are_those_that_the_script_would_find(hvdrun: Launcher) -> None:
    """What they have read, or would have found, cannot be changed by it."""
    first = hvdrun.script("import hvd_keras as hvd\nhvd.init()", "first.py")
    assert hvdrun.run("-np", "1", first).returncode == 0
    for change, named in (
        ("os.environ['KERAS_BACKEND'] = 'torch'", "KERAS_BACKEND"),
        ("sys.path.insert(0, os.path.dirname(__file__) + '/own')", "keras"),
    ):
        (hvdrun.folder / "own" / "keras").mkdir(parents=True, exist_ok=True)
        (hvdrun.folder / "own" / "keras" / "__init__.py").touch()
        script = hvdrun.script(f"{change}\nimport hvd_keras as hvd\nhvd.init()")
        done = hvdrun.run("-np", "2", "--oversubscribe", script, status=1)
        assert f"the script has chosen {named} too late" in done.stderr
    # Nor is Keras configured otherwise than by its file.
    (hvdrun.folder / "keras.json").write_text('{"floatx": "float64"}')
    script = hvdrun.script("import keras\nprint(keras.config.floatx())")
    job = ["-np", "1", "--no-init", script]
    env = hvdrun.environment | {"KERAS_HOME": str(hvdrun.folder)}
    assert hvdrun.run(*job, env=env).stdout == "[0] float64\n"
    (hvdrun.folder / "keras.json").write_text('{"floatx": "float32"}')
    assert hvdrun.run(*job, env=env).stdout == "[0] float32\n"
    # A module beside the script takes the place of an imported one.
    (hvdrun.folder / "h5py.py").write_text("mine = True")
    script = hvdrun.script("import sys\nprint('keras' in sys.modules)\nimport h5py; h5py.mine")
    assert hvdrun.run("-np", "1", script).stdout == "[0] False\n"


@pytest.mark.slow
def test_imports_are_kept_while_they_are_current(hvdrun: Launcher) -> None:
    """They are those of the same environment, and of files that have not changed since."""
    own = hvdrun.folder / "own"
    own.mkdir()
    module = own / "sitecustomize.py"
    module.write_text("import os; value = 1, os.environ.get('TF_ANY')")
    script = hvdrun.script("""
        import sitecustomize, sys
        print("keras" in sys.modules, *sitecustomize.value)
    """)

    def run(**more: str) -> str:
        env = hvdrun.environment | {"PYTHONPATH": str(own), **more}
        return hvdrun.run("-np", "1", script, env=env).stdout

    assert run() == "[0] True 1 None\n"
    assert run(TF_ANY="7") == "[0] True 1 7\n"
    module.write_text("value = 2,")
    assert run() == "[0] False 2\n"
    assert run() == "[0] True 2\n"


STUCK = """
import glob, os, re, signal, sys, time
open(f"began-{os.getpid()}", "w").close()
print("imported" if "keras" in sys.modules else "new", flush=True)
import hvd_keras as hvd

hvd.init()
if hvd.size() == 2 and not os.path.exists("stopped"):
    while not servers():
        time.sleep(0.05)
    hvd.barrier()
    if hvd.rank() == 0:
        open("stopped", "w").close()
        (server,) = servers()
        os.kill(server, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
hvd.barrier()
if hvd.rank() == 0:
    (server,) = servers()
    os.kill(server, signal.SIGCONT)
    while servers()[server]:
        time.sleep(0.05)
    print("ranks:", len(glob.glob("began-*")), flush=True)
"""


def test_a_restart_does_not_wait_for_a_process_that_is_stuck(hvdrun: Launcher) -> None:
    (hvdrun.folder / "stuck.py").write_text(SERVERS + STUCK)
    done = hvdrun.run("-np", "2", "--oversubscribe", "--max-restarts", "1", "stuck.py", status=0)
    lines = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
    assert lines == [*["new"] * 4, "ranks: 4"]
    assert list(hvdrun.temporary.iterdir()) == []
