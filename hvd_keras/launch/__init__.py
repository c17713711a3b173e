"""The launcher `hvdrun`: starts the ranks of a job with mpirun and judges how the job ended.

Here: the command line, what the user asked for, the order of events, and the connections to the
ranks. Nothing in this package imports TensorFlow, Keras or MPI: the launcher must start at once.
"""

import sys

if sys.platform != "linux":
    raise SystemExit(f"hvdrun: got {sys.platform}; expected Linux, perhaps in a container or WSL 2")
