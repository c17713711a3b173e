"""All of the Python side's dealings with the environment, in one place.

The core reads its own settings (native/core/settings.h) in the same manner.
"""

import dataclasses
import functools
import os


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of this process.

    Attributes:
        bucket_bytes: ``HVD_BUCKET_BYTES``, the bytes of gradients that travel as one request.
            More per request means fewer agreements; less means that a request can start earlier.
    """

    bucket_bytes: int = 64 << 20


@functools.cache
def read() -> Settings:
    """Reads the environment once.

    Raises:
        ValueError: a variable is set to something that it cannot be.
    """
    text = os.environ.get("HVD_BUCKET_BYTES", "")
    if not text:
        return Settings()
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(
            f"HVD_BUCKET_BYTES is {text!r}, expected a number of bytes, 1 or more. "
            "Correct or unset it."
        )
    return Settings(bucket_bytes=int(text))


def point_mpi4py_at(mpi_library: str) -> None:
    """Lets a later import of mpi4py take this MPI library, unless the user chose one."""
    os.environ.setdefault("MPI4PY_LIBMPI", os.path.realpath(mpi_library))
