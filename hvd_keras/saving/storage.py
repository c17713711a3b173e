"""Files of models and checkpoints: written atomically; checkpoints are verified before use.

A checkpoint is an HDF5 file with a user block of 512 bytes, which HDF5 skips. The block holds the
file's name, the id of its training, and the SHA-256 of that id and the rest, so every bit of the
file is covered, no file passes for another, and HDF5 never parses a damaged file. The file contains
a text ``facts`` (JSON) and a group ``variables`` with one dataset per variable, in order.

A training that begins anew in a folder with checkpoints names itself in the file ``training`` there
until its first checkpoint has replaced them: meanwhile they count for nothing.
"""

import contextlib
import errno
import fcntl
import hashlib
import importlib
import inspect
import io
import json
import os
import pathlib
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np

from hvd_keras.runtime import agree
from hvd_keras.runtime.keras import keras, replaced

_FIRST_LINE = b"hvd_keras checkpoint 5\n"
_BLOCK = 512  # bytes; the smallest user block that HDF5 knows
_NAME = re.compile(r"checkpoint-(\d{5,})-(\d{7,})\.h5")
_TRAINING = "training"  # the file that names the training which begins anew
# The temporary folders of write_whole, for checkpoints, the parts of per_rank, and that file.
_UNFINISHED = re.compile(r"\.(checkpoint-\d{5,}-\d{7,}(\.[0-9a-f]{8}-\d{4,})?\.h5|training)\..+")

# The user blocks of what this process found or wrote in each folder, by name.
_known: dict[pathlib.Path, dict[str, bytes]] = {}


class DamagedError(Exception):
    """A file is not as it was written; the text says why."""


@dataclass(frozen=True)
class Variable:
    """One variable of a training."""

    path: str  # in Keras
    by_rank: bool  # whether the first axis of the value is the rank
    value: Any  # an array of any dtype of TensorFlow except strings


@dataclass(frozen=True)
class Content:
    """The content of a checkpoint."""

    metadata: dict[str, Any]  # what JSON can represent
    variables: list[Variable]  # in the order in which they were written


def path_of(directory: pathlib.Path, epoch: int, batch: int) -> pathlib.Path:
    """The file of the state before batch ``batch`` of epoch ``epoch``, both counted from 0."""
    return directory / f"checkpoint-{epoch:05d}-{batch:07d}.h5"


def files(directory: pathlib.Path) -> list[pathlib.Path]:
    """Return the checkpoints in a directory, the most advanced first; [] without a directory."""
    if not directory.exists():
        return []
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and path.is_file()]
    return sorted(found, key=_position, reverse=True)


def _position(path: pathlib.Path) -> tuple[int, ...]:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return tuple(map(int, match.groups()))


def newest(directory: pathlib.Path) -> list[int]:
    """Return the epoch and the batch of the most advanced checkpoint; [] without one."""
    return [*_position(found[0])] if (found := files(directory)) else []


def remove_unfinished(directory: pathlib.Path) -> None:
    """Remove what killed writers have left. No other writer may use the directory."""
    if directory.exists():
        for path in directory.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def note_files(directory: pathlib.Path) -> None:
    """Note the checkpoints that a training finds, for ``refuse_others``."""
    _known.setdefault(_resolved(directory), {}).update(_blocks(directory))


def refuse_others(directory: pathlib.Path) -> None:
    """Raise RuntimeError if another process has written a checkpoint since ``note_files``."""
    known = _known.get(_resolved(directory), {})
    others = [name for name, block in _blocks(directory).items() if known.get(name) != block]
    if others:
        raise RuntimeError(
            f"another job, or the script, has written {others[0]} into {directory}. Jobs that run "
            "at the same time remove each other's checkpoints: give each a directory of its own."
        )


def _blocks(directory: pathlib.Path) -> dict[str, bytes]:
    """Return the user blocks of the checkpoints in a directory, by name."""
    found = {}
    for path in files(directory):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            found[path.name] = file.read(_BLOCK)
    return found


def new_training() -> str:
    """Return an id for a training."""
    return secrets.token_hex(8)


