"""The Keras in force: Keras 3, or tf_keras where ``tf.keras`` is that (``TF_USE_LEGACY_KERAS=1``).

TensorFlow decides, so that scripts and hvd_keras mean the same classes.
"""

import tensorflow as tf

is_legacy: bool = tf.keras.Model.__module__.startswith("tf_keras")

if is_legacy:
    import tf_keras as keras
else:
    import keras

# What wraps a tf.Variable, for isinstance(): nothing does in tf_keras.
Variable = () if is_legacy else keras.Variable

__all__ = ["Variable", "is_legacy", "keras"]
