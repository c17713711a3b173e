"""Automatic mode: ``hvdrun --auto train.py`` divides what a script of one process computes.

Global batch, learning rate and results stay as written; what cannot be had that way is an error.
"""

import functools
from collections.abc import Callable
from typing import Any


def replace(owner: Any, attribute: str, new: Callable[..., Any]) -> None:
    """Let a function take another one's place, and get it as its first argument."""
    old = getattr(owner, attribute)

    @functools.wraps(old)
    def call(*args: Any, **kwargs: Any) -> Any:
        return new(old, *args, **kwargs)

    setattr(owner, attribute, call)