def abandon(directory: pathlib.Path) -> str:
    """Let no checkpoint that exists be restored any more; return the id of a new training."""
    training = new_training()
    if files(directory):
        text = f"{training} {agree.digest(training):016x}\n"  # damage must show
        write_whole(directory / _TRAINING, lambda path: path.write_text(text))
    return training


def current_training(directory: pathlib.Path) -> str | None:
    """Return the id of the training whose checkpoints count; None if there is none.

    Raises:
        DamagedError: the file that names it is not as it was written.
    """
    try:
        training, _, digest = (directory / _TRAINING).read_text().strip().partition(" ")
    except (FileNotFoundError, NotADirectoryError):
        # Without it, all files are of one training, unless a user has copied others there.
        return next(map(training_of, files(directory)), None)
    except UnicodeDecodeError:
        training = digest = ""
    if digest != f"{agree.digest(training):016x}":
        raise DamagedError("it does not name a training")
    return training


def training_of(path: pathlib.Path) -> str | None:
    """Return the id of the training that wrote a checkpoint; None if it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if stated := _STATED.search(file.read(_BLOCK)):
            return stated[3].decode()
    return None


def write(
    path: pathlib.Path,
    metadata: dict[str, Any],
    variables: Iterable[Variable],
    training: str = "none",
) -> None:
    """Write a checkpoint atomically: a crash leaves either no file of this name or a complete one.

    A file of this name is replaced. The variables are consumed one by one. ``training``: its id.
    """
    block = b""

    def fill(temporary: pathlib.Path) -> None:
        nonlocal block
        with _Disk(temporary, "w+b") as disk:
            try:
                # One variable at a time: the copies of all would be another model in memory.
                with h5py.File(disk, "w", userblock_size=_BLOCK) as file:
                    file["facts"] = json.dumps(metadata)
                    group = file.create_group("variables")
                    for number, variable in enumerate(variables):
                        data = group.create_dataset(f"{number:06d}", data=_storable(variable.value))
                        data.attrs["path"] = variable.path
                        data.attrs["by_rank"] = variable.by_rank
                        data.attrs["dtype"] = variable.value.dtype.name
                        disk.check()
            finally:
                disk.check()  # HDF5 may fail because of what was dropped
            block = _block(disk, path.name, training)  # reads all again, mostly from the page cache
            disk.seek(0)
            disk.write(block)
            disk.check()

    write_whole(path, fill)
    if _NAME.fullmatch(path.name):
        _known.setdefault(_resolved(path.parent), {})[path.name] = block


class _Disk(io.FileIO):
    """A file for HDF5, which cannot close one after an error, and would hold its disk space.

    So an error of ``write`` is kept for ``check``, and later bytes are dropped.
    """

    _error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all bytes, or none after an error."""
        rest = memoryview(data).cast("B")
        length = len(rest)
        try:
            while rest and self._error is None:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self._error = error
        return length

    def flush(self) -> None:
        """Called by HDF5; there is no buffer."""

    def check(self) -> None:
        """Raise the error of an earlier ``write``."""
        if self._error is not None:
            raise self._error


def prune(newest: pathlib.Path, keep: int) -> None:
    """Remove all checkpoints except ``newest`` and the ``keep`` - 1 before it of its training."""
    # More advanced ones are removed, too: they belong to an abandoned training, and the next
    # restart would take them for this one's.
    training = training_of(newest)
    # Newest first, as files() sorts them.
    found = files(newest.parent)
    older = [p for p in found if _position(p) <= _position(newest) and training_of(p) == training]
    for path in found:
        if path not in older[:keep]:
            path.unlink(missing_ok=True)
            _known.get(_resolved(path.parent), {}).pop(path.name, None)
    if (marker := newest.parent / _TRAINING).exists():
        _sync(newest.parent)  # the others are gone before they could count again
        marker.unlink()


