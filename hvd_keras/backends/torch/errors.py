"""The errors of collectives, with the names that TensorFlow's have."""


class CollectiveError(RuntimeError):
    """A collective has failed, on this rank or on all."""


class AbortedError(CollectiveError):
    """Another rank has left the job."""


class DeadlineExceededError(CollectiveError):
    """A rank has waited for too long."""


class FailedPreconditionError(CollectiveError):
    """The ranks ask for different things."""


class InvalidArgumentError(CollectiveError):
    """A rank cannot run its request."""


_KINDS = {kind.__name__: kind for kind in CollectiveError.__subclasses__()}


def make(name: str, text: str) -> Exception:
    """Return an error by its name."""
    return _KINDS.get(name, CollectiveError)(text)
