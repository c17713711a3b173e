"""Metrics over all ranks' samples, computed from the sums of the ranks' metric states.

The variables of most metrics are sums over samples: counts, hits, squared errors, a confusion
matrix. The sums of the ranks' variables are those of one process that has seen all samples.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import Variable, flatten, is_legacy, keras
from hvd_keras.runtime.process_sets import ProcessSet

_COUNTS = ("true_positives", "true_negatives", "false_positives", "false_negatives")

# The variables of Keras's metrics, by base class; all of them are sums over samples or batches.
_SUMS: dict[Any, tuple[str, ...]] = {
    keras.metrics.Mean: ("total", "count"),
    keras.metrics.Sum: ("total",),
    keras.metrics.AUC: _COUNTS,
    keras.metrics.Precision: ("true_positives", "false_positives"),
    keras.metrics.Recall: ("true_positives", "false_negatives"),
    keras.metrics.SensitivityAtSpecificity: _COUNTS,
    keras.metrics.SpecificityAtSensitivity: _COUNTS,
    keras.metrics.PrecisionAtRecall: _COUNTS,
    keras.metrics.RecallAtPrecision: _COUNTS,
    keras.metrics.TruePositives: ("accumulator",),
    keras.metrics.TrueNegatives: ("accumulator",),
    keras.metrics.FalsePositives: ("accumulator",),
    keras.metrics.FalseNegatives: ("accumulator",),
    keras.metrics.FBetaScore: (
        "true_positives",
        "false_positives",
        "false_negatives",
        "intermediate_weights",
    ),
    keras.metrics.IoU: ("total_cm",),
    keras.metrics.R2Score: ("num_samples", "squared_sum", "sum", "total_mse", "count"),
}


@dataclasses.dataclass
class MetricState:
    """A copy of a metric's state."""

    metric: Any
    #: what Keras logs for it on this rank, by key
    results: dict[str, Any]
    #: its variables, if all of them are sums over samples
    sums: list[Any] | None
    #: its result is a variable, so Keras logs the value that it has after validation
    by_reference: bool

    def describe(self, prefix: str) -> str:  # what must be equal on all ranks
        keys = "/".join(prefix + key for key in self.results)
        variables = ", ".join(f"{v.dtype}{list(v.shape)}" for v in self.sums or ())
        return f"{keys}: {type(self.metric).__name__}({variables})"


def is_summable(metric: Any) -> bool:
    """Whether the ranks' states of a metric, which was updated, can be added up."""
    # True for the metrics of Keras and for derived classes that add no variables. Other variables
    # may not be sums; nor is what a function computes over the rows of a batch.
    axis = getattr(metric, "_fn_kwargs", {}).get("axis")
    if any(isinstance(number, int) and (number == 0 or number < -1) for number in flatten(axis)):
        return False
    for base, names in _SUMS.items():
        if isinstance(metric, base):
            known = {id(getattr(metric, name, None)) for name in names}
            return {id(variable) for variable in metric.variables} == known
    return False


def states(model: Any) -> list[MetricState]:
    """Copy the states of a model's metrics, in the order in which Keras logs them."""

    def is_live(part: Any, metric: Any) -> bool:
        return any(part is v or part is getattr(v, "value", v) for v in metric.variables)

    return [
        MetricState(
            metric,
            numbers({name: result}),
            [variable.numpy() for variable in metric.variables] if is_summable(metric) else None,
            any(is_live(part, metric) for part in flatten(result)),
        )
        for name, metric, result in _results(model)
    ]


