"""``init`` under Horovod's name."""

import functools
import importlib.metadata
from collections.abc import Iterable
from typing import Any

import hvd_keras
from hvd_keras import lifecycle, log, rank_info


def init(comm: Any = None, process_sets: Iterable[Any] | str | None = None) -> None:
    """``hvd_keras.init``; rank 0 says once whom the program has met.

    Args:
        comm, process_sets: as in ``hvd_keras.init``.

    Raises:
        As ``hvd_keras.init``.
    """
    lifecycle.init(comm, process_sets)
    if rank_info.rank() == 0:
        _tell()


@functools.cache
def _tell() -> None:
    try:
        hidden = f", in place of the installed horovod {importlib.metadata.version('horovod')}"
    except importlib.metadata.PackageNotFoundError:
        hidden = ""
    log.logger.warning("'horovod' is hvd_keras %s here%s", hvd_keras.__version__, hidden)
