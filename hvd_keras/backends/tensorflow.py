"""Keras on TensorFlow: what ``init`` does for it."""

from hvd_keras.hooks import patches
from hvd_keras.ops import gradients
from hvd_keras.runtime import gpu, libraries

del gradients  # importing it has registered them

#: Before the job is joined: load the ops.
load = libraries.tensorflow_ops
#: Give this process its GPU: by local rank, and the number of processes of its host.
pin = gpu.pin
#: Change Keras for several ranks.
install = patches.install
#: What ``hvd_keras.check`` prints of it, and the names of the GPUs.
facts = libraries.tensorflow_facts
