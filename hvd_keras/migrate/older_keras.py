"""What Keras 2 had in another form."""

import ast
import re
from collections.abc import Iterator

from hvd_keras.migrate.source import Finding, Source
from hvd_keras.migrate.tensorflow_1 import PINNED

# The arguments of a method for generators, in their order; None: Keras 3 has none such.
_GENERATORS = {
    "fit_generator": (
        *("x", "steps_per_epoch", "epochs", "verbose", "callbacks", "validation_data"),
        *("validation_steps", "validation_freq", "class_weight", None, None, None, "shuffle"),
        "initial_epoch",
    ),
    "evaluate_generator": ("x", "steps", "callbacks", None, None, None, "verbose"),
    "predict_generator": ("x", "steps", "callbacks", None, None, None, "verbose"),
}
_OF_GENERATORS = ("max_queue_size", "workers", "use_multiprocessing", "pickle_safe")

_BACKEND = r"(tensorflow\.)?(python\.)?keras\.backend\."
_SESSIONS = {
    "set_session": "Keras 3 has no sessions: remove it, hvd.init() gives this process its GPU",
    "get_session": "Keras 3 has no sessions: remove it",
}
# Functions of Keras's backend that are methods of variables now.
_METHODS = {"get_value": "numpy", "set_value": "assign"}

_OTHER_GPUS = (
    "hvd.init() gives this process the GPU of its local rank, and an empty visible_device_list "
    "does not take it away; for none: tf.config.set_visible_devices([], 'GPU') before hvd.init()"
)

_H5 = re.compile(r"(?<!\.weights)\.h5$")  # a model's file, which is not of weights alone

_GENERATOR_MODULE = "keras.preprocessing.image"


def look(script: Source) -> Iterator[Finding]:
    """What must change."""
    of_keras, of_tensorflow_1 = _optimizers(script)
    loads = any(
        re.match(r"(horovod|hvd_keras)\b.*\.load_model$", script.meaning(node))
        for node in script.nodes
    )
    for node in script.nodes:
        if isinstance(node, ast.ImportFrom):
            yield from _look_at_import(script, node)
        elif isinstance(node, ast.Call):
            yield from _look_at_call(script, node)
            yield from _look_at_variables(script, node, of_keras, of_tensorflow_1)
        elif isinstance(node, ast.Attribute):
            yield from _look_at_attribute(script, node, of_keras)
        elif loads and isinstance(node, ast.Constant) and _H5.search(str(node.value)):
            yield script.at(node, "Keras 3 loads no optimizer's state from .h5: write .keras")


def _optimizers(script: Source) -> tuple[set[str], set[str]]:
    """The names that the script gives to optimizers of Keras, and to those of TensorFlow 1."""
    of_keras: set[str] = set()
    of_tensorflow_1: set[str] = set()

    def is_old(value: ast.AST) -> bool:
        match value:
            case ast.Name(name):
                return name in of_tensorflow_1
            case ast.Call(func, arguments, keywords):
                made = script.meaning(func)
                if made.endswith("DistributedOptimizer"):
                    return any(map(is_old, [*arguments[:1], *(k.value for k in keywords)]))
                return bool(re.search(r"\.train\.\w*Optimizer$", made))
        return False

    assignments = [node for node in script.nodes if isinstance(node, ast.Assign)]
    for node in sorted(assignments, key=script.place):
        match node.value:
            case ast.Call(func):
                names = {target.id for target in node.targets if isinstance(target, ast.Name)}
                if is_old(node.value):
                    of_tensorflow_1 |= names
                elif re.search(r"\.optimizers\.\w+$|Optimizer$", script.meaning(func)):
                    of_keras |= names
    return of_keras - of_tensorflow_1, of_tensorflow_1 - of_keras


def _look_at_variables(
    script: Source, node: ast.Call, of_keras: set[str], of_tensorflow_1: set[str]
) -> Iterator[Finding]:
    func = node.func
    if not isinstance(func, ast.Attribute) or func.attr != "variables":
        return
    owner = func.value.id if isinstance(func.value, ast.Name) else ""
    if node.args or node.keywords or owner in of_tensorflow_1:  # which have a method
        return
    is_sure = owner in of_keras or not re.search(r"compat\.v1|\.train\.\w*Optimizer\b", script.text)
    start, end = script.place(func)[1], script.place(node)[1]
    message = "variables is a list in Keras 3, no method"
    yield Finding(start, end, message, "" if is_sure else None)


def _look_at_import(script: Source, node: ast.ImportFrom) -> Iterator[Finding]:
    names = {alias.name for alias in node.names}
    if (node.module == _GENERATOR_MODULE and "ImageDataGenerator" in names) or (
        node.module == "keras.preprocessing" and "image" in names
    ):
        imported = ", ".join(map(script.source, node.names))
        new = f"from tensorflow.{node.module} import {imported}"
        yield script.at(node, f"Keras 3 has ImageDataGenerator there: {new}", new)


