"""Exit statuses of ranks that end because of another rank."""

DESERTED = 76
"""Another rank had left while this one waited for it."""

WAITED_IN_VAIN = 75
"""Another rank did not come within the time allowed."""

MPI_LOST = 14
"""Open MPI has lost its connection to another rank, and has ended this one."""

FOLLOWERS = frozenset({DESERTED, WAITED_IN_VAIN, MPI_LOST})
