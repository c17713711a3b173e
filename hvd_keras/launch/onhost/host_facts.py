"""Host check, piped to Python on each host before a job: reports what is installed there.

Its arguments say what to look at, and where hvdrun finds modules; it prints one line of JSON.
"""

import json
import os
import socket
import sys

MARK = "hvdrun-probe:"


def version(*names: str) -> "str | None":
    """Return the version of the first of these that is installed."""
    import importlib.metadata  # slow, and hvdrun needs it for several hosts alone

    found = (one for name in names for one in importlib.metadata.distributions(name=name))
    return next((one.version for one in found), None)


def look(directory: str, program: str) -> "dict[str, object]":
    """Return the facts of this host."""
    import importlib.util

    found = importlib.util.find_spec("hvd_keras")
    facts: dict[str, object] = {
        "host": socket.gethostname(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "hvd_keras": version("hvd_keras"),
        "place": None if found is None else found.origin,
        "tensorflow": version("tensorflow", "tensorflow-cpu"),
        "keras": version("keras"),
        "directory": os.path.isdir(directory),
        "program": os.access(os.path.join(directory, program), os.X_OK),
    }
    if facts["place"] is not None:
        from hvd_keras.launch.onhost.cores import usable_cores, usable_gpus

        facts["cores"] = usable_cores()
        facts["gpus"] = usable_gpus(os.environ)
    return facts


if __name__ == "__main__":
    sys.path[:0] = sys.argv[3:]
    print(MARK + json.dumps(look(*sys.argv[1:3])))
