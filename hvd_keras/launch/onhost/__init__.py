"""Code that runs on the hosts of a job, beside the ranks; it uses the standard library only."""

from __future__ import annotations

import sys
from pathlib import Path

# The status with which ssh itself fails, and what is called as ssh is.
FAILED = 255


def program(module: str) -> list[str]:
    """The command of a module of this package, without what Python otherwise loads at its start."""
    folder = str(Path(__file__).parents[1])
    code = f"import sys; sys.path.append({folder!r}); from onhost import {module} as m; "
    return [sys.executable, "-I", "-S", "-c", code + "sys.exit(m.main())"]
