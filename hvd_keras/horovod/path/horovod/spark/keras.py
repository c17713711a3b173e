"""There is no such module; see hvd_keras.horovod."""

from hvd_keras.horovod import modules

raise modules.refuse(__name__)
