"""Python generators, of which one process reads some batches ahead, another number in each run.

What it has read is lost when ``fit`` leaves the generator before its end. Ranks must read equally
many, so they read none ahead; where that may change the results, it is said.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras.runtime import log, rank_info

# Generators that have not ended; the last of them that drew from a source, and the state after it.
_begun: dict[int, Iterator[Any]] = {}
_drawn: dict[str, tuple[Iterator[Any], Any]] = {}


def peek(of_keras: Callable[..., Any], batches: Iterator[Any]) -> Any:
    """Replace the function to which Keras passes a generator first."""
    if id(batches) in _begun:
        _tell("it is read again")
    _begun[id(batches)] = batches
    return of_keras(_watched(batches))


def _watched(batches: Iterator[Any]) -> Iterator[Any]:
    before = _states()
    for batch in batches:
        for name, after in _states().items():
            if after != before[name]:
                if _drawn.get(name, (batches, before[name])) != (batches, before[name]):
                    _tell(f"it is not alone in drawing from {name}")
                _drawn[name] = batches, after
        yield batch
        before = _states()
    del _begun[id(batches)]
    for name in [name for name, (last, _) in _drawn.items() if last is batches]:
        del _drawn[name]


def _states() -> dict[str, Any]:
    # What tells that numbers were drawn; of NumPy without the large array.
    return {"np.random": tuple(np.random.get_state())[2:], "random": random.getstate()}


def check() -> None:
    """Tell at the end if random numbers were drawn after those of a generator."""
    for name, after in _states().items():
        if _drawn.get(name, ("", after))[1] != after:
            _tell(f"it is not alone in drawing from {name}")


def _tell(why: str) -> None:
    if rank_info.rank() == 0:
        log.warn_once(
            f"one process reads ahead of a generator, another number in each run, and {why}, so "
            "results may differ. Let it draw from np.random.default_rng(1) of its own."
        )


def without_prefetch(get_tf_dataset: Callable[..., Any], adapter: Any) -> Any:
    """Replace what makes a dataset of a generator."""
    (dataset,) = get_tf_dataset(adapter)._inputs()
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)
