"""What differs by rank in a checkpoint: values and random states, and the parts of tables.

Values are in the checkpoint. Parts of tables and of optimizers have files, one of each rank:
``checkpoint-00003-0000200.1f2e3d4c-0001.h5`` is rank 1's. The checkpoint, without the second
number, is written when all of them are on disk, and names them: until then they count for nothing.
"""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import random
import re
import secrets
import socket
import warnings
from collections.abc import Callable, Container, Sequence
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np

from hvd_keras.gradients import model_ranks, shards
from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import has_gpu
from hvd_keras.runtime.process_sets import ProcessSet
from hvd_keras.saving import storage

_NAME = re.compile(r"(checkpoint-\d{5,}-\d{7,})\.([0-9a-f]{8})-\d{4,}\.h5")
_BYTES = 1 << 24  # of a value that are sent at once

# Begin the names of what follows the variables of a training in a checkpoint.
METRIC, CALLBACK, ATTRIBUTE = "metric ", "callback ", "attribute "


@dataclasses.dataclass
class Found:
    """A checkpoint as all ranks know it."""

    path: str
    metadata: dict[str, Any]
    stored: list[Any]  # (path, shape, dtype, whether by rank) of each variable
    more: list[Any]  # the same of metrics, callbacks and attributes, which follow
    content: storage.Content | None  # only on the first rank
    rounds: list[Any] = dataclasses.field(default_factory=list)  # that have ended; between both

    @property
    def tables(self) -> dict[str, Any]:
        """What is in the files of each rank."""
        tables: dict[str, Any] = self.metadata.get("parts", {}).get("tables", {})
        return tables

    def value(self, index: int, process_set: ProcessSet) -> Any:
        """Return a value on all ranks; [ranks, *shape], if it differed by rank."""
        if self.content is not None:
            value = self.content.variables[index].value
        else:
            _, shape, dtype, by_rank = [*self.stored, *self.rounds, *self.more][index]
            shape = [self.metadata["ranks"], *shape] if by_rank else shape
            value = np.empty(shape, agree.numpy_dtype(dtype))
        if process_set.size() == 1:
            return value
        call = {"root": process_set.ranks[0], "process_set": process_set.id()}
        # As bytes, for any dtype; in blocks, as a copy of a large table might not fit.
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        for first in range(0, data.size, _BYTES):
            block = data[first : first + _BYTES]
            (received,) = agree.run("broadcast", [block], name="checkpoint value", **call)
            if self.content is None:
                block[:] = received
        return value

    def match_rounds(self, model: Any, own: list[Any]) -> tuple[list[Any], list[Any]]:
        """Leave out the state of ``sync_every`` if only the checkpoint has it, or the training.

        Rounds are of several sets of ranks, of which one may be left, or may have been alone.

        Args:
            model: the one that is trained.
            own: the variables of the training, those of rounds last.

        Returns:
            ``own`` without what the checkpoint lacks, and the rounds that begin.
        """
        rounds, paths = model_ranks.rounds_of(model), [path for path, *_ in self.stored]
        begin = next((i for i, p in enumerate(paths) if p.startswith("common_0_")), len(paths))
        if rounds and begin == len(paths):
            return own[: -sum(len(one.variables()) + len(one.sent) for one in rounds)], rounds
        if not rounds and begin < len(paths):
            self.stored, self.rounds = self.stored[:begin], self.stored[begin:]
        return own, []


def find(
    directory: pathlib.Path, restore: bool, process_set: ProcessSet
) -> tuple[Found | None, str]:
    """Find the last intact checkpoint, on the first rank; return it on all, None without one.

    The second result is the id of the training that goes on or begins, on the first rank.
    ``restore``: False abandons the checkpoints that exist.

    Raises:
        RuntimeError: (on every rank) all are damaged, or another rank has a newer one.
    """
    if restore:
        _refuse_newer_ones(directory, process_set)
    damaged: dict[str, str] = {}  # what is wrong, by path
    while True:
        # Of values only the first rank's copy is read; the others need what describes them.
        read = agree.on_leader(
            "Checkpoint", functools.partial(_read, directory, restore, damaged), process_set
        )
        content, training, seen = read or (None, "", None)
        path, metadata, stored, damaged = agree.gather_json("checkpoint found", seen, process_set)[
            0
        ]
        # Each rank verifies some of the parts; a damaged one makes the whole unusable.
        problem = problem_of(directory, metadata, process_set)
        if problem is None:
            break
        damaged[path] = problem  # one more file is skipped
    reasons = "; ".join(f"{path}: {reason}" for path, reason in damaged.items())
    if path is None:
        if damaged:
            raise RuntimeError(
                f"Checkpoint: all checkpoints are damaged: {reasons}. To train from scratch, "
                "delete them or pass restore=False."
            )
        return None, training
    if damaged and process_set.rank() == 0:
        warnings.warn(f"Checkpoint: damaged: {reasons}. Restoring {path}.", stacklevel=4)
    kinds = METRIC, CALLBACK, ATTRIBUTE
    more = [described for described in stored if described[0].startswith(kinds)]
    own = stored[: len(stored) - len(more)]
    return Found(path, metadata, own, more, content), training


