"""Exit statuses of ranks that end because of another rank."""

DESERTED = 76
"""Another rank had left while this one waited for it."""

WAITED_IN_VAIN = 75
"""Another rank did not come within the time allowed."""

FOLLOWERS = frozenset({DESERTED, WAITED_IN_VAIN})
