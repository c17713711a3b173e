"""``hvd.data`` on TensorFlow: what it was given, as a ``tf.data.Dataset``."""
