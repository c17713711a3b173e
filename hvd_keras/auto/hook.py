"""Lets the steps of Keras's models and the script's own ``tf.function`` run on all ranks."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from hvd_keras.auto.run import Divided, another_trace, function, is_again
from hvd_keras.gradients import agreement
from hvd_keras.runtime import settings
from hvd_keras.runtime.keras import check_choice, replaced

#: Why a script of tf_keras is refused.
LEGACY = "hvdrun --auto needs Keras 3, and {}. Leave out --auto, or see docs/migrating.md."
_DIVIDED = "_hvd_divided"  # of a tf.function of the script; False: it is of a library


def _check_keras(trains_legacy: bool = False) -> None:
    """Raise RuntimeError if the script means another Keras than the one imported before it."""
    if settings.wants_legacy_keras() or trains_legacy:
        raise RuntimeError(LEGACY.format("this script uses tf_keras"))
    check_choice()


def make(of_keras: Callable[..., Any], model: Any, force: bool = False) -> Any:
    """Replace ``Model.make_train_function``, or that of "test" or "predict"."""
    with model.distribute_strategy.scope():  # as fit uses it
        agreement.refuse_strategies()
    _, kind, _ = of_keras.__name__.split("_")
    attribute, name = f"{kind}_function", f"{kind}_step"
    if model.run_eagerly or tf.config.functions_run_eagerly():
        return of_keras(model, force)
    if getattr(model, attribute) is None or force:
        _check_keras()
        of_keras(model, force)
        of_model = getattr(model, name)

        def body(data: Any) -> Any:
            with _counting_rows(model, data) if is_again.get() else contextlib.nullcontext():
                return of_model(data)

        # As Keras traces it.
        options = {"jit_compile": model.jit_compile, "reduce_retracing": True}
        whole = function(body, autograph=False, **options)
        step = Divided(whole, whole, f"the {name} of model {model.name!r}")
        if kind == "predict":
            run = functools.partial(_predict, step)
        else:
            run = functools.partial(_run, model, step, getattr(model, attribute))
        setattr(model, attribute, run)
    return getattr(model, attribute)


@contextlib.contextmanager
def _counting_rows(model: Any, data: Any) -> Iterator[None]:
    """Let the mean losses of outputs count by rows, as where Keras knows the number."""
    with contextlib.ExitStack() as stack:
        for metric in getattr(getattr(model, "_compile_loss", None), "metrics", ()):
            update = functools.partial(_count, metric.update_state, data)
            stack.enter_context(replaced(metric, "update_state", update))
        yield


def _count(update: Any, data: Any, value: Any, sample_weight: Any = None) -> Any:
    if sample_weight is None:
        sample_weight = tf.shape(tf.nest.flatten(data)[0])[0]
    return update(value, sample_weight=sample_weight)


def _run(model: Any, step: Divided, of_keras: Callable[[Any], Any], iterator: Any) -> Any:
    """Take batches outside of the function that computes with them."""
    spec = getattr(iterator, "element_spec", None)
    of = "" if spec is None else step.trace(spec)
    try:
        batch = next(iterator)
    except StopIteration:
        # Keras finds the end of unknown data in a step, which may then have counted as one.
        with another_trace():
            return of_keras(iterator)
    outputs = step.step(of, _without_optional(batch))
    for batch in itertools.islice(iterator, model.steps_per_execution - 1):
        outputs = step.step(of, _without_optional(batch))
    return outputs


def _without_optional(batch: Any) -> Any:
    """Return a batch as Keras gives it to a step."""
    return tf.nest.map_structure(
        lambda x: None if isinstance(x, tf.experimental.Optional) else x, batch
    )


def _predict(step: Divided, batches: Any) -> Any:
    first, *more = [step(_without_optional(batch)) for batch in batches]
    if not more:
        return first
    return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), first, *more)


_LIBRARIES = {"keras", "tensorflow", "tf_keras", "hvd_keras"}


def call(of_tensorflow: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the call of a ``tf.function``: what the script calls with a batch is divided."""
    divided = vars(self).get(_DIVIDED)
    if not tf.executing_eagerly() or tf.config.functions_run_eagerly() or divided is False:
        return of_tensorflow(self, *args, **kwargs)
    if divided is None:
        body = self.python_function
        module = str(getattr(body, "__module__", "")).partition(".")[0]
        _check_keras(module == "tf_keras" and body.__name__ == "train_function")
        is_own = module not in _LIBRARIES
        name = f"{getattr(body, '__name__', 'a function')}()"
        divided = is_own and Divided(self, functools.partial(of_tensorflow, self), name)
        setattr(self, _DIVIDED, divided)
    return divided(*args, **kwargs) if divided else of_tensorflow(self, *args, **kwargs)
