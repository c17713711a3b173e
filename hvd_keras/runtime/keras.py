"""The Keras in use: Keras 3, or tf_keras if ``tf.keras`` is that (``TF_USE_LEGACY_KERAS=1``).

TensorFlow decides, so that scripts and hvd_keras use the same classes; unless Keras runs on torch.
"""

import contextlib
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from hvd_keras.runtime import settings

is_legacy: bool = False
optimizer_classes: tuple[type, ...] = ()
#: A block in which values are computed at once, although TensorFlow traces a function; and in which
#: TensorFlow is not imported.
outside_graphs: Any
is_symbolic: Any = lambda tensor: False  # noqa: E731
#: Whether operations are computed at once, and the graph in which they are.
is_eager: Any = lambda: True  # noqa: E731
graph: Any = lambda: None  # noqa: E731
#: Whether something records what eager code computes, to take gradients.
is_recording: Any = lambda: True  # noqa: E731
#: Returns a script's function as AutoGraph converts it, where it converts what calls us.
converted: Callable[[Any], Any] = lambda function: function  # noqa: E731
#: Returns the array that a variable has now, even if it changes later.
snapshot: Any = np.array
#: Lets an optimizer change variables so that a snapshot costs no copy.
replace_values: Any = lambda optimizer: None  # noqa: E731
#: Whether this process computes on a GPU with kernels whose sums have no fixed order.
has_gpu: Callable[[], bool] = lambda: False  # noqa: E731
#: Writes summaries for TensorBoard, if there is a framework for it.
summary: Any = None
if settings.keras_backend() == "torch":
    import keras as keras
    import torch

    flatten: Any = keras.tree.flatten
    pack: Any = keras.tree.pack_sequence_as

    @contextlib.contextmanager
    def outside_graphs() -> Iterator[None]:  # noqa: D103
        # For a configuration Keras imports TensorFlow, to find out whether it is there.
        lazy = importlib.import_module("keras.src.utils.module_utils").tensorflow
        with replaced(lazy, "_available", bool(lazy._available)):
            yield

    def values_of(variable: Any) -> Any:
        """Return an array of the values of a variable; here, of their bytes."""
        values = getattr(variable, "value", variable).detach().cpu()
        return values.contiguous().reshape(-1).view(torch.uint8).numpy()  # NumPy has no bfloat16

    def scaling(buffers: list[Any]) -> Callable[[float], None]:
        """Return a function that multiplies variables by a number, as each batch of a warm-up."""

        def scale(factor: float) -> None:
            for buffer in buffers:
                buffer.assign(buffer * factor)

        return scale
else:
    import tensorflow as tf
    from tensorflow.python.autograph.core import config
    from tensorflow.python.eager import record

    # AutoGraph converts none of this package, as none of Keras: that would take a second for each
    # collective, and some of its code cannot be converted.
    config.CONVERSION_RULES += (config.DoNotConvert("hvd_keras"),)
    outside_graphs, is_symbolic = tf.init_scope, tf.is_symbolic_tensor
    is_eager, graph = tf.executing_eagerly, tf.compat.v1.get_default_graph
    is_recording = record.could_possibly_record
    flatten, pack = tf.nest.flatten, tf.nest.pack_sequence_as
    summary = tf.summary

    def converted(function: Any) -> Any:  # noqa: D103
        autograph = tf.__internal__.autograph
        return autograph.tf_convert(function, autograph.control_status_ctx())

    def has_gpu() -> bool:  # noqa: D103
        return bool(tf.config.get_visible_devices("GPU"))

    def values_of(variable: Any) -> Any:  # noqa: D103
        return np.asarray(tf.convert_to_tensor(variable))

    def scaling(buffers: list[Any]) -> Callable[[float], None]:  # noqa: D103
        def scale(factor: tf.Tensor) -> None:
            for buffer in buffers:
                buffer.assign(buffer * tf.cast(factor, buffer.dtype))

        # TensorFlow warns of several functions of this code as of one that is traced too often.
        function = tf.function(scale, autograph=False)
        traced = function.get_concrete_function(tf.TensorSpec([], tf.float32))
        return lambda factor: traced(tf.constant(factor, tf.float32))

    def snapshot(variable: Any) -> Any:  # noqa: D103
        # On a CPU without a copy: TensorFlow copies what is changed in place meanwhile.
        return np.asarray(tf.convert_to_tensor(variable))

    _LARGE = 1 << 18  # elements: for smaller variables the additional operations cost more

    def replace_values(optimizer: Any) -> None:  # noqa: D103
        for name, operation in (("assign_add", tf.add), ("assign_sub", tf.subtract)):
            setattr(optimizer, name, functools.partial(_replace, optimizer, name, operation))

    def _replace(optimizer: Any, name: str, operation: Any, variable: Any, value: Any) -> None:
        # The sum takes the memory of the other summand, so this costs what adding in place does.
        if isinstance(value, tf.IndexedSlices) or math.prod(variable.shape) < _LARGE:
            getattr(type(optimizer), name)(optimizer, variable, value)
            return
        now = tf.convert_to_tensor(variable)
        optimizer.assign(variable, operation(now, tf.cast(value, now.dtype)))

    is_legacy = tf.keras.Model.__module__.startswith("tf_keras")
    if is_legacy:
        import tf_keras as keras

        optimizer_classes = (keras.optimizers.legacy.Optimizer,)
    else:
        import keras as keras
    optimizer_classes += (tf.compat.v1.train.Optimizer,)
