"""What ``init`` and ``auto`` change in Keras on TensorFlow, and nothing else."""
