"""Random numbers in a step: each rank gets its rows of those that one process draws."""

import contextvars
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_keras.gradients.division import Part
from hvd_keras.runtime import log, rank_info


@dataclasses.dataclass
class Draws:
    """The random numbers of a step."""

    part: Part | None  # None: of all rows
    count: int = 0  # draws from TensorFlow's global generator


#: Those of the step that runs now, or is traced.
current: contextvars.ContextVar[Draws | None] = contextvars.ContextVar("draws", default=None)

_drawn_uniform = tf.random.uniform
_SEED = 1 << 20


def wrap_draw(draw: Callable[..., Any], is_method: bool = False) -> Callable[..., Any]:
    """Wrap a function of a shape, which draws as many numbers as one process does."""

    @functools.wraps(draw)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        own = current.get()
        place = int(is_method)
        if own is None or own.part is None:
            return draw(*args, **kwargs)
        if "shape" in kwargs:
            args = (*args[:place], kwargs.pop("shape"), *args[place:])
        before, shape, after = args[:place], args[place], args[place + 1 :]
        return _rows(lambda whole: draw(*before, whole, *after, **kwargs), shape, own.part)

    return drawn


def _rows(draw: Callable[[Any], Any], shape: Any, part: Part) -> Any:
    """This rank's rows of what is drawn for all, if the shape is that of this rank's rows."""
    sizes: Any = shape if tf.is_tensor(shape) else list(shape)
    if len(sizes) == 0 if isinstance(sizes, list) else sizes.shape == (0,):
        return draw(shape)
    first, mine = sizes[0], part.stop - part.start
    known = tf.get_static_value(first) if tf.is_tensor(first) else int(first)
    if known is not None and not (isinstance(mine, int) and known % mine == 0):
        return draw(shape)  # a fixed number
    if known is not None and known != mine:
        raise ValueError(
            f"hvdrun --auto: a step draws random numbers for {known} rows, perhaps those of the "
            "batch. Take the number of rows from the data: tf.shape(x)[0]."
        )
    # Perhaps several for each row, in the order of tf.concat.
    blocks, is_rows = first // mine, tf.equal(first % mine, 0)
    rest = tf.cast(sizes[1:], tf.int32)
    drawn = draw(tf.concat([[tf.where(is_rows, blocks * part.rows, first)], rest], 0))

    def of_rows() -> Any:
        table = tf.reshape(drawn, tf.concat([[blocks, part.rows], rest], 0))
        return tf.reshape(table[:, part.start : part.stop], tf.concat([[first], rest], 0))

    drawn = tf.cond(is_rows, of_rows, lambda: drawn)
    if not tf.is_tensor(sizes):
        known_rest = [None if tf.is_tensor(s) else int(s) for s in sizes[1:]]
        drawn = tf.ensure_shape(drawn, [known, *known_rest])
    return drawn


def wrap_global(stateless: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a wrapper of a function that draws from the global generator, like ``stateless``."""

    def wrap(draw: Any) -> Any:
        @functools.wraps(draw)
        def drawn(shape: Any, *args: Any, seed: Any = None, **kwargs: Any) -> Any:
            own = current.get()
            if own is None:
                return draw(shape, *args, seed=seed, **kwargs)
            # The same in each graph of this step, and on all ranks.
            own.count += 1
            seed = _SEED + own.count if seed is None else seed
            seeds = _drawn_uniform([2], maxval=2**31 - 1, dtype=tf.int32, seed=seed)
            _tell()
            return stateless(shape, seeds, *args, **kwargs)

        return drawn

    return wrap


def wrap_dropout(dropout: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``tf.nn.experimental.stateless_dropout``."""

    @functools.wraps(dropout)
    def dropped(
        x: Any, rate: Any, seed: Any, rng_alg: Any = None, noise_shape: Any = None, name: Any = None
    ) -> Any:
        if current.get() is None:
            return dropout(x, rate, seed, rng_alg, noise_shape, name)
        shape = tf.shape(x) if noise_shape is None else noise_shape
        drawn = tf.random.stateless_uniform(
            shape, seed, dtype=x.dtype, alg=rng_alg or "auto_select"
        )
        kept = tf.where(drawn >= rate, x * tf.cast(1 / (1 - rate), x.dtype), tf.zeros([], x.dtype))
        return tf.ensure_shape(kept, x.shape)

    return dropped


def refuse(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of more than a shape: a step that calls it is not divided."""

    @functools.wraps(draw)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        own = current.get()
        if own is not None and own.part is not None:
            raise ValueError(f"hvdrun --auto cannot divide {draw.__name__} in a step")
        return draw(*args, **kwargs)

    return drawn


def _tell() -> None:
    if rank_info.rank() == 0:
        log.warn_once(
            "some random numbers in a step are others than those of one process, so the results "
            "are equal only on average. Those of keras.random and tf.random.Generator are equal."
        )


def patches() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """What is changed: owner, attribute, wrapper."""
    kinds = ("normal", "uniform", "truncated_normal")

    def method(draw: Any) -> Any:
        return wrap_draw(draw, is_method=True)

    def late(kind: str) -> Callable[[Any], Any]:
        def stateless(*args: Any, **kwargs: Any) -> Any:  # as it is changed
            return getattr(tf.random, f"stateless_{kind}")(*args, **kwargs)

        return wrap_global(stateless)

    others = ("categorical", "gamma", "poisson")
    return [
        *((tf.random, f"stateless_{kind}", wrap_draw) for kind in kinds),
        *((tf.random, kind, late(kind)) for kind in kinds),
        *((tf.random.Generator, kind, method) for kind in kinds),
        *((tf.random, f"stateless_{kind}", refuse) for kind in (*others, "binomial")),
        *((tf.random, kind, refuse) for kind in (*others, "shuffle")),
        (tf.random.experimental, "stateless_shuffle", refuse),
        (tf.nn.experimental, "stateless_dropout", wrap_dropout),
    ]
