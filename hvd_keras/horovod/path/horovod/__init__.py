"""hvd_keras under Horovod's name; see hvd_keras.horovod."""

try:
    import hvd_keras  # noqa: F401
except ImportError as error:
    # Not an ImportError: many programs take that for "no Horovod" and train without the others.
    raise RuntimeError(
        f"{__file__} answers to 'import horovod', but this Python has no hvd_keras: {error}. "
        "Install hvd_keras for it, or take this folder off PYTHONPATH."
    ) from error

import sys

from hvd_keras.horovod import modules, names
from hvd_keras.runtime import settings

__version__ = names.VERSION
settings.set_horovods_ranks()
modules.fill(sys.modules[__name__])
modules.install()
