"""What TensorFlow 1 had: ``tf.Session`` and its like are in ``tf.compat.v1`` now."""

import ast
import re
from collections.abc import Iterator

from hvd_keras.migrate.source import Finding, Source

_GRAPHS = {
    *("Session", "InteractiveSession", "placeholder", "get_variable", "variable_scope"),
    *("global_variables_initializer", "local_variables_initializer", "get_default_graph"),
    "train.MonitoredTrainingSession",
}
_ELSEWHERE = {
    *("ConfigProto", "GPUOptions", "enable_eager_execution", "global_variables", "assign"),
    *("trainable_variables", "logging", "app", "flags", "set_random_seed", "layers", "log"),
    *("to_float", "random_uniform", "random_normal", "truncated_normal"),
}
_TRAIN = {
    *("AdamOptimizer", "AdagradOptimizer", "GradientDescentOptimizer", "MomentumOptimizer"),
    *("RMSPropOptimizer", "StopAtStepHook", "LoggingTensorHook", "get_or_create_global_step"),
    *("get_global_step", "Saver", "SessionRunHook", "polynomial_decay"),
}
# Other names in lower case, such as tf.losses.categorical_crossentropy, are Keras's.
_LOSSES = {
    *("absolute_difference", "add_loss", "compute_weighted_loss", "cosine_distance", "get_losses"),
    *("get_regularization_loss", "get_regularization_losses", "get_total_loss", "hinge_loss"),
    *("huber_loss", "log_loss", "mean_pairwise_squared_error", "mean_squared_error"),
    *("sigmoid_cross_entropy", "softmax_cross_entropy", "sparse_softmax_cross_entropy"),
}
_METRICS = {
    *("accuracy", "auc", "mean", "mean_absolute_error", "mean_cosine_distance", "mean_iou"),
    *("mean_per_class_accuracy", "mean_relative_error", "mean_squared_error", "precision"),
    *("precision_at_k", "recall", "recall_at_k", "root_mean_squared_error", "true_positives"),
    *("false_negatives", "false_positives", "true_negatives"),
}
_NAMES = _GRAPHS | _ELSEWHERE | {f"train.{name}" for name in _TRAIN}
_NAMES |= {f"losses.{name}" for name in _LOSSES} | {f"metrics.{name}" for name in _METRICS}

_MODEL = re.compile(r"(tensorflow\.)?keras\.(Sequential$|Model$|layers\.|models\.|applications\b)")

_MODES = {"TRAIN": "train", "EVAL": "eval", "PREDICT": "infer"}

#: What a line needs that gives this process its GPU.
PINNED = "not needed: hvd.init() gives this process the GPU of its local rank"


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
        elif name == "estimator" or name.startswith("contrib"):
            if id(node) not in gone:
                yield script.at(node, f"tf.{name}: removed from TensorFlow; use Keras or a session")
        elif name in _NAMES:
            if id(node) not in gone:
                uses.append((node, name))
        elif name == "optimizers" or owner in ("losses", "metrics"):
            is_mixed = True
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
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return None
    call = statement.value
    if not script.meaning(call.func).endswith("keras.backend.set_session") or len(call.args) != 1:
        return None
    session = call.args[0]
    if not isinstance(session, ast.Call) or session.args or len(session.keywords) > 1:
        return None
    if not script.meaning(session.func).endswith(".Session"):
        return None
    if not session.keywords:
        return ""
    value = session.keywords[0].value
    return value.id if isinstance(value, ast.Name) else None


def _sets(script: Source, statement: ast.stmt, name: str) -> bool:
    """Whether a statement makes the configuration of this name, or sets a part of it."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    target: ast.expr = statement.targets[0]
    if isinstance(target, ast.Name):
        value = statement.value
        is_call = isinstance(value, ast.Call) and not value.args and not value.keywords
        made = is_call and script.meaning(value.func).endswith(".ConfigProto")  # type: ignore[attr-defined]
        return target.id == name and made
    while isinstance(target, ast.Attribute):
        target = target.value
    return isinstance(target, ast.Name) and target.id == name