def _look_at_attribute(
    script: Source, node: ast.Attribute, optimizers: set[str]
) -> Iterator[Finding]:
    name = script.meaning(node)
    if re.fullmatch(_BACKEND + r"\w+", name):
        if node.attr in _SESSIONS:
            yield script.at(node, f"{node.attr}: {_SESSIONS[node.attr]}")
    elif name == "tensorflow.keras.mixed_precision.experimental":
        yield script.at(node, "keras.mixed_precision.set_global_policy(…)")
    if node.attr == "visible_device_list" or name.endswith(".set_visible_devices"):
        is_of_rank = "local_rank" in script.text.splitlines()[node.lineno - 1]
        yield script.at(node, PINNED if is_of_rank else _OTHER_GPUS)
    elif node.attr == "lr":
        owner = node.value
        last = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        end = script.place(node)[1]
        message = "lr of an optimizer is learning_rate in Keras 3"
        if last == "optimizer" or (isinstance(owner, ast.Name) and last in optimizers):
            yield Finding(end - len("lr"), end, message, "learning_rate")
        elif last == "opt":
            yield script.at(node, message)


def _look_at_call(script: Source, node: ast.Call) -> Iterator[Finding]:
    if not isinstance(node.func, (ast.Attribute, ast.Name)):
        return
    name = script.meaning(node.func)
    called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
    if called in _GENERATORS and isinstance(node.func, ast.Attribute):
        yield from _look_at_generator(script, node, node.func)
    elif called == "ImageDataGenerator" and not name.startswith("tensorflow."):
        message = (
            "Keras 3 has it in tensorflow.keras.preprocessing.image; prefer "
            "keras.utils.image_dataset_from_directory and layers such as keras.layers.RandomFlip"
        )
        if not name.startswith("keras.preprocessing."):  # whose import is changed
            yield script.at(node.func, message)
    elif called == "ModelCheckpoint" and not name.startswith("horovod."):
        yield script.at(
            node.func,
            "hvd.callbacks.ModelCheckpoint on all ranks: rank 0 writes, whole files only, and "
            "an error there reaches all",
        )
    elif called in _METHODS and re.match(_BACKEND, name):
        yield from _look_at_value(script, node, called)
    elif called == "compile":
        gone = [k for k in node.keywords if k.arg == "experimental_run_tf_function"]
        yield from script.without(node, gone)
    if re.search(r"(^|\.)optimizers\.\w+$", name):
        for keyword in node.keywords:
            if keyword.arg == "lr":
                new = f"learning_rate={script.source(keyword.value)}"
                yield script.at(keyword, f"Keras 3: {new}", new)
            elif keyword.arg == "decay":
                yield script.at(
                    keyword, "decay is gone: give learning_rate a keras.optimizers.schedules…"
                )


def _look_at_value(script: Source, node: ast.Call, called: str) -> Iterator[Finding]:
    """``K.set_value(x, 1)`` is ``x.assign(1)``, and ``K.get_value(x)`` is ``x.numpy()``."""
    message = f"{called}: Keras 3: x.{_METHODS[called]}(…)"
    count = 1 + (called == "set_value")
    if len(node.args) != count or not isinstance(node.args[0], (ast.Name, ast.Attribute)):
        yield script.at(node.func, message)
        return
    start, end = script.place(node.args[0])
    yield Finding(script.place(node.func)[0], start, message, "")
    after = script.place(node.args[1])[0] if count == 2 else end
    yield Finding(end, after, "", f".{_METHODS[called]}(")


def _look_at_generator(script: Source, node: ast.Call, func: ast.Attribute) -> Iterator[Finding]:
    order = _GENERATORS[func.attr]
    method = func.attr.removesuffix("_generator")
    message = f"Keras 3: {method}, without workers, max_queue_size and use_multiprocessing"
    has_stars = any(isinstance(argument, ast.Starred) for argument in node.args)
    if has_stars or len(node.args) > order.index(None):
        yield script.at(func, message)
        return
    end = script.place(func)[1]
    yield Finding(end - len(func.attr), end, message, method)
    for argument, place in list(zip(node.args, order, strict=False))[1:]:
        yield script.at(argument, "", f"{place}={script.source(argument)}")
    for keyword in node.keywords:
        if keyword.arg == "generator":
            yield script.at(keyword, "", f"x={script.source(keyword.value)}")
    yield from script.without(node, [k for k in node.keywords if k.arg in _OF_GENERATORS])
    given = {*order[: len(node.args)], *(keyword.arg for keyword in node.keywords)}
    if method != "fit" and "verbose" not in given and None not in given:
        # These two printed nothing by default.
        last = max(script.place(part)[1] for part in (*node.args, *node.keywords))
        yield Finding(last, last, "", ", verbose=0")
