"""The Keras in use: Keras 3, or tf_keras if ``tf.keras`` is that (``TF_USE_LEGACY_KERAS=1``).

TensorFlow decides, so that scripts and hvd_keras use the same classes.
"""

import tensorflow as tf

is_legacy: bool = tf.keras.Model.__module__.startswith("tf_keras")

if is_legacy:
    import tf_keras as keras
else:
    import keras

# For isinstance(): the class that wraps a tf.Variable. tf_keras has none.
Variable = () if is_legacy else keras.Variable

__all__ = ["Variable", "is_legacy", "keras"]
