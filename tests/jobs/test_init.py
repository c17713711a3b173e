"""hvd.init: the ranks of the job, and its initial process sets."""

import pathlib
import subprocess
import sys
import textwrap

import pytest

from tests.harness import ranks


def test_ranks_and_communicators(tmp_path: pathlib.Path) -> None:
    script = """
        from mpi4py import MPI
        import hvd_keras as hvd
        me = MPI.COMM_WORLD.Get_rank()

        # Some of the ranks, in an order of their own.
        try:
            hvd.init(comm=[2, 0])
            assert me != 1
            assert (hvd.rank(), hvd.size()) == ({2: 0, 0: 1}[me], 2)
            assert hvd.allgather([me]).numpy().tolist() == [2, 0]
        except ValueError as error:
            assert me == 1 and "MPI's rank 1, which comm does not list" in str(error), error
            hvd.init(comm=[1])
            assert (hvd.rank(), hvd.size()) == (0, 1)
        hvd.shutdown()

        # Two jobs beside each other.
        color = me % 2
        hvd.init(comm=MPI.COMM_WORLD.Split(color, -me))
        mine = [r for r in (2, 1, 0) if r % 2 == color]
        assert (hvd.rank(), hvd.size()) == (mine.index(me), len(mine))
        assert int(hvd.allreduce(me, op=hvd.Sum)) == sum(mine)
        hvd.shutdown()

        # A communicator's members are named by their ranks in the job.
        world = MPI.COMM_WORLD
        if me != 0:
            members = hvd.ProcessSet(world.Create_group(world.group.Incl([2, 1])))
            hvd.init(comm=[2, 1])
            assert hvd.add_process_set([1]).process_set_id == 1
            hvd.shutdown()
            hvd.init(comm=[2, 1])
            assert members.ranks == [0, 1], members.ranks
            hvd.shutdown()
            outside = hvd.ProcessSet(MPI.COMM_WORLD)
            hvd.init(comm=[2, 1])
            try:
                hvd.add_process_set(outside)
                raise SystemExit("no error")
            except ValueError as error:
                assert "MPI's rank 0" in str(error), error
            hvd.shutdown()

        # All, with sets: those of a second call are added. Ranks 1 and 2 have had a set before.
        pair, ends = hvd.ProcessSet([0, 1]), hvd.ProcessSet([0, 2])
        hvd.init(process_sets=[pair, [1, 2]])
        assert (hvd.rank(), hvd.size(), pair.process_set_id) == (me, 3, pair.id())
        assert set(hvd.allgather_object(pair.id())) == {pair.id()}
        if pair.included():
            assert int(hvd.allreduce(me, op=hvd.Sum, process_set=pair)) == 1
        first = pair.id()
        hvd.init(process_sets=[pair, [1, 2], ends])
        assert pair.id() == first
        if ends.included():
            assert int(hvd.allreduce(me, op=hvd.Sum, process_set=ends)) == 2
        hvd.init()
        try:
            hvd.init(process_sets=[hvd.ProcessSet([0, 1])])
            raise SystemExit("no error")
        except ValueError as error:
            assert "has the same ranks" in str(error), error
        hvd.shutdown()
        assert pair.process_set_id is None

        for wrong, text in (
            (dict(comm=[0, 0]), "each once"),
            (dict(comm=[0, 7]), "rank 7 of comm does not exist"),
            (dict(comm=7), "an mpi4py communicator"),
            (dict(comm=MPI.COMM_NULL), "not among those"),
            (dict(comm=[world, world]), "as process_sets=[hvd.ProcessSet(other), …]"),
            (dict(process_sets="static"), "is 'static', expected hvd.ProcessSet objects"),
        ):
            try:
                hvd.init(**wrong)
                raise SystemExit("no error")
            except ValueError as error:
                assert text in str(error), error
        # The default dtype is still the script's to choose.
        import keras
        keras.config.set_floatx("float64")
        assert keras.config.dtype_policy().name == "float64"
        print("right")
    """
    job = ranks.run_script(tmp_path, 3, script, status=0)
    assert job.output.count("right") == 3, job.output


def test_a_rank_that_others_waited_for_has_left_and_cannot_join_again(
    tmp_path: pathlib.Path,
) -> None:
    script = """
        import pathlib, sys, time
        import tensorflow as tf
        import hvd_keras as hvd

        hvd.init()
        said = pathlib.Path(sys.argv[0]).with_name("rank 1 has said it")
        if hvd.rank() == 1:
            hvd.shutdown()
            assert not hvd.is_initialized()
            for call, kind, text in (
                (hvd.init, RuntimeError, "cannot join again"),
                (hvd.rank, ValueError, "not initialised"),
            ):
                try:
                    call()
                except kind as error:
                    assert text in str(error), error
                else:
                    raise SystemExit("no error")
            hvd.shutdown()
            said.touch()
        else:
            try:
                hvd.allreduce(1.0)
            except tf.errors.AbortedError as error:
                told = "rank 1 has left the job: it called hvd.shutdown()"
                assert f"cannot run: {told}" in str(error), error
            limit = time.monotonic() + 30
            while not said.exists() and time.monotonic() < limit:
                time.sleep(0.1)
            print("right" if said.exists() else "wrong")
    """
    job = ranks.run_script(tmp_path, 2, script, timeout=900)
    assert job.output.count("right") == 1, job.output
    assert "left while others waited for it" in job.output


