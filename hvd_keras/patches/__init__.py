"""What ``init`` changes in Keras on TensorFlow, and nothing else."""
