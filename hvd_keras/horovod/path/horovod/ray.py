"""Horovod on Ray, from hvd_keras."""

from hvd_keras.horovod import modules

__getattr__, __dir__, __all__ = modules.fill(__name__)
