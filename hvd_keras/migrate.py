"""``python -m hvd_keras.migrate train.py``: what to change in a script written for Horovod.

Prints one line per place, with what is to be written there. ``--write`` changes what is certain:
imports, arguments whose names or places differ, and calls that Keras 3 has in another form.
"""

import argparse
import ast
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import hvd_keras
from hvd_keras.horovod import names

#: Horovod's modules by the form of their collectives.
_KERAS_MODULES = ("horovod.keras", "horovod.tensorflow.keras")

#: Modules whose names hvd_keras, or its callbacks, have themselves.
_IMPORTED = (
    *("horovod", "horovod.tensorflow", "horovod.tensorflow.mpi_ops", *_KERAS_MODULES),
    *(f"{module}.callbacks" for module in _KERAS_MODULES),
)

#: The arguments of those by position, as hvd_keras calls them.
_KERAS_ARGUMENTS = {
    "allreduce": ("tensor", "name", "average", "prescale_factor", "postscale_factor", "op"),
    "allgather": ("tensor", "name"),
    "broadcast": ("tensor", "root_rank", "name"),
    "reducescatter": ("tensor", "name", "op"),
}

#: Arguments that hvd_keras does not have and does not need, by function.
_DROPPED = {
    "DistributedOptimizer": ("use_locking",),
    "BroadcastGlobalVariablesCallback": ("device", "local_variables"),
    "MetricAverageCallback": ("device",),
    "load_model": ("legacy_opts",),
    "gradient": ("use_generic_names",),
    "compile": ("experimental_run_tf_function",),
}

_TENSORFLOW_1 = {
    *("ConfigProto", "GPUOptions", "Session", "InteractiveSession", "placeholder", "get_variable"),
    *("global_variables", "global_variables_initializer", "local_variables_initializer"),
    *("trainable_variables", "variable_scope", "get_default_graph", "logging", "app", "flags"),
    *("set_random_seed", "layers", "log", "to_float", "assign"),
}
_TENSORFLOW_1_TRAIN = {
    *("AdamOptimizer", "AdagradOptimizer", "GradientDescentOptimizer", "MomentumOptimizer"),
    *("RMSPropOptimizer", "MonitoredTrainingSession", "StopAtStepHook", "LoggingTensorHook"),
    *("get_or_create_global_step", "Saver", "SessionRunHook", "polynomial_decay"),
}

_GENERATORS = {"fit_generator": "fit", "evaluate_generator": "evaluate"}
_GENERATORS["predict_generator"] = "predict"

_BACKEND = {
    "set_session": "Keras 3 has no sessions: remove it, hvd.init() gives this process its GPU",
    "get_session": "Keras 3 has no sessions: remove it",
    "get_value": "Keras 3: float(x) or x.numpy()",
    "set_value": "Keras 3: x.assign(value), or optimizer.learning_rate = value",
    "clear_session": "Keras 3: keras.utils.clear_session()",
}


@dataclass(frozen=True, order=True)
class Finding:
    """A place in a script.

    Attributes:
        start, end: its characters in the text.
        text: what is wrong, for people.
        new: what is written there instead; None: this is not certain.
    """

    start: int
    end: int
    text: str
    new: str | None = None