def reduce_logs(
    logs: dict[str, Any], phases: dict[str, list[MetricState]], process_set: ProcessSet
) -> dict[str, str]:
    """Replace this rank's logs by those over all ranks, in place; equal on all ranks.

    Metrics are computed from the sums of the ranks' states, also those that a train_step logs under
    names that are not theirs. Metrics whose states cannot be summed,
    and numbers and arrays that are not metrics of the model, are averaged over the ranks. Other
    values, such as text, are left alone.

    Args:
        phases: the states of the metrics at the time when they were logged, by the prefix of their
            keys: ``""`` and ``"val_"``.

    Returns:
        The keys of metrics that were averaged over the ranks, each with the reason.

    Raises:
        ValueError: (on every rank) the ranks' keys or metrics differ.
    """
    mine = _numeric(logs)
    used = {
        prefix: [state for state in phase if any(prefix + key in logs for key in state.results)]
        for prefix, phase in phases.items()
    }
    renamed = {
        key: found
        for prefix in phases
        for key, found in _renamed(phases, prefix, {k: logs[k] for k in mine})
    }
    # One request: plain numbers, what each rank can sum, and what it logged without changes.
    gathered = agree.gather_json(
        "metrics",
        {
            "logs": mine,
            "states": [s.describe(prefix) for prefix, phase in used.items() for s in phase],
            "logged": [p for p, phase in used.items() if _was_logged(phase, p, logs)],
            "renamed": {key: state.describe(prefix) for key, (prefix, state) in renamed.items()},
        },
        process_set,
    )
    shapes = [{k: np.shape(v) for k, v in theirs["logs"].items()} for theirs in gathered]
    for views in ([sorted(t["logs"]) for t in gathered], [t["states"] for t in gathered], shapes):
        if any(view != views[0] for view in views):
            raise ValueError(
                "MetricAverageCallback: the ranks log different metrics "
                f"({agree.by_rank(views, process_set)}). "
                "Give all ranks the same metrics and validation data."
            )

    if all(theirs["renamed"] == gathered[0]["renamed"] for theirs in gathered):
        for key, (prefix, state) in renamed.items():
            value = next(iter(state.results.values()))
            named = dataclasses.replace(state, results={key.removeprefix(prefix): value})
            used[prefix].append(named)
    for key in mine:
        mean = np.sum([theirs["logs"][key] for theirs in gathered], axis=0) / len(gathered)
        logs[key] = mean if mean.shape else float(mean)
    reasons = {}
    summable = []
    for prefix, phase in used.items():
        logged = all(prefix in theirs["logged"] for theirs in gathered)
        for state in phase:
            if logged and state.sums is not None:
                summable.append((prefix, state))
                continue
            reason = (
                f"the state of {type(state.metric).__name__} is not known to be a sum over samples"
                ". If it is, derive the class from keras.metrics.Sum or Mean, and add no variables"
                if logged
                else "the logged values are not those of the model's metrics, but come from a "
                "callback or your train_step"
            )
            reasons.update({prefix + key: reason for key in state.results if prefix + key in logs})
    exact = _of_all_ranks(summable, process_set)
    for key, value in exact.items():
        if key in logs and key not in reasons:
            # Newer NumPy does not let Keras convert arrays of one number to floats.
            logs[key] = np.reshape(value, np.shape(logs[key])) if np.shape(logs[key]) else value
    return reasons


def numbers(results: dict[str, Any]) -> dict[str, Any]:
    """Convert results to logs as Keras passes them to callbacks: flat, with floats for scalars."""
    flat: dict[str, Any] = {}
    for key, value in results.items():
        if isinstance(value, dict):
            flat.update(numbers(value))
        elif isinstance(value, Variable) or hasattr(value, "numpy"):  # or a tensor
            try:
                flat[key] = float(value)  # as Keras: NumPy or PyTorch decides if it has a shape
            except (TypeError, ValueError):  # a copy, of what may be on a GPU
                flat[key] = np.array(value if is_legacy else keras.ops.convert_to_numpy(value))
        else:
            flat[key] = value
    return flat


