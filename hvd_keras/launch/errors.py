"""What the launcher says, and the error for a job that it refuses."""

import contextlib
import functools
import sys
from collections.abc import Iterator


class UsageError(Exception):
    """The job cannot be started as asked; the text says what was got and expected."""


@contextlib.contextmanager
def refusing(told: str, advice: str = "") -> Iterator[None]:
    """Make an OSError of this block a UsageError that begins and ends so."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{told}: {error.strerror or error}{advice}") from error


# A file in the folder of a call (`run_function`): no UsageError comes any more, so that an exit
# status of 2 is the function's.
STARTED = "started"


def say(text: str) -> None:
    """Print a message of hvdrun's own, while no rank writes."""
    print(f"hvdrun: {text}", file=sys.stderr, flush=True)


say_once = functools.cache(say)
