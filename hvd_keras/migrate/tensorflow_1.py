"""What TensorFlow 1 had: ``tf.Session`` and its like are in ``tf.compat.v1`` now."""

import ast
import functools
import importlib.util
import pathlib
import re
import runpy
from collections.abc import Iterator
from typing import Any

from hvd_keras.migrate.source import Finding, Source

# They work in graphs only, which TensorFlow 2 must be asked for.
_GRAPHS = {
    *("Session", "InteractiveSession", "placeholder", "get_variable", "variable_scope"),
    *("global_variables_initializer", "local_variables_initializer", "get_default_graph"),
    "train.MonitoredTrainingSession",
}
# Modules that TensorFlow 2 has in compat.v1 only.
_MODULES = ("app", "flags", "layers", "logging")

_MODEL = re.compile(r"(tensorflow\.)?keras\.(Sequential$|Model$|layers\.|models\.|applications\b)")

_MODES = {"TRAIN": "train", "EVAL": "eval", "PREDICT": "infer"}

#: What a line needs that gives this process its GPU.
PINNED = "not needed: hvd.init() gives this process the GPU of its local rank"


@functools.cache
def _renamed() -> set[str]:
    """Return the names that TensorFlow 2 has elsewhere: the table of its own tf_upgrade_v2."""
    found: Any = importlib.util.find_spec("tensorflow")
    # Run as a file, because an import would begin with that of TensorFlow, which takes seconds.
    path = pathlib.Path(found.origin).parent / "tools/compatibility/renames_v2.py"
    return {name.removeprefix("tf.") for name in runpy.run_path(str(path))["renames"]}


def _is_old(name: str) -> bool:
    module = name.partition(".")[0]
    if module in (*_MODULES, "keras"):  # whose names Keras has
        return name in _MODULES
    return name in _renamed()


def look(script: Source) -> Iterator[Finding]:
    """What must change."""
    pinning = _pinning(script)
    for statement in pinning:
        yield Finding(*script.lines_of(statement), PINNED, "")
    gone = {id(node) for statement in pinning for node in ast.walk(statement)}
    uses: list[tuple[ast.Attribute, str]] = []
    is_mixed = False
    for node in script.nodes:
        name = script.meaning(node)
        if not isinstance(node, ast.Attribute) or not name.startswith("tensorflow."):
            continue
        name = name.removeprefix("tensorflow.")
        owner, _, last = name.rpartition(".")
        if owner == "estimator.ModeKeys" and last in _MODES:
            gone |= {id(inner) for inner in ast.walk(node)}
            yield script.at(node, f'tf.{name} is "{_MODES[last]}"', f'"{_MODES[last]}"')
        elif id(node) in gone:
            pass
        elif name == "estimator" or name.startswith("contrib"):
            yield script.at(node, f"tf.{name}: removed from TensorFlow; use Keras or a session")
        elif _is_old(name):
            uses.append((node, name))
        elif name == "optimizers" or owner in ("losses", "metrics"):
            is_mixed = True  # names of Keras, which tensorflow.compat.v1 lacks
    for node, name in uses:
        if name == "layers":
            yield script.at(node, "tf.layers needs tf_keras, and TF_USE_LEGACY_KERAS=1")
    models = [node for node in script.nodes if _MODEL.match(script.meaning(node))]
    if models and any(name.startswith("train.") and name.endswith("Optimizer") for _, name in uses):
        first = min(models, key=script.place)
        yield script.at(
            first,
            "TensorFlow 1's optimizers do not train models of Keras 3: pip install tf_keras and "
            "set TF_USE_LEGACY_KERAS=1, or take one of tf.keras.optimizers",
        )
    imported = [] if is_mixed else _imports(script)
    if uses and len(imported) == 1:
        needs_graphs = any(name in _GRAPHS for _, name in uses)
        yield from _changed_import(script, *imported[0], needs_graphs)
        return
    for node, name in uses:
        message = f"tf.compat.v1.{name}, with tf.compat.v1.disable_v2_behavior() at the top"
        yield script.at(node, f"TensorFlow 1: {message}")


def _imports(script: Source) -> list[tuple[ast.Import, ast.alias]]:
    return [
        (node, alias)
        for node in script.nodes
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "tensorflow" and alias.asname
    ]


def _changed_import(
    script: Source, statement: ast.Import, alias: ast.alias, needs_graphs: bool
) -> Iterator[Finding]:
    new = f"tensorflow.compat.v1 as {alias.asname}"
    disabling = f"{alias.asname}.disable_v2_behavior()"
    message = f"TensorFlow 1: import {new}{f', and {disabling}' * needs_graphs}"
    yield script.at(alias, message, new)
    if needs_graphs:
        end = script.place(statement)[1]
        yield Finding(end, end, "", f"\n{' ' * statement.col_offset}{disabling}")


def _pinning(script: Source) -> list[ast.stmt]:
    """Return the statements that give a session of Keras its GPU, if they do nothing else."""
    statements = [node for node in script.nodes if isinstance(node, ast.stmt)]
    found: list[ast.stmt] = []
    for statement in statements:
        name = _configuration(script, statement)
        if name is None:
            continue
        own = [statement] + [one for one in statements if name and _sets(script, one, name)]
        uses = {id(node) for node in script.nodes if isinstance(node, ast.Name) and node.id == name}
        if uses <= {id(node) for one in own for node in ast.walk(one)}:
            found += own
    for node in script.nodes:
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and block and all(one in found for one in block):
                return []
    return found


def _configuration(script: Source, statement: ast.stmt) -> str | None:
    """The configuration in ``K.set_session(tf.Session(config=…))``: a name, or none; else None."""
    match statement:
        case ast.Expr(ast.Call(func, [ast.Call(session, [], keywords)])):
            is_set = script.meaning(func).endswith("keras.backend.set_session")
            if is_set and script.meaning(session).endswith(".Session"):
                match keywords:
                    case []:
                        return ""
                    case [ast.keyword(value=ast.Name(name))]:
                        return name
    return None


def _sets(script: Source, statement: ast.stmt, name: str) -> bool:
    """Whether a statement makes the configuration of this name, or sets a part of it."""
    match statement:
        case ast.Assign([ast.Name(made)], ast.Call(func, [], [])):
            return made == name and script.meaning(func).endswith(".ConfigProto")
        case ast.Assign([ast.Attribute() as target]):
            owner: ast.expr = target
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            return isinstance(owner, ast.Name) and owner.id == name
    return False
