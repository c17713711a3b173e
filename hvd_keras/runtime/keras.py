"""The Keras in use: Keras 3, or tf_keras if ``tf.keras`` is that (``TF_USE_LEGACY_KERAS=1``).

TensorFlow decides, so that scripts and hvd_keras use the same classes.
"""

from typing import Any

import tensorflow as tf

_BACKEND = (
    "hvd_keras needs the TensorFlow backend of Keras, and {} is chosen. Set "
    'KERAS_BACKEND=tensorflow, or "backend": "tensorflow" in ~/.keras/keras.json.'
)

try:
    is_legacy: bool = tf.keras.Model.__module__.startswith("tf_keras")
except ImportError as error:
    missing = getattr(error.__context__, "name", None)
    if missing in (None, "keras", "tf_keras"):
        raise
    raise RuntimeError(_BACKEND.format(f"one that needs the package {missing}")) from error

if is_legacy:
    import tf_keras as keras
else:
    import keras

    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(_BACKEND.format(keras.backend.backend()))

# What Keras 3 calls its batches by index; tf_keras has the older name only.
PyDataset = keras.utils.Sequence if is_legacy else keras.utils.PyDataset

# For isinstance(): the class that wraps a tf.Variable. tf_keras has none. In older Keras 3, layers'
# variables are no keras.Variable, but of its base.
Variable = () if is_legacy else keras.Variable.__bases__[0]

__all__ = ["PyDataset", "Variable", "is_legacy", "keras", "require"]

# Those whose private attributes are known, see hooks/patches.py. The newest that an older Python
# can install is among them.
KERAS_VERSIONS = "keras>=3.6,<3.16"


def require(owner: Any, attribute: str, reason: str) -> None:
    """Look for something of Keras that its documentation does not promise.

    Raises:
        RuntimeError: it is not there.
    """
    if not hasattr(owner, attribute):
        owner_name = getattr(owner, "__name__", type(owner).__name__)
        raise RuntimeError(
            f"hvd_keras needs {owner_name}.{attribute} {reason}, and Keras {keras.__version__} "
            f'does not have it. Run: pip install "{KERAS_VERSIONS}"'
        )
