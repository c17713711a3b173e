"""Data-parallel training for Keras 3 on TensorFlow, with Horovod's API.

A Keras script trains on several processes with these lines::

    import hvd_keras as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
    model.compile(optimizer=optimizer, loss=...)
    data = hvd.data.shard((x, y), batch_size=32)
    model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

Start it with ``hvdrun -np 4 train.py``.
"""

import ast
import importlib
import importlib.machinery
import importlib.util
import os.path
import pathlib
import sys
from types import TracebackType
from typing import Any

__version__ = "0.1.0"


def _step_aside() -> None:
    """Lets an installed package take the place of this one, a source folder without a build."""
    here = os.path.realpath(__path__[0])
    others = [x for x in sys.path if os.path.realpath(os.path.join(x, "hvd_keras")) != here]
    spec = importlib.machinery.PathFinder.find_spec(__name__, others)
    if spec is None or spec.loader is None:
        raise ImportError(
            f"hvd_keras was imported from its source folder, {__path__[0]}, which is not built, "
            f"and {sys.executable} has no other.\nRun 'pip install .' there, or, to change the "
            "sources, 'make setup'."
        )
    # Its import goes on with what is here.
    sys.modules[__name__] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[__name__])


# The callbacks are in another folder of the sources.
if importlib.util.find_spec("hvd_keras.callbacks") is None:
    _step_aside()

from hvd_keras.runtime import settings, shared_errors  # noqa: E402

TENSORFLOW_VERSIONS = ">=2.16,<2.23"


def no_tensorflow(python: str) -> str:
    """Return what to do where the Python of this path has no TensorFlow, in two or three lines."""
    other = "\nIt has PyTorch: for that, set KERAS_BACKEND=torch, and install keras."
    spec = importlib.util.find_spec("torch") if python == sys.executable else None
    has_torch = spec is not None and spec.origin is not None  # no mere folder of this name
    return (
        f"hvd_keras needs TensorFlow, and {python} has none. Run\n"
        f"'{python} -m pip install \"tensorflow{TENSORFLOW_VERSIONS}\"', or "
        f'"tensorflow[and-cuda]…" for NVIDIA\'s GPUs.{other * has_torch}'
    )


def _without_tensorflow(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """``sys.excepthook`` where TensorFlow, which brings Keras, is missing."""
    if isinstance(error, ModuleNotFoundError) and error.name in ("tensorflow", "keras"):
        print(no_tensorflow(sys.executable), file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


if importlib.util.find_spec("tensorflow") is None:
    sys.excepthook = _without_tensorflow


def _homes() -> dict[str, str]:
    """Map each public name to its module, and each public module to "", as in ``__init__.pyi``."""
    stub = ast.parse(pathlib.Path(__file__).with_suffix(".pyi").read_text("utf-8"))
    return {
        name.name: "" if statement.module == __name__ else str(statement.module)
        for statement in stub.body
        if isinstance(statement, ast.ImportFrom)
        for name in statement.names
    }


# Names are loaded when first used, so that hvdrun, a part of this package, needs no TensorFlow.
_HOMES = _homes()

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hvd_keras' has no attribute {name!r}")
    settings.tell_hvdrun(mark=settings.ASKED_FOR)
    shared_errors.install()
    home = _HOMES[name]
    if settings.keras_backend() != "tensorflow":
        rooms = importlib.import_module(f"hvd_keras.{settings.keras_backend()}")
        home, name = rooms.home(home, name)
    try:
        module = importlib.import_module(home or f"hvd_keras.{name}")
    except ImportError as error:
        # Many programs take an ImportError for "not installed", and then train without the others.
        if error.name == "tensorflow":
            raise RuntimeError(no_tensorflow(sys.executable)) from None
        raise RuntimeError(
            f"hvd_keras is installed, but hvd_keras.{name} does not load: {error}"
        ) from error
    if not home:
        return module
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
