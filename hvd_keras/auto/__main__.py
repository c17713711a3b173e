"""``python -m hvd_keras.auto train.py ...``: a script of one process on this rank."""

import sys

from hvd_keras.auto import launching
from hvd_keras.auto.start import auto
from hvd_keras.launch.onhost import script

if __name__ == "__main__":
    scale_batch = sys.argv[1] == launching.SCALE_BATCH
    auto(scale_batch)
    words = sys.argv[1 + scale_batch :]
    sys.path[0] = script.folder_of(words)
    script.run(words)
