"""Horovod's names and arguments, and what they are in hvd_keras."""

import ast
import itertools
from collections.abc import Iterator

import hvd_keras
from hvd_keras.horovod import names
from hvd_keras.migrate.source import Finding, Source

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
    "BroadcastGlobalVariablesCallback": ("device",),
    "MetricAverageCallback": ("device",),
    "load_model": ("legacy_opts",),
    "run": ("use_gloo", "use_mpi", "verbose", "disable_cache", "max_np", "max_num_proc"),
}

_ELASTIC = "from hvd_keras.horovod import elastic"

#: The arguments that ``hvd.run`` has as ``horovod.run`` has.
_OF_RUN = ("func", "args", "kwargs", "np", "hosts")


def look(script: Source) -> Iterator[Finding]:
    """What must change."""
    uses_elastic = any(
        isinstance(node, ast.Attribute) and _is_elastic(script, node) for node in script.nodes
    )
    for node in script.nodes:
        if isinstance(node, ast.Import):
            if uses_elastic and any(alias.name in _IMPORTED for alias in node.names):
                uses_elastic = False
                end = script.place(node)[1]
                yield Finding(end, end, "", f"\n{' ' * node.col_offset}{_ELASTIC}")
            for alias in node.names:
                if _is_horovod(alias.name):
                    yield _look_at_module(script, node, alias)
        elif isinstance(node, ast.ImportFrom):
            yield from _look_at_import(script, node)
        elif isinstance(node, ast.Attribute):
            yield from _look_at_attribute(script, node)
        elif isinstance(node, ast.Call):
            yield from _look_at_call(script, node)


def _look_at_import(script: Source, node: ast.ImportFrom) -> Iterator[Finding]:
    module = node.module or ""
    if not _is_horovod(module):
        return
    if why := _absent(module):
        yield script.at(node, f"{module}: {why}")
        return
    unknown = [alias.name for alias in node.names if alias.name != "*" and _why_not(alias.name)]
    yield from (script.at(node, f"{name}: {_why_not(name)}") for name in unknown)
    if unknown:
        return
    is_module = any(f"{module}.{alias.name}" in _IMPORTED for alias in node.names)
    if is_module and node.names[0].name != "callbacks":
        new = f"import hvd_keras as {node.names[0].asname or node.names[0].name}"
        yield script.at(node, new, new if len(node.names) == 1 else None)
    else:
        new = f"from {_home(module)} import {', '.join(map(script.source, node.names))}"
        yield script.at(node, new, new)


def _look_at_module(script: Source, node: ast.Import, alias: ast.alias) -> Finding:
    if why := _absent(alias.name):
        return script.at(node, f"{alias.name}: {why}")
    if alias.name not in _IMPORTED:
        message = f"import hvd_keras as hvd; and write hvd. for {alias.name}. below"
        return script.at(node, message)
    if alias.asname is None:
        return script.at(alias, "import hvd_keras", "hvd_keras")
    new = f"{_home(alias.name)} as {alias.asname}"
    return script.at(alias, f"import {new}", new)


def _look_at_attribute(script: Source, node: ast.Attribute) -> Iterator[Finding]:
    name = script.meaning(node)
    if not _is_horovod(name):
        return
    if _is_elastic(script, node):
        message = "elastic: use callbacks.Checkpoint and hvdrun --max-restarts; this keeps it"
        yield script.at(node, f"{message}: {_ELASTIC}", "elastic")
        return
    owner = name.removesuffix(f".{node.attr}")
    # Of a module that has no other name, as in horovod.tensorflow.init().
    is_whole = script.source(node.value) == owner
    if is_whole and owner in _IMPORTED and name not in names.MODULES:
        yield script.at(node.value, f"{_home(owner)}.{node.attr}", _home(owner))
    why = _why_not(node.attr)
    if why and node.attr != "sycl_built" and owner in names.MODULES and ".elastic." not in name:
        yield script.at(node, f"{node.attr}: {why}")


def _is_elastic(script: Source, node: ast.Attribute) -> bool:
    return node.attr == "elastic" and script.meaning(node.value) in _IMPORTED


def _look_at_call(script: Source, node: ast.Call) -> Iterator[Finding]:
    name = script.meaning(node.func)
    if not _is_horovod(name):
        return
    called = name.rpartition(".")[2]
    if called == "sycl_built":
        yield script.at(node, f"{called}: {_why_not(called)}, so False", "False")
    if name.startswith(_KERAS_MODULES) and called in _KERAS_ARGUMENTS:
        yield from _look_at_collective(script, node, called)
    gone = [keyword for keyword in node.keywords if keyword.arg in _DROPPED.get(called, ())]
    yield from script.without(node, gone)
    if called == "LearningRateScheduleCallback":
        given = dict(zip(("initial_lr", "multiplier", "start_epoch"), node.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        if isinstance(number := given.get("multiplier"), ast.Constant):
            start = script.source(given["start_epoch"]) if "start_epoch" in given else "0"
            new = f"lambda epoch: {script.source(number)} ** (epoch - {start})"
            yield script.at(number, f"Horovod lets a number decay: {new}", new)
    if name == "horovod.run":
        for keyword in node.keywords:
            if keyword.arg == "num_proc":
                new = f"np={script.source(keyword.value)}"
                yield script.at(keyword, f"hvd.run: {new}", new)
            elif keyword not in gone and keyword.arg not in _OF_RUN:
                message = "hvd.run has the options of hvdrun: options=['--min-np', '2']"
                yield script.at(keyword, f"{keyword.arg}: {message}")


def _look_at_collective(script: Source, node: ast.Call, called: str) -> Iterator[Finding]:
    order = _KERAS_ARGUMENTS[called]
    # How many arguments have the same place here.
    same = 1 if called in ("allreduce", "reducescatter") else 2
    if any(isinstance(argument, ast.Starred) for argument in node.args):
        yield script.at(node, f"hvd.{called} has another order here: give arguments by name")
        return
    for argument, place in zip(node.args[same:], order[same:], strict=False):
        new = f"{place}={script.source(argument)}"
        yield script.at(argument, f"hvd.{called} has another order here: {new}", new)
    for keyword in node.keywords:
        if keyword.arg == "value":
            new = f"tensor={script.source(keyword.value)}"
            yield script.at(keyword, f"hvd.{called}: {new}", new)


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
    """Return what to do about a name of Horovod's that hvd_keras has not; empty if it has it."""
    modules = {part for module in names.MODULES for part in module.split(".")} - {"elastic"}
    if name in dir(hvd_keras) or name in modules:
        return ""
    for row in itertools.chain(*names.TABLE.values()):
        for full in row.names.split():
            if name in (full.partition(".")[0], full.rpartition(".")[2]):  # as in elastic.run
                return "" if row.state == "same" else row.note
    return "hvd_keras has no such name"
