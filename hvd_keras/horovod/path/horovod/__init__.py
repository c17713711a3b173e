"""hvd_keras under Horovod's name; see hvd_keras.horovod."""

try:
    import hvd_keras
except ImportError as error:
    # Not an ImportError: many programs take that for "no Horovod" and train without the others.
    raise RuntimeError(
        f"{__file__} answers to 'import horovod', but this Python has no hvd_keras: {error}. "
        "Install hvd_keras for it, or take this folder off PYTHONPATH."
    ) from error

import sys

import hvd_keras.horovod
from hvd_keras.horovod import names
from hvd_keras.runtime import settings

__version__ = names.VERSION
settings.export_ranks("HOROVOD")
hvd_keras.horovod.fill(sys.modules[__name__])