def test_what_mpi_refuses_is_no_wrong_value(tmp_path: pathlib.Path) -> None:
    script = """
        from mpi4py import MPI
        import hvd_keras as hvd

        MPI.Finalize()
        try:
            hvd.init(comm=[0])
        except RuntimeError as error:
            print("MPI has been finalised" in str(error))
    """
    job = ranks.run_script(tmp_path, 1, script, status=0)
    assert job.output.count("True") == 1, job.output


def test_an_init_that_fails_after_the_ranks_have_met_is_not_taken_for_done(tmp_path) -> None:
    script = """
        import hvd_keras as hvd
        for _ in range(2):
            try:
                hvd.init()
            except ValueError as error:
                print("refused:", error)
        """
    job = ranks.run_script(tmp_path, 2, script, HVD_TIMELINE=str(tmp_path / "no/file"))
    assert job.output.count("refused: HVD_TIMELINE: cannot make the file") == 4, job.output


def test_processes_that_a_rank_starts_are_no_ranks(tmp_path) -> None:
    script = """
        import multiprocessing, multiprocessing.spawn, subprocess, sys
        import hvd_keras as hvd

        def of_newer_pythons(name, of=multiprocessing.spawn.get_preparation_data):
            data = of(name)
            return data | {"main_path": data.get("init_main_from_path")}  # for the fork server, too

        multiprocessing.spawn.get_preparation_data = of_newer_pythons
        hvd.init()
        def square(number):
            return number**2
        if __name__ == "__main__":
            for kind in "spawn", "forkserver":  # which import the script
                with multiprocessing.get_context(kind).Pool(1) as pool:
                    print("squares", pool.map(square, [1, 2]))
            command = [sys.executable, "-c", "import hvd_keras as hvd; hvd.init()"]
            other = subprocess.run(command, capture_output=True, text=True).stderr
            print("told", f"rank {hvd.rank()} has started this process, which is no rank" in other)
            hvd.barrier()
        """
    job = ranks.run_script(tmp_path, 2, script, status=0)
    assert job.output.count("squares [1, 4]") == 4, job.output
    assert job.output.count("told True") == 2, job.output


def test_processes_outside_of_the_job_take_as_long_as_they_like(hvdrun) -> None:
    """Rank 0, the job, ends after rank 1 and before rank 2."""
    script = """
        import hvd_keras as hvd
        try:
            hvd.init(comm=[0])
        except ValueError as error:
            assert rank > 0 and "which comm does not list" in str(error)
        time.sleep([3, 0, 6][rank])
        """
    limits = {"HVD_TIMEOUT_SECONDS": "1", "HVD_STALL_WARNING_SECONDS": "0.5"}
    job = hvdrun.python(3, script, env=hvdrun.environment | limits, status=0)
    late = [line for line in job.stderr.splitlines() if "no progress" in line]
    # MPI starts with all three, which a busy machine does not start at once.
    assert not [line for line in late if "hvd.init() waits" not in line]


def test_names_that_are_no_text(tmp_path) -> None:
    """The name of a process ends after 15 bytes, within a character; a file's may be any bytes."""
    script = f"""
        import mmap
        from hvd_keras.runtime import mpi_library, settings
        with open(b"{tmp_path}/x\\xe9", "w+b") as file:
            file.write(b"x")
            file.flush()
            file = mmap.mmap(file.fileno(), 1)
        print(settings.launched_above(), mpi_library.loaded())
        """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    shell = tmp_path / "обучение.sh"
    shell.write_text(f"#!/bin/sh\n{sys.executable} {tmp_path}/script.py; exit $?\n")
    shell.chmod(0o755)
    job = subprocess.run([shell], capture_output=True, text=True)
    assert job.stdout == "('', 1) []\n", job.stderr


def test_processes_of_other_launchers_do_not_train_apart() -> None:
    script = """
import os
import hvd_keras as hvd
for rank, size in ("RANK", "WORLD_SIZE"), ("HOROVOD_RANK", "HOROVOD_SIZE"):
    os.environ |= {rank: "1", size: "2"}
    try:
        hvd.init()
        raise SystemExit("no error")
    except RuntimeError as error:
        assert f"has started 2 processes ({size}=2)" in str(error), error
    del os.environ[size]
hvd.init()
assert hvd.size() == 1
"""
    ranks.python("-c", script, status=0)


