"""State of preprocessing layers that a broadcast of variables does not cover.

``Normalization`` computes with values derived from its variables. Vocabularies, bin boundaries and
IDF weights are not variables of the model. Both kinds differ between ranks after ``adapt`` on data
that differs by rank.
"""

import hashlib
import itertools
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from hvd_keras.gradients import missing_calls
from hvd_keras.runtime import agree, objects, process_sets, rank_info
from hvd_keras.runtime.keras import is_symbolic, keras, outside_graphs, require
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set
from hvd_keras.training import fit_state

# Arguments of preprocessing layers that a script may compute from its data.
_ARGUMENTS = {
    "CategoryEncoding": ("num_tokens",),
    "Discretization": ("num_bins", "bin_boundaries"),
    "HashedCrossing": ("num_bins",),
    "Hashing": ("num_bins", "salt"),
    "Normalization": ("input_mean", "input_variance"),
    "Rescaling": ("scale", "offset"),
}


def refresh(model: Any, process_set: ProcessSet) -> None:
    """Recompute what a model's layers have derived from their variables, which have changed.

    All ranks of the set call it, and trace their steps anew if any has other values.
    """
    changed = has_any = False
    for layer in _flat(model._flatten_layers()):
        before = derived(layer)
        with outside_graphs():  # constants of a graph would be no values
            if isinstance(layer, keras.layers.Normalization):
                layer.finalize_state()
            elif hasattr(layer, "idf_weights"):
                layer.idf_weights_const = layer.idf_weights.value()
            else:
                continue
        has_any = True
        changed |= any(map(_differ, before, derived(layer)))
    if has_any and any(agree.gather_json("preprocessing has changed", changed, process_set)):
        # Functions that were traced before hold the old values as constants.
        model.test_function = model.predict_function = None
        fit_state.trace_anew(model)


def check_equal_on_all_ranks(
    layers: Iterable[Any],
    process_set: ProcessSet = global_process_set,
    root_rank: int = 0,
) -> None:
    """Compare the ranks' preprocessing layers, as far as their state is not in variables.

    Compared are vocabularies and IDF weights, bin boundaries, salts, numbers of bins and tokens,
    and the means, variances and scales that the script has passed. If they are equal, this takes
    one small gather. Layers outside of the model, such as one in a ``tf.data`` map, are not
    compared. What ``Normalization`` has learnt from different rows on several ranks is told.

    Raises:
        ValueError: (on every rank, with the same text, which names the layers) they differ, with
            the advice to broadcast the state of ``root_rank``.
    """
    if process_set.size() == 1:
        return
    parts = [(layer, name, value) for layer in _flat(layers) for name, value in _state(layer)]
    digests = [_digest([type(layer).__name__, *values]) for layer, *values in parts]
    gathered = agree.gather_if_different("preprocessing", digests, process_set)
    if gathered is None:
        return
    # Some differ: which layers there are, then of each part that differs where it begins to.
    mine = [[layer.name, type(layer).__name__, part] for layer, part, _ in parts]
    named = agree.gather_json("preprocessing.parts", mine, process_set)
    if len(set(map(len, named))) > 1:
        views = [", ".join(layer for layer, *_ in theirs) or "none" for theirs in named]
        raise ValueError(f"{_BEGIN}: {agree.by_rank(views, process_set)}. {_advice(root_rank)}")
    lines = []
    for index, theirs in enumerate(zip(*gathered, strict=True)):
        if len(set(theirs)) > 1:
            layer, kind, part = named[0][index]
            if part == _LEARNT:  # which the broadcast of variables gives to all
                learnt = agree.gather_json(f"preprocessing.{index}", parts[index][2], process_set)
                of_root = learnt[process_set.ranks.index(root_rank)]
                others = [one for one in learnt if one is not None]
                if of_root is None or not all(np.allclose(one, of_root, 1e-3) for one in others):
                    missing_calls.tell(
                        f"{kind} {layer!r} was adapted to other rows on each rank, and all train "
                        f"with what rank {root_rank} has learnt. {_advice(root_rank)}",
                        process_set,
                    )
                continue
            views = _views(parts[index][2], f"preprocessing.{index}", process_set)
            lines.append(f"{kind} '{layer}', {part}: {agree.by_rank(views, process_set)}")
    if lines:
        raise ValueError("\n  ".join([f"{_BEGIN}:", *lines, _advice(root_rank)]))


