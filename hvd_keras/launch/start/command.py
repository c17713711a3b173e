"""Runs a command while signals and everything else are heard."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence

from hvd_keras.launch.errors import UsageError
from hvd_keras.launch.onhost.limits import ANSWER_TIMEOUT, DRAIN


async def run(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command with this input to its end. Raises OSError; ValueError if it has no words.

    When it takes too long, which is a TimeoutError, or the caller is cancelled, the command and
    what it has started is killed. What holds its output open then is not waited for.
    """
    pipe = subprocess.PIPE
    program, *arguments = command
    # A command whose start is cancelled would be killed without what it has started.
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            program,
            *arguments,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,  # Ctrl-C is for hvdrun alone
        )
    )
    try:
        process = await asyncio.shield(starting)
        answer = await asyncio.wait_for(process.communicate(text.encode()), ANSWER_TIMEOUT)
    except asyncio.TimeoutError as error:
        raise TimeoutError(f"no end within {ANSWER_TIMEOUT:.0f} s") from error
    finally:
        process = await starting
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait([asyncio.ensure_future(process.communicate())], timeout=DRAIN)
    assert process.returncode is not None
    out, err = (data.decode(errors="replace") for data in answer)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


async def ask(command: Sequence[str], name: str, expected: str) -> str:
    """Return what a command prints. Raises UsageError if it fails."""
    try:
        done = await run(command)
    except (OSError, ValueError) as error:
        raise UsageError(f"{name} failed: {error}") from error
    if done.returncode != 0:
        raise UsageError(
            f"{name} ended with exit status {done.returncode}: {done.stderr.strip()}; expected "
            f"{expected} and exit status 0"
        )
    return done.stdout