def read(path: pathlib.Path) -> Content:
    """Verify and read a checkpoint. Raises as ``verify``."""
    verify(path)
    with h5py.File(path, "r") as file:
        metadata = json.loads(file["facts"].asstr()[()])
        variables = [
            Variable(data.attrs["path"], bool(data.attrs["by_rank"]), restored(data))
            for _, data in sorted(file["variables"].items())
        ]
    return Content(metadata, variables)


def read_last(
    directory: pathlib.Path, damaged: dict[str, str]
) -> tuple[pathlib.Path, Content] | None:
    """Read the most advanced checkpoint that is intact, of the training whose checkpoints count.

    Adds what is wrong with the others, by path, to ``damaged``; what is in it is not read again.
    """
    try:
        training = current_training(directory)
    except DamagedError as error:
        damaged[str(directory / _TRAINING)] = str(error)
        return None
    for path in files(directory):
        is_other = training and (training_of(path) or training) != training
        if str(path) not in damaged and not is_other:
            try:
                return path, read(path)
            except (DamagedError, OSError) as error:
                damaged[str(path)] = str(error)
    return None


def verify(path: pathlib.Path) -> None:
    """Verify every byte of a checkpoint.

    Raises:
        DamagedError: the file is not as it was written.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        found = file.read(_BLOCK)
        if size == 0:
            raise DamagedError("it is empty")
        if not found.startswith(_FIRST_LINE):
            raise DamagedError("it does not begin like a checkpoint of hvd_keras")
        stated = _STATED.search(found)
        if stated and int(stated[1]) != size:
            raise DamagedError(f"it has {size} bytes, but {int(stated[1])} were written")
        if stated and stated[2].decode() != path.name:
            raise DamagedError(f"it was written as {stated[2].decode()}")
        training = stated[3].decode() if stated else ""
        if found != _block(file, path.name, training):  # every byte of it, also the padding
            raise DamagedError("its content does not match its SHA-256")


_STATED = re.compile(rb"\n(\d+) bytes of ([\x21-\x7e]+) of training ([0-9a-z]+)\n")


def _block(file: Any, name: str, training: str) -> bytes:
    """Compute the user block for the content of an open file, which will have this name."""
    digest = hashlib.sha256(training.encode())
    file.seek(_BLOCK)
    while piece := file.read(1 << 20):
        digest.update(piece)
    rest = f"{file.tell()} bytes of {name} of training {training}\nSHA-256 {digest.hexdigest()}\n"
    return (_FIRST_LINE + rest.encode()).ljust(_BLOCK, b"\0")


def _storable(value: Any) -> Any:
    """Convert dtypes that HDF5 lacks, such as bfloat16, to bytes with one more axis."""
    return value if value.dtype.isbuiltin == 1 else value[..., np.newaxis].view(np.uint8)


def restored(data: Any, rows: slice | tuple[()] = ()) -> Any:
    """Return the value of a dataset of ``write``, or some rows, of the dtype that it had."""
    dtype, value = agree.numpy_dtype(data.attrs["dtype"]), np.asarray(data[rows])
    return value if value.dtype == dtype else value.view(dtype)[..., 0]


def writers() -> list[tuple[Any, str]]:
    """Return the functions by which those of Keras 3 write .keras and .h5 files, however called."""
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.saving import saving_lib

    files = [(saving_lib, "save_model"), (saving_lib, "save_weights_only")]
    return [*files, (legacy_h5_format, "save_model_to_hdf5")]


def save(folders: bool, of_keras: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace a function that saves a model: each file is complete at every moment.

    A script that saves on all ranks would otherwise have several processes write one file at once.
    ``folders``: whether it writes any kind of file or folder, and makes its parents.
    """
    signature = inspect.signature(of_keras)
    argument = "filepath" if "filepath" in signature.parameters else "export_dir"
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return of_keras(*args, **kwargs)  # raises an error that says what is wrong
    given = bound.arguments[argument]
    is_local = isinstance(given, str | os.PathLike) and "://" not in str(given)
    if not is_local or not (folders or _can_be_replaced(**bound.arguments)) or _in_place(given):
        return of_keras(*args, **kwargs)

    io_utils = importlib.import_module(f"{keras.__name__}.src.utils.io_utils")

    def write(path: pathlib.Path) -> None:
        bound.arguments[argument] = str(path)
        print_msg = io_utils.print_msg

        def print_given(message: str, *more: Any, **options: Any) -> None:
            print_msg(message.replace(str(path), str(given)), *more, **options)

        # Keras prints where it exports to.
        with replaced(io_utils, "print_msg", print_given) if folders else contextlib.nullcontext():
            of_keras(*bound.args, **bound.kwargs)

    return write_whole(given, write)


