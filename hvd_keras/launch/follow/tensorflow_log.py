"""Applies TF_CPP_MIN_LOG_LEVEL to all of TensorFlow's log.

TensorFlow itself does so only after its logging is set up; some lines about the machine come
before, from each rank and twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

VARIABLE = "TF_CPP_MIN_LOG_LEVEL"

# Severities, from 0: information, warnings, errors. Fatal ones always show.
_LETTERS = "IWE"


def hidden_lines(environment: Mapping[str, str]) -> re.Pattern[bytes] | None:
    """What lines of a rank's stderr the level hides; None for none of them.

    Without a wish of the user's, information is hidden, but the variable stays free for the script.
    """
    level = environment.get(VARIABLE, "1")
    if level not in ("1", "2", "3"):
        return None
    letters = _LETTERS[: int(level)].encode()
    # The date is not set yet in these lines: letter, 0000, time, process, file and line.
    return re.compile(
        rb"[" + letters + rb"]0000 00:00:\d+\.\d+ +\d+ [\w.]+:\d+\] "
        rb"|WARNING: All log messages before absl::InitializeLog\(\) is called"
    )
