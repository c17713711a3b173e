"""``python -m hvd_keras.auto train.py ...``: a script of one process on this rank."""

import contextlib
import sys

from hvd_keras.auto.launching import ALL_CORES, SCALE_BATCH, SESSION
from hvd_keras.launch import session
from hvd_keras.launch.onhost import cores, fork_server
from hvd_keras.runtime import settings

if __name__ == "__main__":
    words = sys.argv[1:]
    flags = [words.pop(0) for flag in (SCALE_BATCH, ALL_CORES, SESSION) if words[0] == flag]
    if SESSION in flags and settings.launched_rank() == 0:
        session.stand_in(words[0])
        sys.exit()
    import tensorflow as tf

    from hvd_keras.auto.start import auto

    auto(SCALE_BATCH in flags)
    if ALL_CORES in flags:
        with contextlib.suppress(RuntimeError):  # TensorFlow has begun
            tf.config.threading.set_intra_op_parallelism_threads(cores.usable_cores())
            tf.config.threading.set_inter_op_parallelism_threads(cores.usable_cores())
    sys.path[0] = fork_server.folder_of(words)
    fork_server.run(words)