def digests(layers: Iterable[Any]) -> list[list[str]]:
    """Return name, part and digest of all state of layers that is not in variables, for files."""
    in_variables = "IDF weights", _LEARNT
    parts = ((layer.name, *part) for layer in _flat(layers) for part in _state(layer))
    return [[name, p, _digest(value)] for name, p, value in parts if p not in in_variables]


def differences(stored: list[list[str]], own: list[list[str]]) -> list[str]:
    """Tell how ``digests`` differ from those of a checkpoint; names may."""
    pairs = itertools.zip_longest(stored, own, fillvalue=["no layer", "state", ""])
    return [
        f"the {theirs[1]} of {theirs[0]!r} in the checkpoint differs from the {mine[1]} of "
        f"{mine[0]!r} in the model"
        for theirs, mine in pairs
        if theirs[1:] != mine[1:]
    ]


def broadcast_preprocessing(
    layers: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Give all ranks the state that the root's preprocessing layers learnt in ``adapt``.

    Only the root needs to call ``adapt`` before. Call this before the layers are used: a dataset's
    map, or an ``Embedding`` of the vocabulary's size, keeps the vocabulary that it was made with.

    Args:
        layers: a layer, a ``FeatureSpace``, a model, or a list of them; the same on all ranks.
        root_rank: the rank of the job whose state all ranks get.
        process_set: the ranks that take part.

    Raises:
        ValueError: (on every rank) the ranks' layers differ, one is no layer, or one cannot take
            over the state, for example because it was used with a vocabulary of another size.

    Example:
        lookup = keras.layers.StringLookup()
        if hvd.rank() == 0:
            lookup.adapt(words)
        hvd.broadcast_preprocessing(lookup)
    """
    process_sets.check_type(process_set, "broadcast_preprocessing")
    process_set.check_root(root_rank)
    if process_set.size() == 1:
        return
    layers = layers if isinstance(layers, list | tuple) else [layers]
    mine: list[Any] = []

    def find() -> Any:
        if others := [one for one in layers if not hasattr(one, "_flatten_layers")]:
            raise ValueError(f"got {others[0]!r}, expected layers of Keras.")
        mine.extend(layer for layer in _flat(layers) if _learns(layer))
        if rank_info.rank() == root_rank:
            return [(type(layer).__name__, _learnt(layer)) for layer in mine]
        return None

    learnt = agree.on_all_ranks("hvd.broadcast_preprocessing", find, process_set)
    name = "preprocessing.broadcast"
    learnt = objects.broadcast_object(learnt, root_rank, name=name, process_set=process_set)

    def learn() -> None:
        kinds = [type(layer).__name__ for layer in mine]
        if kinds != [kind for kind, _ in learnt]:
            raise ValueError(f"got layers {kinds}, the root has {[k for k, _ in learnt]}.")
        if rank_info.rank() != root_rank:
            for layer, (_, state) in zip(mine, learnt, strict=True):
                _learn(layer, state)

    agree.on_all_ranks("hvd.broadcast_preprocessing", learn, process_set)


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


_LEARNT = "mean and variance"
_BEGIN = "the ranks' preprocessing layers differ"


def _advice(root_rank: int) -> str:
    return (
        "Adapt them to the same data on all ranks. Or adapt them on one rank and, before the "
        f"layers are used, call hvd.broadcast_preprocessing(layers, {root_rank}) on all ranks."
    )


def _flat(layers: Iterable[Any]) -> list[Any]:
    """Return layers and inner layers, each once; without the one of a ``TextVectorization``."""
    found = {id(inner): inner for layer in layers for inner in layer._flatten_layers()}
    hidden = {id(getattr(layer, "_lookup_layer", None)) for layer in found.values()}
    return [layer for number, layer in found.items() if number not in hidden]


def derived(layer: Any) -> list[Any]:
    """Return what a layer computes of what it has learnt, and keeps outside of variables."""
    if isinstance(layer, keras.layers.Normalization):
        return [getattr(layer, "mean", None), getattr(layer, "variance", None)]
    return [getattr(layer, "idf_weights_const", None)]


def _differ(before: Any, after: Any) -> bool:
    if before is None or after is None:
        return before is not after
    return not (is_symbolic(before) or np.array_equal(before, after))


def _state(layer: Any) -> list[tuple[str, Any]]:
    """Return the state that is not in variables: pairs of a name and a plain Python value."""
    state: list[tuple[str, Any]] = []
    if hasattr(layer, "get_vocabulary"):
        state.append(("vocabulary", [_plain(token) for token in layer.get_vocabulary()]))
        weights = _idf_weights(layer)
        if weights is not None:
            state.append(("IDF weights", weights.tolist()))
    for kind, names in _ARGUMENTS.items():
        if isinstance(layer, getattr(keras.layers, kind, ())):
            state += [(name, _plain(getattr(layer, name, None))) for name in names]
    if isinstance(layer, keras.layers.Normalization) and layer.input_mean is None and layer.built:
        learnt = [_plain(layer.adapt_mean), _plain(layer.adapt_variance)]
        initial = not np.any(learnt[0]) and np.all(np.equal(learnt[1], 1))
        state.append((_LEARNT, None if initial else learnt))
    return state


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, list | tuple):
        return list(value)  # a plain list, not Keras's class
    return np.asarray(value).tolist() if hasattr(value, "__array__") else value


def _idf_weights(layer: Any) -> Any:
    inner = layer
    if isinstance(layer, keras.layers.TextVectorization):
        require(layer, "_lookup_layer", "to compare the ranks' vocabularies")
        inner = layer._lookup_layer
    weights = getattr(inner, "idf_weights", None)
    return None if weights is None else np.asarray(weights)


def _views(value: Any, name: str, process_set: ProcessSet) -> list[str]:
    """Describe this value on each rank: its size, and the first entry that differs."""
    entries = value if isinstance(value, list) else [value]
    # Of each entry, so that a vocabulary of millions travels as 4 bytes a word.
    hashes = np.array([zlib.crc32(repr(entry).encode()) for entry in entries], np.uint32)
    gathered = agree.gather_bytes(f"{name}.entries", hashes.tobytes(), process_set)
    words = [np.frombuffer(data, np.uint32) for data in gathered]
    shortest = min(map(len, words))
    equal = np.all([theirs[:shortest] == words[0][:shortest] for theirs in words], axis=0)
    first = shortest if equal.all() else int(np.argmin(equal))
    view = f"[{first}] is {entries[first]!r:.60}" if first < len(entries) else "no more"
    view = f"{len(entries)} entries, {view}" if isinstance(value, list) else f"{value!r:.60}"
    return agree.gather_json(f"{name}.first", view, process_set)


def _learns(layer: Any) -> bool:
    """Whether ``adapt`` gives the layer a state that this module knows."""
    kinds = keras.layers.Discretization, keras.layers.Normalization, keras.utils.FeatureSpace
    return hasattr(layer, "get_vocabulary") or isinstance(layer, kinds)


def _learnt(layer: Any) -> Any:
    """Return the state from ``adapt``; None if the layer was not adapted."""
    if hasattr(layer, "get_vocabulary"):
        layers = keras.layers  # layers of others need not have the argument
        kinds = layers.StringLookup, layers.IntegerLookup, layers.TextVectorization
        if isinstance(layer, kinds) and not layer.get_vocabulary(include_special_tokens=False):
            return None
        vocabulary, weights = layer.get_vocabulary(), _idf_weights(layer)
        # Which pad_to_max_tokens has made longer.
        return vocabulary, None if weights is None else weights[: len(vocabulary)]
    if isinstance(layer, keras.layers.Discretization):
        return _plain(layer.bin_boundaries)
    if isinstance(layer, keras.layers.Normalization):
        if layer.input_mean is not None or not layer.built:
            return None
        return layer._build_input_shape, layer.adapt_mean.numpy(), layer.adapt_variance.numpy()
    return layer._is_adapted or None


def _learn(layer: Any, learnt: Any) -> None:
    """Take over the state that ``_learnt`` returned on another rank."""
    mine = _learnt(layer)
    if learnt is None:
        if mine is not None:
            raise ValueError(f"{layer.name} is adapted here, but not on the root: adapt it there.")
    elif hasattr(layer, "get_vocabulary"):
        vocabulary, weights = learnt
        if mine is None or mine[0] != vocabulary or _differ(mine[1], weights):
            layer.set_vocabulary(vocabulary, weights)
    elif isinstance(layer, keras.layers.Discretization):
        layer.bin_boundaries = learnt
    elif isinstance(layer, keras.layers.Normalization):
        shape, mean, variance = learnt
        if not layer.built:
            layer.build(shape)
        layer.adapt_mean.assign(mean)
        layer.adapt_variance.assign(variance)
        layer.finalize_state()
    else:
        layer._is_adapted = learnt