optimizer_classes += (keras.optimizers.Optimizer,)


def check_choice() -> None:
    """Raise RuntimeError if another backend of Keras is chosen now than the imported one."""
    if not is_legacy and keras.backend.backend() != settings.keras_backend():
        raise RuntimeError(
            f"Keras was imported with the backend {keras.backend.backend()}, and KERAS_BACKEND (or "
            f"~/.keras/keras.json) now says {settings.keras_backend()}. Set it before the first "
            "import."
        )


check_choice()

# What Keras 3 calls its batches by index; tf_keras has the older name only.
PyDataset = keras.utils.Sequence if is_legacy else keras.utils.PyDataset

# For isinstance(): the class that wraps a tf.Variable. tf_keras has none. In older Keras 3, layers'
# variables are no keras.Variable, but of its base.
Variable = () if is_legacy else keras.Variable.__bases__[0]

# Those whose private attributes are known, see patches/registry.py. The newest that an older Python
# can install is among them.
KERAS_VERSIONS = "keras>=3.6,<3.16"


def is_of_keras(one: Any) -> bool:
    """Whether a class or a function is Keras's, or a method."""
    return str(getattr(one, "__module__", "")).startswith(("keras.", "tf_keras."))


def call_loss(loss: Any, call: Any, *arguments: Any, keeps: bool = True) -> tuple[Any, Any]:
    """Call ``keras.losses.Loss.__call__``; return its result, and what it reduced to that.

    The latter is None if the loss did not use its method ``call``, or without ``keeps``.
    """
    seen: list[Any] = []
    local = loss.call

    def kept(*args: Any, **kwargs: Any) -> Any:
        seen.append(local(*args, **kwargs))
        return seen[0]

    with replaced(loss, "call", kept) if keeps else contextlib.nullcontext():
        value = call(loss, *arguments)
    return value, seen[0] if seen else None


def divisors(loss: Any, values: Any, y_pred: Any, sample_weight: Any) -> list[Any]:
    """What a loss divides by the sum of: its masks and weights; none of a fixed number of terms."""
    reduction = getattr(loss, "reduction", None)
    if reduction in (None, "none", "sum"):
        return []
    weights = [getattr(tensor, "_keras_mask", None) for tensor in (y_pred, values)]
    if reduction == "mean_with_sample_weight":
        weights.append(sample_weight)
    return [weight for weight in weights if weight is not None]


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside a LossScaleOptimizer; other optimizers unchanged."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def innermost_of(optimizers: Iterable[Any]) -> list[Any]:
    """Return what ``innermost`` returns for optimizers, each once."""
    return list({id(one): one for one in map(innermost, optimizers)}.values())


def require(owner: Any, attribute: str, reason: str) -> None:
    """Look for something of Keras that its documentation does not promise.

    Raises:
        RuntimeError: it is not there.
    """
    if not hasattr(owner, attribute):
        owner_name = getattr(owner, "__name__", type(owner).__name__)
        raise RuntimeError(
            f"hvd_keras needs {owner_name}.{attribute} {reason}, and Keras {keras.__version__} "
            f'does not have it. Run: pip install "{KERAS_VERSIONS}"'
        )


def replace(owner: Any, attribute: str, new: Callable[..., Any]) -> None:
    """Let a function take another one's place, and get it as its first argument."""
    old = getattr(owner, attribute)

    @functools.wraps(old)
    def call(*args: Any, **kwargs: Any) -> Any:
        return new(old, *args, **kwargs)

    if inspect.ismodule(owner):  # where pickle finds it
        call.__module__, call.__qualname__ = owner.__name__, attribute
    setattr(owner, attribute, call)


@contextlib.contextmanager
def replaced(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object in a block; then it has again what it had itself, if any."""
    own = vars(owner)
    before = {attribute: own[attribute]} if attribute in own else {}
    own[attribute] = value  # not by __setattr__: Keras's tracks variables
    try:
        yield
    finally:
        own.pop(attribute, None)
        own.update(before)


def overrides(one: Any, *names: str, of: Any = keras.Model) -> bool:
    """Whether a model, or the class of an object, has a method of its own in place of Keras's."""
    own = vars(one) if of is keras.Model else {}  # in optimizers, those of a reducer

    def method(name: str) -> Any:
        found = own.get(name, getattr(type(one), name, None))
        found = getattr(found, "_hvd_alone", found)  # what a weighed step calls
        return getattr(found, "__func__", found)

    return any(method(name) is not getattr(of, name, None) for name in names)
