"""``python -m hvd_keras.horovod train.py ...``: a program for which ``horovod`` is hvd_keras."""

import sys

from hvd_keras.launch.horovod import execute

if __name__ == "__main__":
    sys.exit(execute(sys.argv[1:]))
