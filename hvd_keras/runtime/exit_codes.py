"""Exit statuses of ranks that end because of another rank."""

DESERTED = 76
"""Another rank left while this one waited for it."""

WAITED_IN_VAIN = 75
"""This rank timed out waiting for another one."""

MPI_LOST = 14
"""Open MPI lost its connection to another rank and ended this one."""

FOLLOWERS = frozenset({DESERTED, WAITED_IN_VAIN, MPI_LOST})
