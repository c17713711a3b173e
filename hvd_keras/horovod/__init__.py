"""Programs written for Horovod, as they are: ``import horovod`` finds hvd_keras.

The package ``horovod`` is in a folder that is on nobody's path, so that nothing is installed under
that name. It is put on the path of a program by

- ``hvdrun --horovod -np 4 python train.py``,
- ``python -m hvd_keras.horovod train.py``, under mpirun, srun or Kubernetes,
- ``hvd_keras.horovod.install()``, in a notebook.

Horovod's names have Horovod's arguments and meaning there; docs/migrating.md lists the differences.
"""

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import hvd_keras
from hvd_keras.horovod import names
from hvd_keras.runtime import settings

# The folder of the package `horovod`.
PATH = str(Path(__file__).with_name("path"))


def install() -> None:
    """Lets ``import horovod`` of this process find hvd_keras from now on.

    Raises:
        RuntimeError: the real Horovod was imported before, or something else than ``sys.path``
            finds it first.

    Example:
        import hvd_keras.horovod
        hvd_keras.horovod.install()
        import horovod.tensorflow as hvd
    """
    if PATH not in sys.path:
        sys.path.insert(0, PATH)
        importlib.invalidate_caches()
    if "horovod" in sys.modules:
        origin = sys.modules["horovod"].__file__
    else:
        spec = importlib.util.find_spec("horovod")
        origin = None if spec is None else spec.origin
    if origin is None or not origin.startswith(PATH):
        raise RuntimeError(
            f"hvd_keras.horovod.install: 'import horovod' finds {origin}. Call install() before "
            "anything imports horovod, or uninstall the other one."
        )


class _Finder:
    """Finds the modules inside ``horovod``, whose own file is in ``path``."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        known = {*names.MODULES, *names.ABSENT}
        if name not in known or name == "horovod":
            return None
        has_others = any(other.startswith(f"{name}.") for other in known)
        return ModuleSpec(name, _Finder, is_package=has_others)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Python makes the module."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        name = module.__name__
        if name in names.ABSENT:
            raise ImportError(f"{name} is not available: {names.ABSENT[name]}", name=name)
        module.__doc__ = f"What Horovod has in ``{name}``, from hvd_keras."
        fill(module)


def fill(module: ModuleType) -> None:
    """Give a module its names, loaded when first used, and let Python find the modules in it."""
    settings.tell_hvdrun(mark=settings.ASKED_FOR)
    if _Finder not in sys.meta_path:
        sys.meta_path.append(_Finder)  # after what finds those of a real Horovod
    homes = names.MODULES[module.__name__]

    def get(name: str) -> Any:
        if name in homes:
            value = _load(homes[name], name)
            setattr(module, name, value)
            return value
        # In Horovod a package has loaded its modules.
        if f"{module.__name__}.{name}" in names.MODULES:
            return importlib.import_module(f"{module.__name__}.{name}")
        raise AttributeError(
            f"module {module.__name__!r} has no attribute {name!r}. It is hvd_keras "
            f"{hvd_keras.__version__}, which has the names of Horovod {names.VERSION} that "
            "docs/migrating.md lists."
        )

    vars(module).update(
        __getattr__=get,
        __dir__=lambda: sorted({*vars(module), *homes}),
        __all__=[name for name in homes if not name.startswith("_")],
    )


def _load(home: str, name: str) -> Any:
    if not home:
        return getattr(hvd_keras, name)
    module, _, attribute = home.partition(":")
    try:
        return getattr(importlib.import_module(f"hvd_keras.{module}"), attribute or name)
    except ImportError as error:
        # Many programs take an ImportError for "not installed", and then train without the others.
        raise RuntimeError(f"hvd_keras is installed, but {name} does not load: {error}") from error