def _results(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, metric and result, including the metrics inside Keras's container."""
    if is_legacy:
        yield from ((metric.name, metric, metric.result()) for metric in model.metrics)
        return
    container: Any = getattr(model, "_compile_metrics", None)
    for metric in model.metrics:
        if metric is not container:
            yield metric.name, metric, metric.result()
        elif metric.built:
            # In the container's order; it makes the names unique, by output and number.
            results = metric.result()
            if len(results) == len(metric.metrics):
                for name, part in zip(results, metric.metrics, strict=True):
                    yield name, part, results[name]
            else:  # the names are not unique, so one result has overwritten another
                yield metric.name, metric, results


def _renamed(
    phases: dict[str, list[MetricState]], prefix: str, logs: dict[str, Any]
) -> Iterator[tuple[str, tuple[str, MetricState]]]:
    """Yield keys under which a train_step logs metrics that have other names, by their values."""
    known = {start + key for start in phases for state in phases[start] for key in state.results}
    others = [k for k in logs if k not in known and k.startswith("val_") == bool(prefix)]
    for state in phases[prefix]:
        if len(state.results) == 1 and prefix + next(iter(state.results)) not in logs:
            value = next(iter(state.results.values()))
            same = [key for key in others if _close(logs[key], value)]
            if len(same) == 1:
                others.remove(same[0])
                yield same[0], (prefix, state)


def _was_logged(phase: list[MetricState], prefix: str, logs: dict[str, Any]) -> bool:
    """Whether the logs were computed from these states."""
    # They were not if another callback has changed an entry or has evaluated the model, which
    # overwrites the states, or if a train_step has returned another value under a metric's name.
    local: dict[str, Any] = {}
    for state in phase:
        local.update({} if state.by_reference else state.results)
    return all(
        _close(logs[prefix + key], value) for key, value in local.items() if prefix + key in logs
    )


def _close(logged: Any, value: Any) -> bool:
    """Whether two values are equal, up to rounding differences between graph and eager code."""
    try:
        one, other = np.squeeze(logged), np.squeeze(value)
        return one.shape == other.shape and np.allclose(
            one, other, rtol=1e-5, atol=1e-7, equal_nan=True
        )
    except TypeError:  # text
        return False


def _of_all_ranks(
    summable: list[tuple[str, MetricState]], process_set: ProcessSet
) -> dict[str, Any]:
    arrays = [array for _, state in summable for array in state.sums or ()]
    if not arrays:
        return {}
    # In float64, so that counts and float32 sums are added almost without rounding.
    states = np.concatenate([array.astype("float64").ravel() for array in arrays])
    call = {"name": "metrics.states", "process_set": process_set.id()}
    (total,) = agree.run("allreduce", [states], reduction="Sum", **call)
    # One vector of all states; taken apart in the same order.
    ends = np.cumsum([array.size for array in arrays])
    totals = iter(np.split(total, ends[:-1]))
    results: dict[str, Any] = {}
    for prefix, state in summable:
        values = [next(totals).reshape(v.shape) for v in state.metric.variables]
        named = _results_from(state, values)
        results.update({prefix + name: value for name, value in named.items()})
    return results


def _results_from(state: MetricState, values: list[Any]) -> dict[str, Any]:
    """Compute the results from these values; afterwards the metric's variables are as before."""
    metric = state.metric
    before = [variable.numpy() for variable in metric.variables]
    try:
        for variable, value in zip(metric.variables, values, strict=True):
            variable.assign(value)
        result = metric.result()
        return numbers(result if isinstance(result, dict) else dict.fromkeys(state.results, result))
    finally:
        for variable, value in zip(metric.variables, before, strict=True):
            variable.assign(value)


def _numeric(logs: dict[str, Any]) -> dict[str, Any]:
    numeric = {}
    for key, value in logs.items():
        if value is None:  # NumPy would make it NaN
            continue
        try:
            array = np.asarray(value)
            if array.dtype.kind not in "bOSU":  # yes or no, and text, which may look like a number
                numeric[key] = array.astype("float64").tolist()
        except (TypeError, ValueError):
            continue
    return numeric
