"""What embeddings.py and with_torchrec.py look up, which have no environment in common."""

import argparse

import numpy as np

IDS = 26  # of one sample


def parser(description: str) -> argparse.ArgumentParser:
    """Returns a parser of the options that both have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--rows", type=int, default=200_000, help="of a table (default 200000)")
    made.add_argument("--width", type=int, default=64, help="of a row (default 64)")
    made.add_argument("--batch", type=int, default=1024, help="samples of a rank (default 1024)")
    made.add_argument("--repeats", type=int, default=20, help="(default 20)")
    return made


def ids(rank: int, options: argparse.Namespace) -> np.ndarray:
    """Returns a rank's ids [batch, IDS], whose frequencies follow a power law."""
    drawn = np.random.default_rng(rank).zipf(1.2, (options.batch, IDS))
    return np.minimum(drawn, options.rows) - 1