def _refuse_newer_ones(directory: pathlib.Path, process_set: ProcessSet) -> None:
    """Refuse to begin if the newest checkpoint is on another host's disk than the first rank's."""
    position: list[int] = []
    with contextlib.suppress(OSError):  # which only the first rank needs
        position = storage.newest(directory)
    mine = position, socket.gethostname()
    gathered = agree.gather_json("newest checkpoint", mine, process_set)
    (found, host), (of_leader, its_host) = max(gathered, key=lambda one: one[0]), gathered[0]
    if found > of_leader:
        name, its_name = (
            storage.path_of(directory, *one).name if one else "none" for one in (found, of_leader)
        )
        rank = process_set.ranks[gathered.index([found, host])]
        raise RuntimeError(
            f"Checkpoint: rank {rank} on {host} has {name} in {directory}, but rank "
            f"{process_set.ranks[0]}, which reads, is on {its_host} and has {its_name}. Use a "
            "folder that all hosts share, or copy the checkpoints there. If those of the other "
            "host are old, delete them. To train from scratch, pass restore=False."
        )


def _read(directory: pathlib.Path, restore: bool, damaged: dict[str, str]) -> Any:
    """Read the last intact checkpoint; return it, its training, and what all ranks must know."""
    storage.remove_unfinished(directory)
    remove_others(directory)
    storage.note_files(directory)
    if not restore:
        return None, storage.abandon(directory), (None, {}, [], damaged)
    found = storage.read_last(directory, damaged)
    if found is None:
        training = None if damaged else storage.current_training(directory)
        return None, training or storage.new_training(), (None, {}, [], damaged)
    path, content = found
    stored = [
        (v.path, v.value.shape[v.by_rank :], v.value.dtype.name, v.by_rank)
        for v in content.variables
    ]
    training = storage.training_of(path) or storage.new_training()
    return content, training, (str(path), content.metadata, stored, damaged)


def describe(own: list[Any]) -> dict[str, Any]:
    """Describe the tables among some variables, by index, in a form that JSON can represent."""
    # Slots of optimizers whose state is in shares count as tables, of any shape.
    found = {str(i): shards.of(variable) for i, variable in enumerate(own)}
    return {
        i: {**dataclasses.asdict(shard.layout), "shape": list(shard.shape)}
        for i, shard in found.items()
        if shard is not None
    }


def names_of(
    path: pathlib.Path, tables: dict[str, Any], process_set: ProcessSet
) -> list[pathlib.Path]:
    """Return where each rank writes its parts of ``tables`` beside the checkpoint ``path``."""
    if not tables:
        return []
    # New names in each write, because the checkpoint of this name may name older ones.
    token = agree.gather_json("checkpoint parts", secrets.token_hex(4), process_set)[0]
    names = (f"{path.stem}.{token}-{rank:04d}.h5" for rank in range(process_set.size()))
    return [path.with_name(name) for name in names]


def parts_of(own: list[Any], values: list[Any]) -> list[storage.Variable]:
    """Return this rank's parts of tables, as rows."""
    found = ((v, shards.of(v), value) for v, value in zip(own, values, strict=True))
    return [
        storage.Variable(variable.path, False, value.reshape(shard.part.shape))
        for variable, shard, value in found
        if shard is not None
    ]


def remove_others(
    directory: pathlib.Path, path: pathlib.Path | None = None, names: Sequence[str] = ()
) -> None:
    """Remove parts of no checkpoint, and of ``path``, written last, those not among ``names``."""
    for file in directory.iterdir() if directory.exists() else ():
        if match := _NAME.fullmatch(file.name):
            main = directory / f"{match[1]}.h5"
            if not main.exists() or (main == path and file.name not in names):
                file.unlink(missing_ok=True)


def problem_of(
    directory: pathlib.Path, metadata: dict[str, Any], process_set: ProcessSet
) -> str | None:
    """Verify the files of a checkpoint, each on one rank; return what is wrong, on all ranks."""
    names = metadata.get("parts", {}).get("files", [])
    if not names:
        return None
    problem = None
    for name in names[process_set.rank() :: process_set.size()]:
        try:
            storage.verify(directory / name)
        except (storage.DamagedError, OSError) as error:
            problem = problem or f"{name}: {error}"
    gathered = agree.gather_json("checkpoint parts are intact", problem, process_set)
    return next((text for text in gathered if text is not None), None)


