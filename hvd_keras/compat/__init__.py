"""Support for scripts for TensorFlow 1 and tf_keras."""
