"""Data-parallel training for Keras 3 on TensorFlow, with Horovod's API.

A Keras script trains on several processes with these lines::

    import hvd_keras as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
    model.compile(optimizer=optimizer, loss=...)
    data = hvd.data.shard((x, y), batch_size=32)
    model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

Start it with ``hvdrun -np 4 python train.py``.
"""

import ast
import importlib
import importlib.util
import pathlib
import sys
from typing import Any

from hvd_keras import settings

__version__ = "0.1.0"


def _homes() -> dict[str, str]:
    """Maps each public name to its module, and each public module to "", as in ``__init__.pyi``."""
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

if importlib.util.find_spec("hvd_keras.callbacks") is None:
    raise ImportError(
        f"hvd_keras was imported from its source folder, {__path__[0]}, which is incomplete. "
        "Run 'pip install -e .' there, or start Python from another directory."
    )


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hvd_keras' has no attribute {name!r}")
    settings.tell_hvdrun(mark=settings.ASKED_FOR)
    home = _HOMES[name]
    try:
        module = importlib.import_module(home or f"hvd_keras.{name}")
    except ImportError as error:
        # Many programs take an ImportError for "not installed", and then train without the others.
        if error.name == "tensorflow":
            raise RuntimeError(
                f"hvd_keras needs TensorFlow, and {sys.executable} has none. Run 'pip install "
                '"hvd_keras[cpu]"\', or "hvd_keras[gpu]" on a machine with NVIDIA\'s GPUs.'
            ) from error
        raise RuntimeError(
            f"hvd_keras is installed, but hvd_keras.{name} does not load: {error}"
        ) from error
    if not home:
        return module
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
