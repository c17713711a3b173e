"""Former name of ``rank_info``; to be removed."""

from hvd_keras.rank_info import (
    cross_rank,
    cross_size,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    size,
)

__all__ = [
    "cross_rank",
    "cross_size",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "size",
]
