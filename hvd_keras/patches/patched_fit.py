"""Wraps ``fit`` when several ranks train a model, on every backend of Keras.

Before the callbacks begin, the model's variables are created and the ranks compare what must be
equal. When ``fit`` returns, the files that one rank has written are there for all.
"""

import collections
import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

from hvd_keras import observe
from hvd_keras.data import sources
from hvd_keras.gradients import missing_calls, model_ranks, specs, values
from hvd_keras.patches import keras_callbacks
from hvd_keras.runtime import agree, log, rank_info, settings
from hvd_keras.runtime.keras import (
    KERAS_VERSIONS,
    PyDataset,
    flatten,
    is_eager,
    is_of_keras,
    keras,
    values_of,
)
from hvd_keras.runtime.process_sets import ProcessSet
from hvd_keras.runtime.reductions import Adasum, Average
from hvd_keras.saving import background
from hvd_keras.training import fit_state, own_files, progress, variables
from hvd_keras.training.fit_state import Backend, Fit, running

_signature = functools.cache(inspect.signature)


def fit(
    backend: Backend, fit_alone: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replace ``keras.Model.fit``."""
    signature = _signature(fit_alone)
    with contextlib.ExitStack() as stack:
        stack.enter_context(agree.within(missing_calls.in_fit, (model,)))
        if not rank_info.is_initialized():
            return fit_alone(model, *args, **kwargs)
        if model_ranks.is_outside(model):
            stack.enter_context(missing_calls.local_fit())
        try:
            bound = signature.bind(model, *args, **kwargs)
        except TypeError:
            return fit_alone(model, *args, **kwargs)  # raises an error that says what is wrong
        _adapt(bound.arguments, backend)
        callbacks = flat(bound.arguments.get("callbacks"))
        defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
        if running(model):
            # The fit in which this one runs weighs losses as before.
            stack.callback(fit_state.count_rows, model, model in fit_state.counting_rows)
        own = _begun(backend, model, callbacks, defaults | bound.arguments)
        is_known = model_ranks.alone.get() or model_ranks.process_set_of(model)
        is_alone = own is None and bool(is_known)
        stack.enter_context(agree.within(model_ranks.fits_alone, is_alone))
        known = own is not None or is_alone
        stack.enter_context(agree.within(missing_calls.fit_is_known, known))
        if model.built:  # an earlier optimizer or tape may have reduced gradients
            missing_calls.reduced.discard(*model.trainable_variables)
        if bound.arguments.get("class_weight") is not None:
            backend.weigh_classes(bound.arguments)
        several = own is not None and own.process_set.size() > 1
        if own is not None and several:
            stack.enter_context(fit_state.in_one_thread(own.process_set))
        if rank_info.size() > 1 and not running(model):
            _keep_for(stack, model, "train_step", f"{several} {known} {_can_weigh(model)}")
        stack.enter_context(agree.within(fit_state.current, own))
        stack.callback(background.wait)  # at the end, also by an exception, files are written
        # From here on the stack undoes what this fit changes in the model and its callbacks.
        # Unchanged order otherwise. A checkpoint has what all other callbacks have changed.
        runs = sorted(callbacks, key=lambda one: getattr(one, "_hvd_runs_last", False))
        if passes := backend.repeated(bound.arguments.get("x")):
            passes.begin_fit()
            runs = [keras_callbacks.CountSteps(passes), *runs]  # before a checkpoint
        every = backend.passes_of(bound.arguments.get("x"))
        if len(every) == 1 and every[0].source.split.uneven == "pad" and not passes:
            runs = [keras_callbacks.CountRows(every[0], backend.logs_by_steps(model)), *runs]
        if own is not None and several:
            runs = keras_callbacks.edited(own, runs)
            process_set = own.process_set
            if (averaging := model_ranks.step_set_of(model) or process_set).size() > 1:
                _weigh(stack, backend, model, averaging, "train_step")
            stack.enter_context(keras_callbacks.on_leader_alone(callbacks, process_set, own))
            stack.enter_context(own_files.noted(process_set))
            stack.enter_context(keras_callbacks.stops_told(own))
        if observe.publisher is not None:  # hvdrun shows how far the training is
            runs = [*runs, progress.Progress(backend.gpu_bytes)]
        if runs != callbacks:
            bound.arguments["callbacks"] = runs
        history = fit_alone(*bound.args, **bound.kwargs)
        if own is not None and several:
            _end(own)
        return history


def _adapt(arguments: dict[str, Any], backend: Backend) -> None:
    """Change arguments of ``fit`` whose defaults are for arrays, if x is of ``hvd.data.shard``."""
    if not backend.passes_of(arguments.get("x")):
        return
    arguments.setdefault("shuffle", False)  # Keras warns that it does not shuffle
    if arguments.get("validation_split"):
        raise ValueError(
            "fit: got validation_split with data of hvd.data.shard, from which Keras cannot take a "
            "part. Split the source: hvd.data.shard((x[:n], y[:n]), …) for training, and "
            "validation_data=hvd.data.shard((x[n:], y[n:]), …, shuffle=False)."
        )


def _keep_for(stack: contextlib.ExitStack, model: Any, method: str, purpose: str) -> None:
    """Let Keras make the function of a step anew, unless it was made for the same purpose.

    One made elsewhere, such as for ``train_on_batch``, weighs no losses. A script's own stays.
    """
    function = method.replace("step", "function")

    def made_by_keras() -> Any:
        made = getattr(model, function, None)
        return made if is_of_keras(getattr(made, "python_function", made)) else None

    if made_by_keras() and getattr(made_by_keras(), "_hvd_for", None) != purpose:
        setattr(model, function, None)

    @stack.callback
    def mark() -> None:
        if made := made_by_keras():
            made._hvd_for = purpose


def _weigh(
    stack: contextlib.ExitStack, backend: Backend, model: Any, process_set: ProcessSet, method: str
) -> None:
    """Weighs the losses of a model's steps, unless its ranks' gradients are no mean of losses."""
    if _can_weigh(model):
        # A tape is not known yet.
        averages = {reducer.op for reducer in model_ranks.reducers_of(model)} == {Average}
        stack.enter_context(backend.weighed(model, process_set, averages, method))


def _can_weigh(model: Any) -> bool:
    reductions = {reducer.op for reducer in model_ranks.reducers_of(model)}
    return Adasum not in reductions and model_ranks.averages_rows_of(model)


def _begun(
    backend: Backend, model: Any, callbacks: list[Any], arguments: dict[str, Any]
) -> Fit | None:
    """Return the ``fit`` that begins; None if this rank trains the model alone."""
    process_set = model_ranks.note_callbacks(model, callbacks)
    model_ranks.forget_local(model)
    # On one rank, only a callback that restores a checkpoint needs the variables so early.
    early = any(getattr(callback, "_hvd_needs_variables", False) for callback in callbacks)
    if not backend.repeated(arguments["x"]):  # as an earlier fit's data were
        for passes in backend.passes_of(arguments["x"]):
            passes.begin_fit(repeated=False)
    if process_set is not None and process_set.size() == 1:
        sources.check_sets([_sets(backend, callbacks, arguments)], process_set)
    if process_set is not None:
        backend.synchronize(model, model_ranks.step_set_of(model) or process_set)
    if process_set is None or (process_set.size() == 1 and not early):
        return None
    if process_set.size() > 1:
        backend.check(model)
        keras_callbacks.refuse(callbacks, model, process_set)
    return Fit(model, callbacks, arguments, process_set, backend)


def _sets(backend: Backend, callbacks: list[Any], arguments: dict[str, Any]) -> list[str]:
    """The ranks that the data of a ``fit`` are divided among, those of each rank alone aside."""
    averages = keras_callbacks.averages(callbacks)
    given = (arguments["x"], arguments["validation_data"] if averages else None)
    return sources.sets_of([passes for data in given for passes in backend.passes_of(data)])


def _is_shared(backend: Backend, x: Any, validation_data: Any) -> bool:
    """Whether what a prefetch begins of one of two data changes the order of the other."""
    repeats = backend.repeats(x) or backend.repeats(validation_data)
    both = [backend.passes_of(data) for data in (x, validation_data)]
    return bool(repeats) and any(
        one.source.is_shuffled and one is other for one in both[0] for other in both[1]
    )


def _end(own: Fit) -> None:
    """Wait for the others, so that files that one rank has written are there for all."""
    if not own.has_begun:
        raise RuntimeError(
            f"hvd_keras: fit of Keras {keras.__version__} does not build the model where it "
            f'did, so the ranks have compared nothing. Run: pip install "{KERAS_VERSIONS}"'
        )
    if own.values is None:  # no epoch has begun
        agree.gather_json("fit has ended", None, own.process_set)
    else:
        own.values.check("ended")
    others = variables.unlisted(own.model._flatten_layers())
    mine = {name: agree.digest(values_of(one)) for name, one in others.items()}
    gathered = agree.gather_json("other variables", mine, own.process_set)
    names = set.intersection(*map(set, gathered))
    if differ := [name for name in sorted(names) if len({theirs[name] for theirs in gathered}) > 1]:
        missing_calls.tell(
            f"{', '.join(differ)}, a tf.Variable, differs by rank. Keras does not list it, so it "
            "is not broadcast. Make it by self.add_weight(..., trainable=False), and "
            "change it by the rows of all ranks: hvd.allgather(rows). If it adds up gradients, "
            "gradient_accumulation_steps of the optimizer does that, and goes on in the next fit.",
            own.process_set,
        )


def evaluate(
    backend: Backend, evaluate_alone: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replace ``keras.Model.evaluate``, whose losses are weighed, and ``predict``.

    Callbacks write on the first rank only.
    """
    signature = _signature(evaluate_alone)
    is_predict = "return_dict" not in signature.parameters
    given = kwargs.get("callbacks")
    if given is None and args:
        with contextlib.suppress(TypeError):  # which evaluate raises, too
            given = signature.bind(model, *args, **kwargs).arguments.get("callbacks")
    if not rank_info.is_initialized():
        return evaluate_alone(model, *args, **kwargs)
    every = backend.passes_of(kwargs.get("x", args[0] if args else None))
    is_shuffled = is_predict and any(passes.source.is_shuffled for passes in every)
    if is_shuffled and rank_info.rank() == 0:
        log.warn_once(_PREDICTS_SHUFFLED)
    if is_predict and given is None:
        return evaluate_alone(model, *args, **kwargs)
    if fit_state.validation.get() is not None:  # a callback of that calls this one
        with _apart():
            return evaluate(backend, evaluate_alone, model, *args, **kwargs)
    callbacks, in_fit = flat(given), hasattr(given, "callbacks")
    process_set = model_ranks.note_callbacks(model, callbacks)
    if process_set is None or process_set.size() == 1:
        return evaluate_alone(model, *args, **kwargs)
    if not is_predict:
        _check_padding(every, process_set)
    with contextlib.ExitStack() as stack:
        if callbacks and not in_fit:
            keras_callbacks.refuse(callbacks, model, process_set)
            stack.enter_context(keras_callbacks.on_leader_alone(callbacks, process_set))
        validates = keras_callbacks.averages(callbacks)
        if in_fit and (own := running(model)):
            validates = own.validates
        for callback in callbacks if validates and not is_predict else ():
            if keras_callbacks.averages([callback]):
                stack.enter_context(callback.of_evaluate(model))
                break  # another one would find averages
        if is_predict or not is_eager():
            return evaluate_alone(model, *args, **kwargs)
        _keep_for(stack, model, "test_step", "weighed")
        _weigh(stack, backend, model, process_set, "test_step")
        if validates:
            stack.enter_context(_validating(backend, model, process_set, in_fit))
        return evaluate_alone(model, *args, **kwargs)


_PREDICTS_SHUFFLED = (
    "predict got data of hvd.data.shard that are shuffled, so its rows are in another order than "
    "the source's, and are this rank's alone. Give it all rows, without hvd.data.shard, or to "
    "divide them, hvd.data.shard(…, shuffle=False)."
)


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Evaluate within another ``evaluate``, perhaps on one rank alone."""
    outer: Any = fit_state.validation.get()
    outer.backend.validate_together(False)
    try:
        with agree.within(fit_state.validation, None), agree.within(fit_state.is_apart, True):
            yield
    finally:
        outer.backend.validate_together(outer.is_together)


def _check_padding(every: list[sources.Passes], process_set: ProcessSet) -> None:
    """Tell that data padded for training are evaluated."""
    for passes in every:
        source, split = passes.source, passes.source.split
        is_padded = split.uneven == "pad" and source.length % (split.size * source.batch_size)
        if is_padded and not split.evaluation:
            missing_calls.tell(
                "the padding of hvd.data.shard(uneven='pad') is weighed for training here, so the "
                "means are not those of all rows. For validation use hvd.data.shard(…, "
                "uneven='pad', evaluation=True), and weighted_metrics in compile.",
                process_set,
            )


@contextlib.contextmanager
def _validating(
    backend: Backend, model: Any, process_set: ProcessSet, in_fit: bool
) -> Iterator[None]:
    """Weigh the ranks' losses in an ``evaluate`` that all call, perhaps in ``fit``."""
    own = fit_state.Validation(model, process_set, backend)
    with agree.within(fit_state.validation, own):
        handler = getattr(model, "_eval_data_handler", None)  # tf_keras made it in fit
        if in_fit and handler is not None:
            _validate(own, handler.inferred_steps, handler._dataset)
        try:
            yield
        finally:
            backend.validate_together(False)
        if model in fit_state.weighed and not own.is_together:
            missing_calls.tell(
                "the ranks validate in different numbers of batches, or in an unknown number, so "
                "the validation loss is weighed by rows, not by the numbers of valid entries as on "
                "one process. Give all ranks the same number of validation batches.",
                process_set,
            )


def _validate(own: fit_state.Validation, steps: int | None, dataset: Any) -> None:
    """Weigh the ranks' losses in validation, if each of their steps is one of all."""
    passes, process_set = own.backend.passes_of(dataset), own.process_set
    mine = steps, sources.begun(passes), sources.sets_of(passes)
    gathered = agree.gather_json("steps of validation", mine, process_set)
    sources.check_sets([sets for _, _, sets in gathered], process_set)
    sources.check_passes(passes, [begun for _, begun, _ in gathered], process_set)
    own.is_together = steps is not None and len({theirs for theirs, _, _ in gathered}) == 1
    own.backend.validate_together(own.is_together)


def before_callbacks(model: Any, dataset: Any, steps: int | None, iterator: Any = None) -> None:
    """Do what ``fit`` and ``evaluate`` of a model do first, on these data."""
    if (own := running(model)) and not own.has_begun:
        own.has_begun, own.iterator, own.dataset = True, iterator, dataset
        own.backend.prepare(own, dataset)
        if own.process_set.size() == 1:
            own.unbuilt = _why_unbuilt(own) or ""
        else:
            _agree(own, dataset, steps)
    validation = fit_state.validation.get()
    if validation is not None and validation.model is model:
        # PyTorch gives what fit trains on.
        dataset = getattr(getattr(iterator, "data_adapter", None), "_dataloader", dataset)
        begins = getattr(iterator, "_current_iterator", None) is None
        if hasattr(iterator, "reset"):  # Keras before 3.8 goes on where it was
            iterator._current_iterator = None  # whose prefetch may begin more passes
            begins = True
        _validate(validation, steps, dataset if begins else None)


def set_params(of_keras: Callable[..., None], bar: Any, params: Any) -> None:
    """Replace ``keras.callbacks.ProgbarLogger.set_params``: by default one rank has the bar."""
    of_keras(bar, params)
    if params.get("verbose") != "auto" or settings.read().verbose_all:
        return
    with contextlib.suppress(ValueError):  # this rank is in no set, or the model in several
        own = running(bar.model)
        process_set = bar.model and model_ranks.process_set_of(bar.model)
        process_set = own.process_set if own else process_set
        if process_set is not None and process_set.rank() > 0:
            bar.verbose = 0


def _why_unbuilt(own: Fit) -> str | None:
    if own.problem is None:
        return None
    # The step may have failed while it made variables, which then have no values.
    inner = (getattr(variable, "value", variable) for variable in own.model.variables)
    have_values = all(one.is_initialized() for one in inner if hasattr(one, "is_initialized"))
    if have_values and not variables.unbuilt(own.model) - {id(own.model)}:
        return None
    return f"{type(own.problem).__name__}: {own.problem}"


def _agree(own: Fit, dataset: Any, steps: int | None) -> None:
    """Compare what must be equal before training; raise a ValueError on all ranks if it is not."""
    model, process_set = own.model, own.process_set
    given = own.arguments
    names = ("batch_size", "epochs", "initial_epoch", "class_weight")
    described = {name: given[name] for name in names}
    batch_size = given["batch_size"] or 32  # Keras's default
    counts = _can_weigh(model)
    described["batch_size"] = None if counts else batch_size
    description = specs.describe_model(model) | specs.flat(described, "fit")
    rows = None
    x_and_y = given.get("x"), given.get("y")
    is_arrays = all(values.is_array(x) for x in flatten(x_and_y) if x is not None)
    # The first batch in fit's order tells the same only without a shuffle.
    is_indexed = isinstance(given.get("x"), PyDataset) and given["shuffle"]
    # Scripts that average over ranks may give all rows to all of them, in different orders.
    averages = model_ranks.averages_rows_of(model)
    if (is_arrays or is_indexed) and (averages or not given["shuffle"]):
        rows = values.row_hashes(given["x"][0] if is_indexed else x_and_y)
    elif averages and not is_arrays and given["steps_per_epoch"] is None:
        rows = own.source
    # How many rows each of the steps has; None: that is unknown.
    sizes = None
    if is_arrays:
        sizes = [int(flatten(x_and_y)[0].shape[0]), batch_size]
    if counts and not is_arrays:
        sizes = own.backend.rows_in_steps(dataset)
    validates = given["validation_data"] is not None or given["validation_split"]
    validates = validates and keras_callbacks.averages(own.callbacks)
    mine = {
        "unbuilt": _why_unbuilt(own),
        "mixes": own.mixes,
        "steps": steps,
        "sizes": sizes,
        "rows": rows,
        "caches": own.caches,
        "sets": _sets(own.backend, own.callbacks, given),
        "passes": sources.begun(own.backend.passes_of(dataset)),
        "validates on x": _is_shared(own.backend, dataset, given["validation_data"]),
        "looks at data": not is_arrays and rows is None and own.backend.can_look_at(dataset),
        # After which epochs the ranks validate together.
        "validates every": repr(given["validation_freq"]) if validates else None,
        **keras_callbacks.describe(own.callbacks),
    }
    # One gather of all that callbacks and warnings need; the description of the model follows as a
    # hash, and in full if hashes differ.
    gathered = agree.gather_json("fit", mine, process_set)
    own.unbuilt = agree.by_rank([theirs["unbuilt"] for theirs in gathered], process_set)
    keras_callbacks.check_communicating(gathered, process_set)
    own.agree(gathered)
    sources.check_sets([theirs["sets"] for theirs in gathered], process_set)
    if any(theirs["validates on x"] for theirs in gathered):
        raise ValueError(
            "x and validation_data are made of one hvd.data.shard, and repeat, so validation would "
            "take passes from training. Call hvd.data.shard once more for validation_data."
        )
    sources.check_caches([theirs["caches"] for theirs in gathered])
    of_ranks = [theirs["sizes"] for theirs in gathered]
    if any(rounds.alone for rounds in model_ranks.rounds_of(model)):
        counts = False
        if None not in of_ranks and any(sizes != of_ranks[0] for sizes in of_ranks):
            missing_calls.tell(
                "sync_every averages the weights of all ranks alike, but their batches have "
                f"different sizes: {agree.by_rank(of_ranks, process_set)}. Give each rank batches "
                "of the same size.",
                process_set,
            )
    counts = counts and (None in of_ranks or any(sizes != of_ranks[0] for sizes in of_ranks))
    fit_state.count_rows(model, counts)  # a step that an earlier fit has traced weighs otherwise
    specs.check_described("fit compared", description, process_set)
    by_rank = [theirs["steps"] for theirs in gathered]
    if None not in by_rank and len(set(by_rank)) > 1:
        shown = zip(process_set.ranks, by_rank, strict=True)
        raise ValueError(
            "the ranks have different numbers of batches per epoch: "
            f"{', '.join(f'rank {rank} has {number}' for rank, number in shown)}. Each step needs "
            "all ranks. Give each rank the same number of batches: use hvd.data.shard, or "
            "steps_per_epoch."
        )
    if mixes := next(filter(None, [theirs["mixes"] for theirs in gathered]), ""):
        missing_calls.tell(mixes, process_set)
    # Otherwise steps may divide by their own numbers of rows.
    if None in of_ranks or all(sizes == of_ranks[0] for sizes in of_ranks):
        _check_constants(own.constants, process_set)
    values.check_rows([theirs["rows"] for theirs in gathered], process_set)
    passes, begun = own.backend.passes_of(dataset), [theirs["passes"] for theirs in gathered]
    sources.check_passes(passes, begun, process_set)


def _check_constants(mine: Any, process_set: ProcessSet) -> None:
    """Tell that the ranks' losses, layers or steps have different constants; all ranks call it."""
    digests = mine and sorted(digest for digest, _ in mine)  # names may differ
    gathered = agree.gather_if_different("constants", digests, process_set)
    if gathered is None or None in gathered:
        return
    in_common: collections.Counter[str] = functools.reduce(
        operator.and_, map(collections.Counter, gathered)
    )
    others = collections.Counter(digests) - in_common
    own = sorted({text for digest, text in mine if digest in others})
    differ = agree.gather_json("constants that differ", "; ".join(own[:3]) or None, process_set)
    missing_calls.tell(
        "the ranks compute different functions of a batch, as numbers in a loss, a layer or the "
        f"step differ. {agree.by_rank(differ, process_set)}. Compute them from the rows of all "
        "ranks: hvd.allreduce(mean).",
        process_set,
    )


def flat(callbacks: Any) -> list[Any]:
    """Return the callbacks that ``fit`` has been given, as a list."""
    if callbacks is None:
        return []
    if isinstance(callbacks, (list, tuple)):
        return [one for part in callbacks for one in flat(part)]
    # One of the user's may have others in an attribute, which it calls itself.
    is_list = isinstance(callbacks, keras.callbacks.CallbackList)
    return flat(callbacks.callbacks) if is_list else [callbacks]
