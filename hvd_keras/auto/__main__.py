"""``python -m hvd_keras.auto train.py ...``: a script of one process on this rank."""

import contextlib
import sys

import tensorflow as tf

from hvd_keras.auto import launching
from hvd_keras.auto.start import auto
from hvd_keras.launch.onhost import cores, fork_server

if __name__ == "__main__":
    words = sys.argv[1:]
    flags = [
        words.pop(0) for flag in (launching.SCALE_BATCH, launching.ALL_CORES) if words[0] == flag
    ]
    auto(launching.SCALE_BATCH in flags)
    if launching.ALL_CORES in flags:
        with contextlib.suppress(RuntimeError):  # TensorFlow has begun
            tf.config.threading.set_intra_op_parallelism_threads(cores.usable_cores())
            tf.config.threading.set_inter_op_parallelism_threads(cores.usable_cores())
    sys.path[0] = fork_server.folder_of(words)
    fork_server.run(words)