def _can_be_replaced(
    filepath: Any,
    overwrite: bool = True,
    zipped: bool | None = None,
    max_shard_size: float | None = None,
    save_format: str | None = None,
    **others: Any,
) -> bool:
    """Whether Keras would write files in an existing folder, and may replace them."""
    target = _resolved(filepath)
    makes_parents = "include_optimizer" in others  # for a whole model in HDF5
    if not (target.parent.is_dir() or makes_parents) or (target.exists() and not overwrite):
        return False
    if zipped is False or max_shard_size is not None:
        return True
    files = (".keras", ".h5", ".hdf5")
    is_single = pathlib.Path(filepath).suffix in files and save_format != "tf"
    return is_single and not target.is_dir()


def _resolved(path: str | os.PathLike[str]) -> pathlib.Path:
    """Return what a path stands for, behind all links; it need not exist."""
    return pathlib.Path(os.path.realpath(path))


def _in_place(filepath: str | os.PathLike[str]) -> bool:
    """Whether only the existing file itself can be written, or nothing: Keras does it or raises."""
    target = _resolved(filepath)
    exists = target.exists()
    is_special = exists and not (target.is_file() or target.is_dir())
    folder = target.parent
    while not folder.exists():  # which is made
        folder = folder.parent
    return is_special or not all(os.access(p, os.W_OK) for p in [folder] + [target] * exists)


def write_whole(filepath: str | os.PathLike[str], write: Callable[[pathlib.Path], Any]) -> None:
    """Lets ``write`` write into a temporary folder; moves what it wrote once that is on disk.

    Each file is replaced at once, in the order in which they were written, so those that name
    others come last. ``write`` gets a path with the target's name, a file or a folder, and may
    write other files beside it. An error leaves no partial file. Links remain, and what they stand
    for is replaced.
    """
    given, target = pathlib.Path(filepath), _resolved(filepath)
    target.parent.mkdir(parents=True, exist_ok=True)
    short = os.fsdecode(os.fsencode(given.name)[:200])  # a name has at most 255 bytes
    with tempfile.TemporaryDirectory(prefix=f".{short}.", dir=target.parent) as name:
        folder = pathlib.Path(name)
        write(folder / given.name)  # Keras chooses the format by the suffix
        written = sorted(folder.rglob("*"), key=lambda path: path.stat().st_mtime_ns)
        files = [path for path in written if path.is_file()]
        for path in files:
            _sync(path)  # a rename may reach the disk before the content otherwise
        with _locked(target.parent):
            for path in written:
                if path.is_dir():
                    place = _resolved(given.parent / path.relative_to(folder))
                    place.mkdir(parents=True, exist_ok=True)
            for path in files:
                _move(path, _resolved(given.parent / path.relative_to(folder)))
    _sync(target.parent)


def _move(path: pathlib.Path, place: pathlib.Path) -> None:
    """Move a file to its place, with the permissions and the owner of the file that is there."""
    before = place.stat() if place.exists() else None
    if before is not None and before.st_nlink == 1:
        path.chmod(before.st_mode)
        with contextlib.suppress(OSError):  # only root may give files away
            os.chown(path, before.st_uid, before.st_gid)
    try:
        if before is None or before.st_nlink == 1:
            path.replace(place)
            return
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EBUSY, errno.EPERM):
            raise
    # A name of several of one file, a mount point, another user's file in a folder with the sticky
    # bit, or a place behind a link on another disk.
    shutil.copyfile(path, place)
    _sync(place)


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """Keep the files of one writer together: those of two would not fit to each other."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # a network disk may have none for folders
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)
