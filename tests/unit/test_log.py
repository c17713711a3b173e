"""Log messages from Python and from the core."""

import pathlib
import re

from tests.harness import ranks

SCRIPT = """
    import threading, keras, tensorflow as tf
    import hvd_keras as hvd
    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD())
    optimizer.apply([tf.ones(2)], [tf.Variable([0.0, 0.0], name="weights")])
    order = [0, 1] if hvd.rank() == 0 else [1, 0]
    threads = [threading.Thread(target=hvd.allreduce, args=[1.0], kwargs={"name": str(i)})
               for i in order]
    for thread in threads:
        thread.start()
        thread.join(0.5)
    for thread in threads:
        thread.join()
"""


def test_levels(tmp_path: pathlib.Path) -> None:
    debug = ranks.run_script(tmp_path, 2, SCRIPT, HVD_LOG_LEVEL="debug")
    assert debug.status == 0, debug.output
    for rank in range(2):
        lines = re.findall(rf"hvd_keras (\w+) rank {rank}: (.*)", debug.output)
        said = "\n".join(f"{level} {text}" for level, text in lines)
        assert re.search(rf"INFO local rank {rank} of 2, rank {rank} of 2", said), debug.output
        assert re.search(r"DEBUG optimizer 0: gradients of 1 variables: .*'dense': 1", said)
        assert re.search(r"DEBUG negotiates:", said)  # the core's


def test_a_level_that_is_none(tmp_path: pathlib.Path) -> None:
    job = ranks.run_script(tmp_path, 1, "import hvd_keras as hvd; hvd.init()", HVD_LOG_LEVEL="loud")
    assert job.status != 0
    assert "HVD_LOG_LEVEL is 'loud', expected debug, info, warning or error" in job.output