def test_another_backend_of_keras_is_named() -> None:
    job = ranks.python("-c", "import hvd_keras as hvd; hvd.init()", KERAS_BACKEND="jax")
    assert job.returncode != 0
    assert "hvd_keras needs the TensorFlow or PyTorch backend of Keras, and jax is" in job.stderr


ONE_GPU = """
    import tensorflow as tf
    tf.config.list_physical_devices = tf.config.get_visible_devices = lambda kind: ["GPU 0"]
    tf.config.set_visible_devices = tf.config.experimental.set_memory_growth = lambda *_: None
    import hvd_keras as hvd
    hvd.init()
    hvd.barrier()
"""


def test_ranks_share_a_gpu_if_hvdrun_or_the_user_lets_them(hvdrun) -> None:
    hvdrun.environment["CUDA_VISIBLE_DEVICES"] = ""
    job = hvdrun.python(2, ONE_GPU, env={**hvdrun.environment, "HVD_GPU_OPERATIONS": "MPI"})
    assert job.returncode == 0, job.stderr
    assert job.stderr.count("WARNING rank 0: 2 processes share 1 GPU, which tests a") == 1
    job = hvdrun.python(2, ONE_GPU, status=1)
    assert "hvd.init: this host has 1 GPU for 2 processes, and two cannot share one" in job.stderr


# Its child is outside of the job: it has no variable of hvdrun or MPI.
ALONE = """\
import os, subprocess, sys
import hvd_keras as hvd
hvd.init()
print("size", hvd.size(), flush=True)
if "HVDRUN_JOB" in os.environ:
    home = {"HOME": os.environ["HOME"]}  # Open MPI needs it
    subprocess.run([sys.executable, __file__], env=home, check=True)
"""

EMPTY = f"env -i HOME={pathlib.Path.home()}"


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("size", "wrapper", "told"),
    [
        (2, f"exec {EMPTY}", ""),
        (2, f"{EMPTY} HVDRUN_TELL=$HVDRUN_TELL", ""),
        (1, f"exec {EMPTY}", "[0] size 1\n"),
        pytest.param(
            *(2, "", "[0] size 1\n[0] size 2\n[1] size 1\n[1] size 2\n"), marks=pytest.mark.slow
        ),
    ],
    ids=["empty", "below a shell", "one rank", "outside"],
)
def test_ranks_without_their_environment_do_not_train_apart(hvdrun, size, wrapper, told) -> None:
    script = hvdrun.folder / "script.py"
    script.write_text(ALONE)
    command = ["sh", "-c", f'{wrapper} "$0" "$@"; exit $?', sys.executable, str(script)]
    job = hvdrun.run("-np", str(size), "--oversubscribe", *command)
    assert "".join(sorted(job.stdout.splitlines(keepends=True))) == told, job.stderr
    assert (job.returncode == 0) == bool(told), job.stderr
    assert told or "hvdrun started 2 processes, but what it starts (env -i, sudo" in job.stderr


def test_ranks_in_separate_containers_are_a_failure(hvdrun) -> None:
    """They see neither hvdrun's environment nor its processes, as under docker run."""
    container = ["unshare", "--user", "--map-root-user", "--fork", "--pid", "--mount-proc"]
    if subprocess.run([*container, "true"]).returncode:
        pytest.skip("needs the right to make namespaces")
    script = hvdrun.folder / "script.py"
    script.write_text(ALONE)
    hvdrun.options = ["-np", "2", "--oversubscribe"]
    # "root" in there may not write into the real one's folder of Open MPI in /tmp.
    command = [*container, *EMPTY.split(), f"TMPDIR={hvdrun.folder}", sys.executable, str(script)]
    job = hvdrun.run(*command)
    assert sorted(job.stdout.splitlines()) == ["[0] size 1", "[1] size 1"], job.stderr
    assert job.returncode == 1
    assert "hvdrun: saw no rank complete hvd.init()" in job.stderr
    assert "docker run, sudo, systemd-run and env -i remove hvdrun's environment" in job.stderr
    assert hvdrun.run("--no-init", *container, "true").returncode == 0


def test_ranks_of_mpirun_without_their_environment_are_told_what_has_happened() -> None:
    """Without HOME, Open MPI would end them without a word about it."""
    command = [sys.executable, "-c", "import hvd_keras as hvd; hvd.init(); print('alone')"]
    job = ranks.mpirun(2, "env", "-i", *command)
    assert job.status != 0, job.output
    assert "RuntimeError: hvd.init: mpirun started 2 processes, but what it starts" in job.output
    assert "alone\n" not in job.output
    job = ranks.mpirun(1, *EMPTY.split(), *command, status=0)
