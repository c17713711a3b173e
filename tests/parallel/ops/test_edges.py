"""Collectives in processes whose environment is unusual: locales, forks."""

import faulthandler
import json
import locale
import os
import pathlib
import resource
import shutil
import subprocess
import time

import numpy as np
import pytest
import tensorflow as tf

import hvd_keras as hvd
from tests.harness import inputs

RANK, SIZE = hvd.rank(), hvd.size()


@pytest.fixture
def comma(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Numbers are written with a comma, as in Germany, France and Brazil."""
    if shutil.which("localedef") is None or not pathlib.Path("/usr/share/i18n").exists():
        pytest.skip("no localedef (package locales)")
    made = ["localedef", "--force", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "de_DE.UTF-8")]
    subprocess.run(made, check=True, capture_output=True)
    monkeypatch.setenv("LOCPATH", str(tmp_path))
    before = locale.setlocale(locale.LC_NUMERIC)
    locale.setlocale(locale.LC_NUMERIC, "de_DE.UTF-8")
    assert locale.localeconv()["decimal_point"] == ","
    yield
    locale.setlocale(locale.LC_NUMERIC, before)


@pytest.mark.cases(1)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_numbers_where_decimals_have_a_comma(
    comma: None, jit_compile: bool, directory: pathlib.Path
) -> None:
    @tf.function(jit_compile=jit_compile)
    def scaled(x):
        return hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=2.25)

    x = inputs.tensor(RANK, (4,))
    expected = inputs.of_all_ranks(SIZE, (4,)).sum(0) * 1.125
    np.testing.assert_array_equal(scaled(tf.constant(x)), expected)
    scattered = hvd.reducescatter(tf.fill([SIZE], x[0]), op=hvd.Sum, prescale_factor=0.5)
    np.testing.assert_array_equal(scattered, [inputs.of_all_ranks(SIZE, (4,))[:, 0].sum() / 2])
    assert hvd.stats()["seconds"] > 0
    path = directory / "timeline.json"
    hvd.start_timeline(str(path))
    hvd.allreduce(tf.ones(3))
    hvd.barrier()
    hvd.stop_timeline()
    if RANK == 0:
        assert any("ts" in event for event in json.loads(path.read_text()))


@pytest.mark.host("CUDA does not work in a forked child")
@pytest.mark.parametrize("size", [3, 100_000])
def test_a_forked_child_is_no_rank(size: int) -> None:
    """Its parent shares memory with the other ranks, into which it must not write."""
    reader, writer = os.pipe()
    if RANK == SIZE - 1 and (child := os.fork()) == 0:
        faulthandler.dump_traceback_later(30, exit=True)
        try:
            hvd.allreduce(tf.ones(size), op=hvd.Sum)
            said = "went on"
        except tf.errors.FailedPreconditionError as error:
            said = str(error)
        hvd.shutdown()
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    for step in range(20):
        mine = tf.fill([size], float(RANK + step))
        expected = sum(range(SIZE)) + SIZE * step
        np.testing.assert_array_equal(hvd.allreduce(mine, op=hvd.Sum)[:2], [expected] * 2)
    if RANK == SIZE - 1:
        said = os.read(reader, 4096).decode()
        assert os.waitpid(child, 0)[1] == 0
        assert "forked" in said
        assert "hvd.init()" in said
    os.close(reader)


def test_an_op_that_fails_beside_a_collective_on_one_rank() -> None:
    """TensorFlow's step ends when its last op does, and the others never come to that one."""

    def fails():
        time.sleep(0.3)
        raise ValueError("mine")

    @tf.function
    def step(x):
        tf.py_function(fails, [], [])
        return hvd.allreduce(x, name="beside")

    if RANK == 0:
        with pytest.raises(tf.errors.OpError, match="mine"):
            step(tf.ones(3))
    sum_of_all = hvd.allreduce(tf.fill([3], RANK + 1.0), op=hvd.Sum, name="next")
    np.testing.assert_array_equal(sum_of_all, [SIZE * (SIZE + 1) / 2] * 3)


def test_an_output_that_one_rank_cannot_allocate() -> None:
    x = tf.ones(1 << 26)  # 256 MiB, which stays in use, so that the result needs as much
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    if RANK == SIZE - 1:
        limit = pages * resource.getpagesize() + (1 << 26)
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match=rf"rank {SIZE - 1}: its output cannot be allocated",
        ):
            hvd.allreduce(x, name="large")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    np.testing.assert_array_equal(hvd.allreduce([RANK + 1], op=hvd.Sum), [SIZE * (SIZE + 1) // 2])
