"""The launcher `hvdrun`: starts the ranks of a job with mpirun and tells the truth about their end.

Nothing in this package imports TensorFlow, Keras or MPI: the launcher must start at once.
"""


class UsageError(Exception):
    """The job cannot be started as asked; the text says what was got, expected and what to do."""
