"""Inputs that differ by rank and element and have exact sums, so that tests compare bits."""

import pathlib

import numpy as np


def tensor(rank: int, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """Returns small integers, whose sums over few ranks are exact even in float16 and int8."""
    index = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    return ((index * 3 + rank * 5) % 7 + rank + 1).astype(dtype)


def of_all_ranks(size: int, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """Returns every rank's tensor, stacked by rank."""
    return np.stack([tensor(rank, shape, dtype) for rank in range(size)])


def damage(path: pathlib.Path, place: int | None = None) -> None:
    """Flips a bit of a file, by default in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place % len(content)] ^= 1
    path.write_bytes(content)
