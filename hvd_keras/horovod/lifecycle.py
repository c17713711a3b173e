"""``init`` under Horovod's name."""

import functools
import importlib.metadata
from collections.abc import Iterable
from typing import Any

import hvd_keras
from hvd_keras import lifecycle
from hvd_keras.horovod.process_sets import as_process_set, global_process_set
from hvd_keras.runtime import log, rank_info
from hvd_keras.training import forgotten


def init(comm: Any = None, process_sets: Iterable[Any] | str | None = None) -> None:
    """``hvd_keras.init``; rank 0 says once whom the program has met.

    Args:
        comm, process_sets: as in ``hvd_keras.init``.

    Raises:
        As ``hvd_keras.init``.
    """
    if process_sets is not None and not isinstance(process_sets, str):
        process_sets = [as_process_set(given) for given in process_sets]
    lifecycle.init(comm, process_sets)
    forgotten.allow_a_first_step()
    if hasattr(comm, "Get_group"):
        global_process_set.mpi_comm = comm
    if rank_info.rank() == 0:
        _tell()


@functools.cache
def _tell() -> None:
    try:
        hidden = f", in place of the installed horovod {importlib.metadata.version('horovod')}"
    except importlib.metadata.PackageNotFoundError:
        hidden = ""
    log.logger.warning("'horovod' is hvd_keras %s here%s", hvd_keras.__version__, hidden)
