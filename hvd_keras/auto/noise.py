"""Random numbers in a step: each rank gets its rows of those that one process draws."""

import contextvars
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import stateless_random_ops

from hvd_keras.gradients.division import Part
from hvd_keras.runtime import log, rank_info

#: Those of the step that runs now, or is traced: its part, None for all rows, and seeds for draws
#: from TensorFlow's global generator.
current: contextvars.ContextVar[Any] = contextvars.ContextVar("draws", default=(None, None))


def draws(part: Part | None) -> tuple[Part | None, Iterator[int]]:
    """The random numbers of a step: equal in each graph of it, and on all ranks."""
    return part, itertools.count(1 << 20)


def draw(of_shape: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace a function of a shape: it draws for all rows, as one process does."""
    part, _ = current.get()
    if part is None:
        return of_shape(*args, **kwargs)
    if "shape" in kwargs:
        shape = kwargs.pop("shape")
        return _rows(lambda whole: of_shape(*args, shape=whole, **kwargs), shape, part)
    place = int(isinstance(args[0], tf.random.Generator))  # a method has its object before
    before, after = args[:place], args[place + 1 :]
    return _rows(lambda whole: of_shape(*before, whole, *after, **kwargs), args[place], part)


def _rows(of_shape: Callable[[Any], Any], shape: Any, part: Part) -> Any:
    """This rank's rows of what is drawn for all, if the shape is that of this rank's rows."""
    sizes = shape if tf.is_tensor(shape) else list(shape)
    if tf.get_static_value(tf.size(sizes)) == 0:
        return of_shape(shape)
    first, mine = sizes[0], part.stop - part.start
    known = tf.get_static_value(first) if tf.is_tensor(first) else int(first)
    if known is not None and not (isinstance(mine, int) and known % mine == 0):
        return of_shape(shape)  # a fixed number
    # Perhaps several for each row, in the order of tf.concat.
    blocks, is_rows = first // mine, tf.equal(first % mine, 0)
    rest = tf.cast(sizes[1:], tf.int32)
    drawn = of_shape(tf.concat([[tf.where(is_rows, blocks * part.rows, first)], rest], 0))

    def of_rows() -> Any:
        table = tf.reshape(drawn, tf.concat([[blocks, part.rows], rest], 0))
        return tf.reshape(table[:, part.start : part.stop], tf.concat([[first], rest], 0))

    drawn = tf.cond(is_rows, of_rows, lambda: drawn)
    if not tf.is_tensor(sizes):
        known_rest = [None if tf.is_tensor(s) else int(s) for s in sizes[1:]]
        drawn = tf.ensure_shape(drawn, [known, *known_rest])
    return drawn


def draw_global(of_shape: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace a function that draws from TensorFlow's global generator."""
    _, seeds = current.get()
    if seeds is not None and len(args) < 5 and kwargs.get("seed") is None:  # the fifth
        kwargs["seed"] = next(seeds)
        if rank_info.rank() == 0:
            log.warn_once(
                "some random numbers in a step are not those of one process, so results are equal "
                "only on average. Those of keras.random and tf.random.Generator are equal."
            )
    return draw(of_shape, *args, **kwargs)


def refuse(of_more: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace a function of more than a shape: a step that calls it is not divided."""
    if current.get()[0] is not None:
        raise ValueError(f"hvdrun --auto cannot divide {of_more.__name__} in a step")
    return of_more(*args, **kwargs)


_KINDS, _OTHERS = ("normal", "uniform", "truncated_normal"), ("categorical", "gamma", "poisson")

#: What is replaced: owner, attribute, function.
REPLACED: list[tuple[Any, str, Callable[..., Any]]] = [
    (stateless_random_ops, "stateless_random_uniform", draw),  # of dropout
    *((tf.random, f"stateless_{kind}", draw) for kind in _KINDS),
    *((tf.random, kind, draw_global) for kind in _KINDS),
    *((tf.random.Generator, kind, draw) for kind in _KINDS),
    *((tf.random, f"stateless_{kind}", refuse) for kind in (*_OTHERS, "binomial")),
    *((tf.random, kind, refuse) for kind in (*_OTHERS, "shuffle")),
    (tf.random.experimental, "stateless_shuffle", refuse),
]
