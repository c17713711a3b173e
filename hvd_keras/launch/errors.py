"""What the launcher says, and the error for a job that it refuses."""

import sys


class UsageError(Exception):
    """The job cannot be started as asked; the text says what was got and expected."""


# A file in the folder of a call (`run_function`): no UsageError comes any more, so that an exit
# status of 2 is the function's.
STARTED = "started"


def say(text: str) -> None:
    """Print a message of hvdrun's own, while no rank writes."""
    print(f"hvdrun: {text}", file=sys.stderr, flush=True)
