"""The files of a checkpoint that hold the parts of tables and of optimizers, one of each rank.

``checkpoint-00003-0000200.1f2e3d4c-0001.h5`` is rank 1's. The checkpoint itself, without the second
number, is written when all of them are on disk, and names them: until then they count for nothing.
"""

import contextlib
import itertools
import pathlib
import re
import secrets
import shutil
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np
import tensorflow as tf

from hvd_keras.gradients import shards
from hvd_keras.runtime import agree
from hvd_keras.runtime.process_sets import ProcessSet
from hvd_keras.saving import storage

_NAME = re.compile(r"(checkpoint-\d{5,}-\d{7,})\.([0-9a-f]{8})-\d{4,}\.h5")
_UNFINISHED = re.compile(r"\." + _NAME.pattern + r"\..+")
_BLOCK = 1 << 20  # values that are read at once


def describe(own: list[Any]) -> dict[str, Any]:
    """Describe the tables among some variables, by index, in a form that JSON can represent.

    Slots of optimizers whose state is in shares count as tables, of any shape.
    """
    found = {str(i): shards.of(variable) for i, variable in enumerate(own)}
    return {
        i: {**shard.layout.as_json(), "shape": list(shard.shape)}
        for i, shard in found.items()
        if shard is not None
    }


def _layout(metadata: dict[str, Any]) -> shards.Layout:
    return shards.Layout(**{key: value for key, value in metadata.items() if key != "shape"})


def write(
    path: pathlib.Path, own: list[Any], tables: dict[str, Any], process_set: ProcessSet
) -> list[str]:
    """Write this rank's parts beside the checkpoint that will be written to ``path``.

    Args:
        path: of the checkpoint.
        own: the variables of the training.
        tables: from ``describe``.
        process_set: the ranks that write.

    Returns:
        The names of all ranks' files; [] if there are no tables.

    Raises:
        OSError: (on all ranks) a file cannot be written.
    """
    if not tables:
        return []
    token = agree.gather_json("checkpoint parts", secrets.token_hex(4), process_set)[0]
    names = [f"{path.stem}.{token}-{rank:04d}.h5" for rank in range(process_set.size())]
    mine = path.with_name(names[process_set.rank()])
    values = (storage.Variable(own[i].path, False, _as_rows(own[i])) for i in map(int, tables))
    name = "Checkpoint: cannot write a rank's part"
    try:
        agree.on_all_ranks(name, lambda: storage.write(mine, {}, values), process_set)
    except Exception:
        with contextlib.suppress(OSError):
            mine.unlink()
        raise
    return names


def _as_rows(variable: Any) -> Any:
    shard = shards.of(variable)
    assert shard is not None
    return np.asarray(variable).reshape(shard.part.shape)


def remove_others(directory: pathlib.Path, path: pathlib.Path | None, names: list[str]) -> None:
    """Remove files that belong to no checkpoint.

    Args:
        directory: of the checkpoints.
        path: the checkpoint that was written last; of its files all but ``names`` are removed.
            None: no rank is writing, so unfinished files are removed, too.
        names: from ``write``.

    Raises:
        OSError: a file cannot be removed.
    """
    if not directory.exists():
        return
    for file in directory.iterdir():
        if path is None and _UNFINISHED.fullmatch(file.name):
            shutil.rmtree(file, ignore_errors=True)
        match = _NAME.fullmatch(file.name)
        if match is None:
            continue
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


def restore(
    directory: pathlib.Path, metadata: dict[str, Any], own: list[Any], process_set: ProcessSet
) -> None:
    """Assign what the files have, of any number of ranks, to parts and to whole variables.

    Raises:
        OSError: a file cannot be read.
    """
    tables, names = metadata["parts"]["tables"], metadata["parts"]["files"]
    for number, (index, table) in enumerate(tables.items()):
        variable = own[int(index)]
        shard, before = shards.of(variable), _layout(table)
        mine = shards.Part(range(before.input_dim), range(before.output_dim))
        if shard is not None:
            mine = shard.part
        values = np.zeros(mine.shape, tf.as_dtype(variable.dtype).as_numpy_dtype)
        for rank, name in enumerate(names):
            theirs = before.part(rank)
            if theirs != mine and shard is not None and before == shard.layout:
                continue  # no rank needs another's
            if theirs.rows and theirs.columns and mine.rows and mine.columns:
                with h5py.File(directory / name, "r") as file:
                    _copy(file["variables"][f"{number:06d}"], theirs, values, mine)
        variable.assign(values.reshape(variable.shape))


def _copy(data: Any, theirs: shards.Part, values: Any, mine: shards.Part) -> None:
    """Copy what two parts of a table have in common from a file."""
    first = max(theirs.columns.start, mine.columns.start)
    last = min(theirs.columns.stop, mine.columns.stop)
    if first >= last or not theirs.rows or not mine.rows:
        return
    rows, step = len(theirs.rows), max(1, _BLOCK // len(theirs.columns))
    source = storage.restored(data) if data.attrs["dtype"] != data.dtype.name else data
    for begin in range(0, rows, step):
        block = theirs.rows[begin : begin + step]
        ids = np.arange(block.start, block.stop, block.step)
        at, beyond = np.divmod(ids - mine.rows.start, mine.rows.step)
        common = (beyond == 0) & (at >= 0) & (at < len(mine.rows))
        if common.any():
            read = source[begin : begin + step][common]
            there = slice(first - theirs.columns.start, last - theirs.columns.start)
            here = slice(first - mine.columns.start, last - mine.columns.start)
            values[at[common], here] = read[:, there]


def _without_numbers(path: str) -> str:
    """Remove the numbers by which Keras makes names unique in a process."""
    return re.sub(r"_\d+(?=[_/]|$)", "", path)


def _is_part(own: list[Any], i: int) -> bool:
    return i < len(own) and shards.of(own[i]) is not None


def differences(stored: list[Any], metadata: dict[str, Any], own: list[Any]) -> list[str]:
    """Tells how the variables of a training differ from those of a checkpoint."""
    tables = metadata.get("parts", {}).get("tables", {})
    there, here = [], []
    for i, (path, shape, dtype, by_rank) in enumerate(stored):
        table = tables.get(str(i))
        how = table["shape"] if table else list(shape)
        there.append(f"{path} {dtype}{how}" + " of each rank" * (by_rank and _is_part(own, i)))
    for variable in own:
        shard = shards.of(variable)
        how = list(variable.shape if shard is None else shard.shape)
        here.append(f"{variable.path} {tf.as_dtype(variable.dtype).name}{how}")
    return [
        f"{theirs or 'nothing'} in the checkpoint, {mine or 'nothing'} in the model"
        for theirs, mine in itertools.zip_longest(there, here)
        if not theirs or not mine or _without_numbers(theirs) != _without_numbers(mine)
    ]
