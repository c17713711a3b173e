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
import pathlib
import sys

#: The folder that holds the package ``horovod``.
PATH = str(pathlib.Path(__file__).parent / "path")


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
