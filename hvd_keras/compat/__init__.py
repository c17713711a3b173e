"""For scripts written for TensorFlow 1, tf_keras or Horovod's build questions; nothing else."""
