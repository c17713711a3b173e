"""``python -m hvd_keras.automatic train.py ...``: a script of one process on this rank."""

import os
import runpy
import sys

from hvd_keras.automatic import launching
from hvd_keras.automatic.start import auto


def _run(words: list[str]) -> None:
    scale_batch = words[0] == launching.SCALE_BATCH
    auto(scale_batch)
    words = words[scale_batch:]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    _run(sys.argv[1:])