class Script:
    """A script, and what must change in it.

    Raises:
        SyntaxError: it is no Python 3.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = [0]
        for line in text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line.encode()))
        self._data = text.encode()
        self._modules: dict[str, str] = {}  # what a name of the script stands for
        self._has_tensorflow_1 = "compat.v1" in text  # whose optimizers have a method variables()
        tree = ast.parse(text)
        for node in ast.walk(tree):
            self._note_names(node)
        found = (finding for node in ast.walk(tree) for finding in self._look_at(node))
        self.findings = sorted(set(found))

    def line(self, finding: Finding) -> int:
        """The number of its line, from 1."""
        return self._data[: finding.start].count(b"\n") + 1

    def written(self) -> str:
        """The text with all that is certain changed."""
        data, end = b"", 0
        for finding in self.findings:
            if finding.new is not None and finding.start >= end:
                data += self._data[end : finding.start] + finding.new.encode()
                end = finding.end
        return (data + self._data[end:]).decode()

    def _at(self, node: ast.AST, text: str, new: str | None = None) -> Finding:
        return Finding(*self._place(node), text, new)

    def _place(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, (ast.expr, ast.stmt, ast.keyword, ast.alias))
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset

    def _source(self, node: ast.AST) -> str:
        start, end = self._place(node)
        return self._data[start:end].decode()

    # What the script's names stand for

    def _note_names(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                self._modules[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                self._modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def _meaning(self, node: ast.AST) -> str:
        """The full name of an expression such as ``hvd.callbacks.X``; empty if it has none."""
        if isinstance(node, ast.Name):
            return self._modules.get(node.id, "")
        if isinstance(node, ast.Attribute):
            of = self._meaning(node.value)
            return f"{of}.{node.attr}" if of else ""
        return ""

    # What must change

    def _look_at(self, node: ast.AST) -> Iterator[Finding]:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from self._look_at_import(node)
        elif isinstance(node, ast.Call):
            yield from self._look_at_call(node)
        elif isinstance(node, ast.Attribute):
            yield from self._look_at_attribute(node)

    def _look_at_import(self, node: ast.Import | ast.ImportFrom) -> Iterator[Finding]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_horovod(alias.name):
                    yield self._look_at_module(node, alias)
            return
        module = node.module or ""
        if not _is_horovod(module):
            return
        if why := _absent(module):
            yield self._at(node, f"{module}: {why}")
            return
        unknown = [alias.name for alias in node.names if alias.name != "*"]
        unknown = [name for name in unknown if _why_not(name)]
        for name in unknown:
            yield self._at(node, f"{name}: {_why_not(name)}")
        if not unknown:
            new = f"from {_home(module)} import {', '.join(map(self._source, node.names))}"
            is_module = any(f"{module}.{alias.name}" in _IMPORTED for alias in node.names)
            if is_module and node.names[0].name != "callbacks":
                yield self._at(node, f"import hvd_keras as {node.names[0].asname or 'hvd'}")
            else:
                yield self._at(node, new, new)

    def _look_at_module(self, node: ast.Import, alias: ast.alias) -> Finding:
        if why := _absent(alias.name):
            return self._at(node, f"{alias.name}: {why}")
        if alias.asname is None or alias.name not in _IMPORTED:
            told = f"import hvd_keras as hvd; and write hvd. for {alias.name}. below"
            return self._at(node, told)
        new = f"{_home(alias.name)} as {alias.asname}"
        return self._at(alias, f"import {new}", new)

    def _look_at_attribute(self, node: ast.Attribute) -> Iterator[Finding]:
        name = self._meaning(node)
        if _is_horovod(name):
            why = _why_not(node.attr)
            in_module = name.removesuffix(f".{node.attr}") in names.MODULES
            if why and in_module and ".elastic." not in name:
                yield self._at(node, f"{node.attr}: {why}")
        elif name.startswith(("tensorflow.keras.backend.", "keras.backend.")):
            if node.attr in _BACKEND:
                yield self._at(node, f"{node.attr}: {_BACKEND[node.attr]}")
        elif name.startswith("tensorflow."):
            yield from self._look_at_tensorflow(node, name.removeprefix("tensorflow."))
        if node.attr == "visible_device_list" or name.endswith(".set_visible_devices"):
            yield self._at(
                node, "not needed: hvd.init() gives this process the GPU of its local rank"
            )
        elif node.attr == "lr" and _is_optimizer(node.value):
            yield self._at(node, "lr of an optimizer is learning_rate in Keras 3")

    def _look_at_tensorflow(self, node: ast.Attribute, name: str) -> Iterator[Finding]:
        if name == "estimator" or name.startswith("contrib"):
            yield self._at(node, f"tf.{name}: removed from TensorFlow; use Keras or a session")
        elif name in _TENSORFLOW_1 or name in {f"train.{part}" for part in _TENSORFLOW_1_TRAIN}:
            told = f"tf.compat.v1.{name}, with tf.compat.v1.disable_v2_behavior() at the top"
            yield self._at(node, f"TensorFlow 1: {told}")
        elif name == "keras.mixed_precision.experimental":
            yield self._at(node, "keras.mixed_precision.set_global_policy(…)")

    def _look_at_call(self, node: ast.Call) -> Iterator[Finding]:
        if not isinstance(node.func, (ast.Attribute, ast.Name)):
            return
        name = self._meaning(node.func)
        called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        if name.startswith(_KERAS_MODULES) and called in _KERAS_ARGUMENTS:
            yield from self._look_at_collective(node, called)
        if isinstance(node.func, ast.Attribute):
            if called == "variables" and not node.args and not node.keywords:
                start, end = self._place(node.func)[1], self._place(node)[1]
                new = None if self._has_tensorflow_1 else ""
                yield Finding(start, end, "variables is a list in Keras 3, no method", new)
            elif called in _GENERATORS:
                yield self._at(
                    node.func,
                    f"Keras 3: {_GENERATORS[called]}, without workers, max_queue_size and "
                    "use_multiprocessing",
                )
        if name.endswith("ImageDataGenerator") or called == "ImageDataGenerator":
            yield self._at(
                node.func,
                "not in Keras 3: keras.utils.image_dataset_from_directory and layers such as "
                "keras.layers.RandomFlip",
            )
        if called == "ModelCheckpoint" and not _is_horovod(name):
            yield self._at(
                node.func,
                "hvd.callbacks.ModelCheckpoint on all ranks: rank 0 writes, whole files only, and "
                "an error there reaches all",
            )
        yield from self._look_at_keywords(node, name, called)

    def _look_at_keywords(self, node: ast.Call, name: str, called: str) -> Iterator[Finding]:
        is_optimizer = re.search(r"(^|\.)(optimizers)\.\w+$", name) is not None
        for keyword in node.keywords:
            if keyword.arg == "lr" and is_optimizer:
                new = f"learning_rate={self._source(keyword.value)}"
                yield self._at(keyword, f"Keras 3: {new}", new)
            elif keyword.arg == "decay" and is_optimizer:
                yield self._at(
                    keyword, "decay is gone: give learning_rate a keras.optimizers.schedules…"
                )
            elif keyword.arg in _DROPPED.get(called, ()) and (
                called in ("compile", "gradient") or _is_horovod(name)
            ):
                yield self._without(node, keyword)

    def _look_at_collective(self, node: ast.Call, called: str) -> Iterator[Finding]:
        order = _KERAS_ARGUMENTS[called]
        # How many arguments have the same place here.
        same = 1 if called in ("allreduce", "reducescatter") else 2
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            yield self._at(node, f"hvd.{called} has another order here: give arguments by name")
            return
        for argument, place in zip(node.args[same:], order[same:], strict=False):
            new = f"{place}={self._source(argument)}"
            yield self._at(argument, f"hvd.{called} has another order here: {new}", new)
        for keyword in node.keywords:
            if keyword.arg == "value":
                new = f"tensor={self._source(keyword.value)}"
                yield self._at(keyword, f"hvd.{called}: {new}", new)

    def _without(self, node: ast.Call, keyword: ast.keyword) -> Finding:
        """The removal of an argument, with the comma."""
        arguments = sorted(self._place(part) for part in [*node.args, *node.keywords])
        start, end = self._place(keyword)
        at = arguments.index((start, end))
        if at > 0:
            start = arguments[at - 1][1]
        elif len(arguments) > 1:
            end = arguments[1][0]
        return Finding(start, end, f"remove {keyword.arg}=…: it is not needed", "")


def _is_optimizer(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in ("opt", "optimizer")


def _home(module: str) -> str:
    return "hvd_keras.callbacks" if module.endswith(".callbacks") else "hvd_keras"


def _absent(module: str) -> str:
    """Why hvd_keras has nothing for a module; empty if it has."""
    for name, why in names.ABSENT.items():
        if module == name or module.startswith(f"{name}."):
            return why
    return ""


def _is_horovod(name: str) -> bool:
    return name == "horovod" or name.startswith("horovod.")


def _why_not(name: str) -> str:
    """What to do about a name of Horovod's that hvd_keras has not; empty if it has it."""
    modules = {part for module in names.MODULES for part in module.split(".")} - {"elastic"}
    if name in dir(hvd_keras) or name in modules:
        return ""
    for rows in names.TABLE.values():
        for row in rows:
            if name in (full.rpartition(".")[2] for full in row.names.split()):
                return "" if row.state == "same" else row.note
            if any(full.startswith(f"{name}.") for full in row.names.split()):
                return "" if row.state == "same" else row.note
    return "hvd_keras has no such name"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tool; returns its exit status: 1 if something is left to do by hand."""
    parser = argparse.ArgumentParser(
        prog="python -m hvd_keras.migrate",
        description="Says what to change in scripts written for Horovod.",
    )
    parser.add_argument("scripts", nargs="+", type=pathlib.Path, metavar="SCRIPT")
    parser.add_argument("--write", action="store_true", help="change what is certain")
    given = parser.parse_args(arguments)
    left = 0
    for path in given.scripts:
        try:
            script = Script(path.read_text("utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
        for finding in script.findings:
            is_certain = finding.new is not None
            left += not (is_certain and given.write)
            done = " (changed)" if is_certain and given.write else " (--write does it)"
            print(f"{path}:{script.line(finding)}: {finding.text}{done * is_certain}")
        if given.write:
            path.write_text(script.written(), "utf-8")
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main())
