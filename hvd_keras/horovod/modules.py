"""Fills the modules of the package ``horovod`` from the table of names."""

import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import hvd_keras
from hvd_keras import settings
from hvd_keras.horovod import names


class Filled(NamedTuple):
    """What a module takes for its ``__getattr__``, ``__dir__`` and ``__all__``."""

    getattr: Callable[[str], Any]
    dir: Callable[[], list[str]]
    all: list[str]


def fill(module: str) -> Filled:
    """The contents of a module, loaded when first used, as those of hvd_keras are.

    Args:
        module: its full name, such as "horovod.tensorflow".
    """
    settings.tell_hvdrun(mark=settings.ASKED_FOR)
    homes = names.MODULES[module]

    def get(name: str) -> Any:
        if name in homes:
            value = _load(homes[name], name)
            setattr(sys.modules[module], name, value)
            return value
        # In Horovod a package has loaded its modules.
        if f"{module}.{name}" in names.MODULES:
            return importlib.import_module(f"{module}.{name}")
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}. It is hvd_keras "
            f"{hvd_keras.__version__}, which has the names of Horovod {names.VERSION} that "
            "docs/migrating.md lists."
        )

    public = [name for name in homes if not name.startswith("_")]
    return Filled(get, lambda: sorted({*vars(sys.modules[module]), *homes}), public)


def refuse(module: str) -> ImportError:
    """The error that a module raises for which hvd_keras has nothing."""
    return ImportError(f"{module} is not there: {names.ABSENT[module]}", name=module)


def _load(home: str, name: str) -> Any:
    if not home:
        return getattr(hvd_keras, name)
    try:
        return getattr(importlib.import_module(f"hvd_keras.{home}"), name)
    except ImportError as error:
        # Many programs take an ImportError for "not installed", and then train without the others.
        raise RuntimeError(f"hvd_keras is installed, but {name} does not load: {error}") from error
