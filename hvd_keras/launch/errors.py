"""What the launcher says, and the error for a job that it refuses."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator


class UsageError(Exception):
    """The job cannot be started as asked; the text says what was got and expected."""


class AwayError(UsageError):
    """Hosts that may come are not listed or cannot be reached."""


@contextlib.contextmanager
def refusing(message: str, advice: str = "") -> Iterator[None]:
    """Make an OSError of this block a UsageError that begins and ends so."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{message}: {error.strerror or error}{advice}") from error


# Prints hvdrun's own messages while a job runs: `Output.say`, which waits for no slow reader.
voice: Callable[[str], None] | None = None


def say(text: str) -> None:
    """Print a message of hvdrun's own."""
    if voice is not None:
        voice(text)
    else:
        print(f"hvdrun: {text}", file=sys.stderr, flush=True)


say_once = functools.cache(say)
