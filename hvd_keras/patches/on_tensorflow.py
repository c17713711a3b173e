"""Keras on TensorFlow: what ``init`` does for it."""

from hvd_keras.ops import derivatives
from hvd_keras.patches import registry
from hvd_keras.runtime import gpu, libraries

del derivatives  # importing it has registered them

#: Before the job is joined: load the ops.
load = libraries.tensorflow_ops
#: Give this process its GPU: by local rank, and the number of processes of its host.
pin = gpu.pin
#: Change Keras for several ranks.
install = registry.install
#: What ``hvd_keras.check`` prints of it, and the names of the GPUs.
facts = libraries.tensorflow_facts
