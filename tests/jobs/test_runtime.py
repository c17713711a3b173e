"""Joining and leaving a job, and failures of ranks, under plain mpirun; hvdrun: test_faults.py."""

import pathlib
import subprocess
import textwrap

import pytest

from tests.harness import ranks

HEAD = """
import os, sys, time
import tensorflow as tf
import hvd_keras as hvd
"""


def alone(directory: pathlib.Path, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a script without a launcher."""
    (directory / "script.py").write_text(textwrap.dedent(script))
    return ranks.python("script.py", cwd=directory, **env)


def test_before_init_everything_says_so_and_one_process_is_a_world(tmp_path: pathlib.Path) -> None:
    script = HEAD + textwrap.dedent("""
        import keras, numpy as np
        assert not hvd.is_initialized()
        calls = [hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size]
        calls += [
            lambda: hvd.allreduce(tf.ones(1)),
            lambda: hvd.allgather(tf.ones(1)),
            lambda: hvd.broadcast(tf.ones(1), 0),
            lambda: hvd.DistributedOptimizer(keras.optimizers.SGD()),
            lambda: hvd.DistributedGradientTape(tf.GradientTape()),
            lambda: hvd.broadcast_variables([tf.Variable(1.0)], 0),
        ]
        for call in calls:
            try:
                call()
            except ValueError as error:
                assert "Call hvd.init() first" in str(error), error
            else:
                raise AssertionError(call)
        hvd.shutdown()  # of nothing: harmless

        hvd.init()
        hvd.init()
        assert hvd.is_initialized()
        place = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank()]
        assert place + [hvd.cross_size()] == [0, 1, 0, 1, 0, 1]
        np.testing.assert_array_equal(hvd.allreduce([1.0, 2.0]), [1.0, 2.0])
        np.testing.assert_array_equal(hvd.allgather([[1, 2]]), [[1, 2]])
        np.testing.assert_array_equal(hvd.broadcast([3], 0), [3])
        hvd.shutdown()
        assert not hvd.is_initialized()
        hvd.init()
        from mpi4py import MPI
        assert MPI.COMM_WORLD.allreduce(5) == 5
        np.testing.assert_array_equal(hvd.allreduce([7], op=hvd.Sum), [7])
        print("all is well")
    """)
    result = alone(tmp_path, script)
    assert result.returncode == 0, result.stderr
    assert "all is well" in result.stdout


@pytest.mark.cases(1)
@pytest.mark.parametrize("first", ["mpi4py", "hvd_keras"])
def test_mpi4py_works_beside(tmp_path: pathlib.Path, first: str) -> None:
    imports = "from mpi4py import MPI\n"
    script = (imports if first == "mpi4py" else "") + HEAD + "hvd.init()\n" + imports
    script += textwrap.dedent("""
        assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
        world = MPI.COMM_WORLD
        assert (world.rank, world.size) == (hvd.rank(), hvd.size())
        assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), 2)
        assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
        for i in range(20):
            assert hvd.allreduce([hvd.rank() + i], op=hvd.Sum).numpy() == [1 + 2 * i]
            assert world.allreduce(world.rank + i) == 1 + 2 * i
        hvd.shutdown()
        assert world.allreduce(1) == 2
        hvd.init()
        assert hvd.allreduce([hvd.rank() + 1], op=hvd.Sum).numpy() == [3]
        print("all is well")
    """)
    job = ranks.run_script(tmp_path, 2, script, status=0)
    assert job.output.count("all is well") == 2


def test_exception_on_one_rank_while_the_others_compute(tmp_path: pathlib.Path) -> None:
    """Nobody waits for the failing rank, so nobody gets its error: it must end the job itself."""
    script = HEAD + textwrap.dedent("""
        hvd.init()
        hvd.allreduce(tf.ones(4))
        if hvd.rank() == 1:
            raise RuntimeError("bad luck")
        time.sleep(1000)
    """)
    job = ranks.run_script(tmp_path, 2, script, timeout=900)
    assert job.status != 0
    assert "RuntimeError: bad luck" in job.output


def test_a_callbacks_error_that_a_library_printed_in_its_own_thread_ends_nothing(tmp_path) -> None:
    script = HEAD + textwrap.dedent("""
        import _thread
        hvd.init()
        def callback():
            try:
                1 / 0
            except ZeroDivisionError as error:  # as PyErr_Print keeps it
                sys.last_value, sys.last_traceback = error, error.__traceback__
        _thread.start_new_thread(callback, ())
        time.sleep(1)
        hvd.barrier()
    """)
    ranks.run_script(tmp_path, 2, script, status=0)


def test_waiting_costs_no_core_and_is_reported(tmp_path: pathlib.Path) -> None:
    script = HEAD + textwrap.dedent("""
        import threading
        hvd.init()
        hvd.allreduce(tf.ones(4))
        before = time.process_time()
        if hvd.rank() == 1:
            time.sleep(5)
        hvd.allreduce(tf.ones(4), name="late")
        if hvd.rank() == 0:
            print("used", time.process_time() - before)

        # The ranks wait for different things.
        mine, other = ("a", "b") if hvd.rank() == 0 else ("b", "a")
        def late():
            time.sleep(4)
            hvd.allreduce(tf.ones(1), name=other)
        thread = threading.Thread(target=late)
        thread.start()
        hvd.allreduce(tf.ones(1), name=mine)
        thread.join()
    """)
    job = ranks.run_script(tmp_path, 2, script, timeout=900, HVD_STALL_WARNING_SECONDS="1")
    assert job.status == 0, job.output
    assert "rank 0 waits for allreduce 'late'" in job.output
    used = float(job.output.split("used ")[1].split()[0])
    assert used < 0.2 * 5, "a waiting rank used more than a fifth of a core"
    assert "rank 0 has submitted: allreduce 'a'" in job.output
    assert "rank 1 has submitted: allreduce 'b'" in job.output


@pytest.mark.slow
def test_a_result_beyond_two_gibibytes(tmp_path: pathlib.Path) -> None:
    """Needs 6 GiB of memory."""
    script = """
        import hvd_keras as hvd, numpy as np
        from hvd_keras.runtime import agree
        hvd.init()
        (result,) = agree.run("allgather", [np.zeros(1 << 31, np.uint8)], name="large")
        print("bytes:", result.size)
    """
    result = alone(tmp_path, script)
    assert result.stdout == f"bytes: {1 << 31}\n", result.stderr


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("HVD_STALL_WARNING_SECONDS", "soon", "'soon', expected a number of seconds"),
        ("HVD_BUCKET_BYTES", "0", "'0', expected a positive number of bytes"),
        ("HVD_MISMATCH_SECONDS", "-1", "'-1', expected a number"),
    ],
)
def test_bad_settings(tmp_path: pathlib.Path, name: str, value: str, expected: str) -> None:
    script = HEAD + "hvd.init()\nhvd.broadcast_variables([tf.Variable(1.0)], 0)"
    result = alone(tmp_path, script, **{name: value})
    assert result.returncode != 0
    assert expected in result.stderr


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("breaks", "expected"),
    [
        (
            "import tensorflow; tensorflow.__version__ = '2.99.0'",
            "hvd_keras was built for TensorFlow 2.",
        ),
        ("sys.modules['hvd_keras._build_info'] = None", "hvd_keras has no native libraries here"),
        ("sys.modules['tensorflow'] = None", "hvd_keras needs TensorFlow, and "),
        ("hvd.__path__[:] = [os.path.dirname(hvd.__file__)]", "built for another ABI than"),
    ],
)
def test_what_is_broken_is_no_import_error(tmp_path: pathlib.Path, breaks, expected) -> None:
    """Programs that take an ImportError of hvd.init() for "no Horovod" would train alone."""
    script = f"""
        import os, sys
        import hvd_keras as hvd
        {breaks}
        try:
            hvd.init()
        except ImportError as error:
            raise SystemExit("taken for a program without Horovod") from error
    """
    result = alone(tmp_path, script)
    assert result.returncode != 0
    assert "RuntimeError" in result.stderr
    assert expected in result.stderr
    assert "taken for" not in result.stderr


def test_a_hangup_reaches_the_script(tmp_path: pathlib.Path) -> None:
    """UCX, which Open MPI loads, would take the signal."""
    script = """
        import os, signal
        signal.signal(signal.SIGHUP, lambda *_: print("heard"))
        import hvd_keras as hvd
        hvd.init()
        os.kill(os.getpid(), signal.SIGHUP)
    """
    assert alone(tmp_path, script).stdout == "heard\n"


@pytest.mark.cases(1)
@pytest.mark.parametrize("chosen", [None, "self,sm"])
def test_open_mpi_does_not_look_for_networks_unless_told_to(
    tmp_path: pathlib.Path, chosen: str | None
) -> None:
    """Otherwise MPI_Init would sleep for a second, and a single process would leave a file."""
    script = """
        import os
        import hvd_keras as hvd
        from hvd_keras.runtime import libraries
        core, is_open_mpi_5 = libraries.core(), libraries.mpi_version().startswith("Open MPI v5")
        init = core.hvd_init
        settings = []  # in MPI_Init, and later
        look = lambda: settings.append(os.environ.get("OMPI_MCA_btl"))
        core.hvd_init = lambda *arguments: (look(), init(*arguments))[1]
        hvd.init()
        look()
        setting = settings[1]
        assert settings[0] == (setting or ("self" if is_open_mpi_5 else None)), settings
        print(setting)
        # Of this process, while others come and go.
        maps = open("/proc/self/maps").read()
        assert ("/dev/shm/sm_segment." in maps) == (is_open_mpi_5 and setting == "self,sm"), maps
    """
    result = alone(tmp_path, script, **({} if chosen is None else {"OMPI_MCA_btl": chosen}))
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{chosen}\n"
