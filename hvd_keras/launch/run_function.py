"""`hvd_keras.run`: a Python function on all ranks, and their results, also from a notebook.

Each rank is a process of this module. The pickles of the function and of the results travel through
the connections between hvdrun and its workers, which have proved that they know the job's secret.
"""

import io
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hvd_keras.launch.onhost.worker import CALL, FUNCTION, RESULT, STARTED

# Lines of hvdrun's errors that an exception repeats: before the cause, and if none is known.
_BEFORE, _LAST = 5, 30


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    hosts: str | None = None,
    options: Sequence[str] = (),
) -> list[Any]:
    """Call a function on all ranks of a new job and wait for the results.

    The ranks' output is printed here, with the rank before each line. The function calls
    ``hvd.init()`` itself. Function, arguments and results are pickled by cloudpickle, so functions
    defined in a notebook work; what they import is found by the caller's ``sys.path`` on all hosts.

    Args:
        func: the function.
        args: its positional arguments, equal on all ranks.
        kwargs: its keyword arguments, equal on all ranks.
        np: number of ranks. Default: all slots of ``hosts``; without hosts, 1.
        hosts: "server1:4,server2:4", as for ``hvdrun -H``. Default: this host.
        options: further options of hvdrun, such as ``["--ssh-port", "2222"]``.

    Returns:
        The list of the results of all ranks, in rank order.

    Raises:
        TypeError: ``options`` is a string.
        ValueError: hvdrun refuses to start the job; the text says why.
        RuntimeError: the job failed; the text is hvdrun's summary, with the traceback of the
            rank that failed first.

    Example:
        def train(rate):
            import hvd_keras as hvd
            hvd.init()
            return hvd.rank(), rate * hvd.size()

        assert hvd_keras.run(train, (0.1,), np=2) == [(0, 0.2), (1, 0.2)]
    """
    import cloudpickle

    if options and isinstance(options, str):
        words = options.split()
        raise TypeError(f"hvd_keras.run: options got {options!r}, expected a list, as in {words}")
    function = cloudpickle.dumps((func, tuple(args), dict(kwargs or {})))
    command = ["-np", "1", *options] if np is None and hosts is None else [*options]
    command += [] if np is None else ["-np", str(np)]
    command += [] if hosts is None else ["-H", hosts]
    return [cloudpickle.loads(result) for result in call(function, command)]


def _print(text: str, name: str) -> None:
    if (stream := getattr(sys, name)) is not None:  # as Python has it: a notebook shows it
        encoding = stream.encoding or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        print(text, end="", flush=True, file=stream)


def call(
    function: bytes,
    options: Sequence[str],
    *,
    name: str = "hvd_keras.run",
    show: Callable[[str, str], None] | None = None,
    **process: Any,
) -> list[bytes]:
    """Call a pickled function with its arguments on all ranks; raises as ``run``.

    `function` is the pickle of the function, a tuple and a dict of arguments. `name` begins the
    text of an error. `show` gets each line of hvdrun's output, and "stdout" or "stderr"; by default
    all is printed here as it comes. `process` are further arguments of ``Popen`` for hvdrun.
    Returns the pickled results, in rank order.
    """
    with tempfile.TemporaryDirectory(prefix="hvdrun-call-") as folder:
        # The function may be one of a module that only the caller's path leads to.
        with Path(folder, FUNCTION).open("wb") as file:
            pickle.dump(sys.path, file)
            file.write(function)
        command = [sys.executable, "-m", "hvd_keras.hvdrun"]
        command += ["--call", str(os.getpid()), folder, *options]
        command += [sys.executable, "-m", "hvd_keras.launch.run_function"]
        status, errors = _follow(command, show, process)
        if status != 0:
            refused = status == 2 and not Path(folder, STARTED).exists()
            raise (ValueError if refused else RuntimeError)(f"{name}: {errors.strip()}")
        paths = Path(folder).glob(f"{RESULT}-*")
        results = {int(path.name.rpartition("-")[2]): path for path in paths}
        return [results[rank].read_bytes() for rank in sorted(results)]


def _follow(
    command: Sequence[str], show: Callable[[str, str], None] | None, process: Mapping[str, Any]
) -> tuple[int, str]:
    """Run hvdrun; returns its exit status, and why it failed, of what it says itself."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    how: Any = {**pipes, "start_new_session": True, **process}
    with subprocess.Popen(command, **how) as hvdrun, ThreadPoolExecutor() as relays:
        shown = relays.submit(_relay, hvdrun.stdout, "stdout", show)
        own = relays.submit(_relay, hvdrun.stderr, "stderr", show)
        try:
            status = hvdrun.wait()
        except BaseException:
            hvdrun.terminate()  # SIGINT may be ignored, as in the background of a shell's script
            hvdrun.wait()
            raise
    shown.result()  # raises what ``show`` has raised
    lines = own.result()
    causes = [i for i, line in enumerate(lines) if re.match("hvdrun: .* failed first", line)]
    first = max(0, causes[-1] - _BEFORE) if causes else -_LAST
    return status, "".join(lines[first:])


def _relay(source: Any, name: str, show: Callable[[str, str], None] | None) -> list[str]:
    """Show what hvdrun prints, progress bars at once; returns its own last lines."""
    begins, is_own, own = True, True, deque[str](maxlen=1000)
    for part in io.TextIOWrapper(source, errors="replace", newline="" if show is None else "\n"):
        (show or _print)(part, name)
        if begins:
            is_own = not re.match(r"\[\d+\] (?!hvdrun: )", part)
            if part.startswith("hvdrun: restart "):
                own.clear()
        if is_own:
            own.append(part)
        begins = part.endswith("\n")
    return [*own]


def main() -> None:
    """A rank: call the function and leave its result for the worker."""
    import cloudpickle

    folder = Path(os.environ.pop(CALL))
    with (folder / FUNCTION).open("rb") as file:
        sys.path[:0] = [place for place in pickle.load(file) if place not in sys.path]
        func, args, kwargs = pickle.load(file)
    try:
        result = func(*args, **kwargs)
    except SystemExit as error:
        if error.code:
            raise
        raise RuntimeError("the function called sys.exit(); expected it to return") from None
    (folder / RESULT).write_bytes(cloudpickle.dumps(result))


if __name__ == "__main__":
    main()