def restore(directory: pathlib.Path, metadata: dict[str, Any], index: int, variable: Any) -> None:
    """Assign what the files have of a table, of any number of ranks, to a part or to the whole."""
    tables, names = metadata["parts"]["tables"], metadata["parts"]["files"]
    number, table = list(tables).index(str(index)), tables[str(index)]
    # The layout of the ranks that wrote, whose number may have been another one.
    before = shards.Layout(**{key: table[key] for key in table if key != "shape"})
    shard, dtype = shards.of(variable), agree.numpy_dtype(variable.dtype)
    whole = shards.Part(range(before.input_dim), range(before.output_dim))
    mine, found = whole if shard is None else shard.part, []
    with contextlib.ExitStack() as stack:
        # A rank opens the files of those whose parts meet its own; on as many ranks, one file.
        for rank, name in enumerate(names):
            theirs = before.part(rank)
            if theirs != mine and shard is not None and before == shard.layout:
                continue  # no rank needs another's
            if theirs.rows and mine.rows and {*theirs.columns} & {*mine.columns}:
                file = stack.enter_context(h5py.File(directory / name, "r"))
                found.append((theirs, file["variables"][f"{number:06d}"]))

        def rows(first: int, last: int) -> Any:
            block = np.zeros((last - first, before.output_dim), dtype)
            for part, data in found:
                part.put(storage.restored(data, part.between(first, last)), block, first)
            return block

        values = mine.read(rows, max(1, before.output_dim), dtype)
    variable.assign(values.reshape(variable.shape))


def _without_numbers(path: str) -> str:
    """Remove the numbers by which Keras makes names unique in a process."""
    return re.sub(r"_\d+(?=[_/ ]|$)", "", path)


def differences(checkpoint: Found, own: list[Any]) -> list[str]:
    """Tells how the variables of a training differ from those of a checkpoint."""
    stored, there, here = checkpoint.stored, [], []
    for i, (path, shape, dtype, by_rank) in enumerate(stored):
        table = checkpoint.tables.get(str(i))
        how = table["shape"] if table else list(shape)
        is_part = i < len(own) and shards.of(own[i]) is not None
        there.append((path, f"{_kind(dtype)}{how}" + " of each rank" * (by_rank and is_part)))
    for variable in own:
        shard = shards.of(variable)
        how = list(variable.shape if shard is None else shard.shape)
        here.append((variable.path, f"{_kind(agree.numpy_dtype(variable.dtype).name)}{how}"))
    found, nothing = [], ("nothing", "at all")
    for i, (theirs, mine) in enumerate(itertools.zip_longest(there, here, fillvalue=nothing)):
        # A layer of one rank has its name, and the file those of rank 0.
        names = [] if i < len(stored) and stored[i][3] else [theirs[0], mine[0]]
        is_same = theirs[1] == mine[1] and len({*map(_without_numbers, names)}) < 2
        if not is_same:
            found.append(f"{' '.join(theirs)} in the checkpoint, {' '.join(mine)} in the model")
    return found


def _kind(dtype: str) -> str:
    # Counters and seeds are of other dtypes on another backend of Keras.
    return "integer" if dtype in ("int32", "int64", "uint32") else dtype


def mean(stack: Any) -> Any:
    """Return the ranks' mean; of integers, such as a seed, the first rank's value."""
    return stack[0] if stack.dtype.kind in "iu" else stack.mean(axis=0)


def gather_differing(
    own: list[Any], values: list[Any], equal: Container[int], process_set: ProcessSet
) -> dict[int, Any]:
    """Return the values of all ranks, stacked, by index, for variables that differ by rank.

    ``equal`` are the ids of variables that need not be compared.
    On the first rank: a layer of each rank's own, times their number, may be too much for all.
    """
    if process_set.size() == 1:
        return {}
    # Parts of tables have files of their own, so they do not count as different.
    digests = [
        0 if shards.of(variable) or id(variable) in equal else agree.digest(value)
        for variable, value in zip(own, values, strict=True)
    ]
    # Only values that differ travel.
    gathered = agree.gather_json("checkpoint digests", digests, process_set)
    counts = list(map(len, gathered))
    if len(set(counts)) > 1:
        raise ValueError(f"Checkpoint: the ranks train different models, of {counts} variables.")
    differing = [i for i, theirs in enumerate(zip(*gathered, strict=True)) if len({*theirs}) > 1]
    # The slots of optimizers on GPUs: the first rank's are good for all.
    gpus = differing and agree.gather_json("checkpoint GPUs", has_gpu(), process_set)
    if any(gpus):
        call = {"process_set": process_set.id(), "name": "checkpoint rounding"}
        differing = [i for i in differing if not agree.is_rounding(values[i], call)]
    found = {}
    # [ranks, *shape]: dropout's states, a rank's own layers, moving statistics within an epoch.
    for i in differing:
        value = values[i]
        mine = value.tobytes()
        if parts := agree.gather_bytes("checkpoint by rank", mine, process_set, to_leader=True):
            found[i] = np.frombuffer(b"".join(parts), value.dtype).reshape(-1, *value.shape)
    return found


#: Other global generators: functions that return and set their states, by name.
generators: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}


def random_state() -> dict[str, Any]:
    """The states of the global generators, in a form that JSON can represent."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    state = {"python": [version, words, gauss], "numpy": [name, np.asarray(keys).tolist(), *rest]}
    return state | {name: get() for name, (get, _) in generators.items()}


def set_random_state(state: dict[str, Any]) -> None:
    """Set the state that ``random_state`` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))
    for name, (_, set_state) in generators.items():
        if name in state:  # a checkpoint may be of another backend
            set_state(state[name])
