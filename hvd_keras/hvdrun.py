"""The program `hvdrun`: the launcher, and what it knows of programs written for Horovod."""

import sys

from hvd_keras.automatic import launching
from hvd_keras.horovod import horovodrun
from hvd_keras.launch import cli

EXTENSION = launching.extended(horovodrun.EXTENSION)


def main() -> int:
    """Run `hvdrun` with this process's arguments; returns the exit status."""
    return cli.main(extension=EXTENSION)


if __name__ == "__main__":
    sys.exit(main())
