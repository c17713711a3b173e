"""Process sets where Horovod's functions differ from those of hvd_keras."""

from hvd_keras import process_sets
from hvd_keras.process_sets import ProcessSet


def remove_process_set(process_set: ProcessSet) -> bool:
    """``hvd_keras.remove_process_set``; of the set of all ranks False, not an error.

    Args:
        process_set: one that was added.

    Returns:
        Whether there was such a set, and it was removed.

    Raises:
        ValueError: the ranks name different sets; on every rank.
    """
    if process_set is process_sets.global_process_set:
        return False
    return process_sets.remove_process_set(process_set)
