"""hvd.data.files: rows of many files, an epoch of which can begin anywhere."""

import itertools
import os
import pathlib

import numpy as np
import pyarrow
import pytest
import tensorflow as tf
from pyarrow import parquet

import hvd_keras as hvd
from hvd_keras import data
from hvd_keras.data import row_files as of_files
from hvd_keras.data import sources
from hvd_keras.data.split import Order
from hvd_keras.data.tensorflow import arrays, records, sharding
from hvd_keras.runtime import agree
from tests.harness.shards import BATCH, RANK, SIZE, TOGETHER, error_of, job_pass, of_all, rows_of

pytestmark = pytest.mark.ranks(1, 2, 3)
# Of each file; some are empty, and in one case there are fewer files than ranks.
ROWS = [0, 3, 17, 1, 0, 40, 8, TOGETHER]
LENGTH = sum(ROWS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch) -> None:
    """Makes many blocks of few rows."""
    monkeypatch.setattr(records, "_BLOCK", 4)
    monkeypatch.setattr(arrays, "_ROWS", 2 * TOGETHER)


def write_tables(directory: pathlib.Path) -> None:
    """Writes rows that contain their number as Parquet files."""
    for number, count in enumerate(ROWS):
        x = np.arange(count) + sum(ROWS[:number])
        text = pyarrow.array([str(row) for row in x], pyarrow.string())
        kind = pyarrow.list_(pyarrow.int64(), *[2] * (number % 2))  # also of a fixed size
        pairs = pyarrow.array([[row, -row] for row in x], kind)
        table = pyarrow.table({"x": x, "half": x / 2, "text": text, "pair": pairs})
        parquet.write_table(table, directory / f"part-{number}.parquet", row_group_size=5)


def write(directory: pathlib.Path, rows: list[int] = ROWS, options: str = "") -> str:
    """Writes files of records that contain their number, of many lengths."""
    first = 0
    directory.mkdir(exist_ok=True)
    for number, count in enumerate(rows):
        path = str(directory / f"part-{number:03d}.tfrecord")
        with tf.io.TFRecordWriter(path, options) as file:
            for row in range(first, first + count):
                file.write(str(row).encode() + b" " * (row * 997 % 3000))
        first += count
    return str(directory / "*.tfrecord")


@pytest.fixture
def pattern(directory: pathlib.Path) -> str:
    if RANK == 0:
        write(directory)
    hvd.barrier()
    return str(directory / "*.tfrecord")


def parse(records):
    x = tf.strings.to_number(tf.strings.strip(records), tf.int64)
    if tf.reduce_min(x) < 0:  # which AutoGraph converts
        x = -x
    return x, -x


def shard(pattern, **arguments) -> tf.data.Dataset:
    files = {key: arguments.pop(key) for key in ("index",) if key in arguments}
    return data.shard(data.files(pattern, map=parse, **files), batch_size=BATCH, **arguments)


def joined(parts: list[list[int]]) -> list[int]:
    return [*itertools.chain(*parts)]


def test_each_row_once_in_an_order_that_no_number_of_ranks_changes(pattern: str) -> None:
    dataset = shard(pattern, uneven="pad", shuffle=20, seed=4)
    order = Order([*range(0, LENGTH, 4), LENGTH], 20, 4)
    epochs = [job_pass(dataset) for _ in range(2)]
    for epoch, steps in enumerate(epochs):
        assert len(steps) == len(dataset) == -(-LENGTH // TOGETHER)
        assert sorted(rows_of(steps)) == list(range(LENGTH))
        for number, step in enumerate(steps):
            places = number * TOGETHER, min(LENGTH, (number + 1) * TOGETHER)
            assert sorted(step) == sorted(order.rows(epoch, *places))
    assert [*map(sorted, epochs[0])] != [*map(sorted, epochs[1])]
    assert rows_of(job_pass(shard(pattern, uneven="pad", shuffle=20, seed=5))) != rows_of(epochs[0])


@pytest.mark.parametrize("uneven", ["share", "trim"])
def test_all_ranks_make_as_many_steps_of_as_many_rows(pattern: str, uneven: str) -> None:
    steps = of_all(shard(pattern, uneven=uneven, shuffle=0 if uneven == "trim" else False))
    left_out = LENGTH % TOGETHER if uneven == "trim" else LENGTH % TOGETHER % SIZE
    assert joined(steps) == list(range(LENGTH - left_out))


def test_parquet(directory: pathlib.Path) -> None:
    if RANK == 0:
        write_tables(directory)
    hvd.barrier()
    pattern = str(directory / "*.parquet")
    files = data.files(pattern, columns=({"half": "half", "pair": "pair", "text": "text"}, "x"))
    dataset = data.shard(files, batch_size=BATCH, uneven="pad", shuffle=16)
    orders = []
    for _ in range(2):
        rows = []
        for columns, x, weights in dataset:
            np.testing.assert_array_equal(columns["half"], (x.numpy() / 2).astype("float32"))
            np.testing.assert_array_equal(columns["pair"], np.stack([x, -x], 1))
            assert [int(text) for text in columns["text"].numpy()] == x.numpy().tolist()
            rows += x.numpy()[weights.numpy() > 0].tolist()
        everyone = agree.gather_json("parquet", rows)
        assert sorted(joined(everyone)) == list(range(LENGTH))
        orders.append(everyone)
    assert orders[0] != orders[1]
    everything = data.shard(data.files(pattern), batch_size=1)
    assert {*everything.element_spec} == {"half", "pair", "text", "x"}
    wrong = data.files(pattern, columns="z")
    assert "no columns ['z'], expected some of" in error_of(data.shard, wrong, batch_size=1)
    hvd.barrier()
    if RANK == 0:
        more = pyarrow.table({"x": np.arange(9.0)})
        parquet.write_table(more, directory / "part-9.parquet")
    hvd.barrier()
    mixed = data.shard(data.files(pattern, columns="x"), batch_size=1)
    told = ""
    try:
        list(mixed)
    except tf.errors.InvalidArgumentError as error:
        told = str(error)
    told = agree.gather_json("told", told)  # by the ranks that read those rows
    assert any("part-9.parquet has float32[] in each row" in text for text in told), told


@pytest.mark.parametrize("uneven", ["share", "pad"])
@pytest.mark.parametrize("change", [None, lambda batch: batch], ids=["columns", "map"])
@pytest.mark.parametrize("columns", [["half", "x"], (["half", "half"], "x")])
def test_lists_of_columns(directory: pathlib.Path, columns, change, uneven: str) -> None:
    """Are as tuples, which tf.data does not turn into one tensor."""
    if RANK == 0:
        write_tables(directory)
    hvd.barrier()
    files = data.files(str(directory / "*.parquet"), columns=columns, map=change)
    rows = []
    for halves, x, *weights in data.shard(files, batch_size=BATCH, uneven=uneven):
        for half in tf.nest.flatten(halves):
            np.testing.assert_array_equal(half, (x.numpy() / 2).astype("float32"))
        is_real = weights[0].numpy() > 0 if weights else slice(None)
        rows += x.numpy()[is_real].tolist()
    found = sorted(joined(agree.gather_json("parquet", rows)))
    assert len(found) == len({*found}) == LENGTH - LENGTH % TOGETHER % SIZE * (uneven == "share")


def test_rows_that_spark_has_written(directory: pathlib.Path) -> None:
    folder = directory / "by #1"
    if RANK == 0:
        folder.mkdir()
        write_tables(folder)
        (folder / "_SUCCESS").touch()
    hvd.barrier()
    for path in (str(folder), f"file://{folder}"):
        rows = hvd.spark.Rows(path, ({"row": "x"}, "half"), BATCH)
        batches = {mode: rows.dataset(uneven=mode) for mode in ("share", "trim")}
        mine = [
            [n for x, _ in batches[mode] for n in x["row"].numpy().tolist()] for mode in batches
        ]
        everyone = agree.gather_json("rows", mine)
        share, trim = (joined(parts) for parts in zip(*everyone, strict=True))
        assert len({*share}) == len(share) == LENGTH - LENGTH % TOGETHER % SIZE
        assert len({*trim}) == len(trim) == LENGTH - LENGTH % TOGETHER
    absent = hvd.spark.Rows(f"{folder}/absent" if RANK == SIZE - 1 else str(folder), "x", BATCH)
    assert "has no _SUCCESS" in error_of(absent.dataset)  # on all ranks


class Squares:
    """A source as grain has them."""

    read = 0

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int):
        Squares.read += 1
        return {"x": np.int64(row), "y": np.full(2, row**2, float), "text": str(row)}


@pytest.mark.parametrize("kind", ["grain", "datasets", "transform"])
def test_rows_by_number(kind: str, monkeypatch) -> None:
    monkeypatch.setattr(of_files, "_BLOCK", 4)
    source = Squares()
    if kind != "grain":
        library = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
        source = library.Dataset.from_list([{**row, "y": [*row["y"]]} for row in source_rows()])
        wide = source.add_column("more", [None] * LENGTH).with_format("numpy", ["x", "y"])
        assert {*data.shard(wide, batch_size=BATCH).element_spec} == {"x", "y"}
    if kind == "transform":
        few = source.remove_columns(["text", "y"])
        source = few.with_transform(lambda rows: list_of([Squares()[x] for x in rows["x"]]))
    dataset = data.shard(source, batch_size=BATCH, shuffle=16, uneven="share")
    assert dataset.element_spec["y"].dtype == tf.float32
    Squares.read = 0
    rows = []
    for batch in dataset:
        x = batch["x"].numpy()
        np.testing.assert_array_equal(batch["y"], np.stack([x**2, x**2], 1).astype("float32"))
        assert [int(text) for text in batch["text"].numpy()] == x.tolist()
        rows.append(x.tolist())
    everyone = joined(agree.gather_json("rows by number", joined(rows)))
    assert len(set(everyone)) == len(everyone) == LENGTH - LENGTH % TOGETHER % SIZE
    if kind == "grain":
        assert Squares.read == len(joined(rows)), "rows of other ranks were read"
    (passes,) = sharding.passes_of(dataset)
    passes.restore([0, 0, 0, LENGTH, 0, 0])
    unread = passes.seek(2 * TOGETHER)
    assert unread == 2
    again = [batch["x"].numpy().tolist() for batch in dataset.take(len(dataset) - 2)]
    assert again == rows[2:]


def list_of(rows: list[dict]) -> dict:
    return {name: [row[name] for row in rows] for name in rows[0]}


def source_rows() -> list[dict]:
    return [Squares()[row] for row in range(LENGTH)]


def test_a_file_for_more_ranks(directory: pathlib.Path) -> None:
    if RANK == 0:
        write(directory, [5 * SIZE])
    hvd.barrier()
    rows = joined(of_all(shard(str(directory / "*.tfrecord"))))
    assert sorted(rows) == list(range(5 * SIZE))


def test_the_rest_of_an_epoch_reads_nothing_before(pattern: str) -> None:
    """What was read before is damaged, as its checksum would tell."""
    dataset = shard(pattern, uneven="pad", shuffle=False)
    seen = 3 + 17 + 1 + 25  # also in the middle of a file
    if RANK == 0:
        left = seen
        for path, count in zip(sorted(pathlib.Path(pattern).parent.glob("p*")), ROWS, strict=True):
            facts, lines = path.stat(), [*tf.data.TFRecordDataset(str(path))]
            damaged = sum(16 + len(line.numpy()) for line in lines[: min(left, count)])
            content = path.read_bytes()
            path.write_bytes(b"\0" * damaged + content[damaged:])
            os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
            left -= min(left, count)
    hvd.barrier()
    (passes,) = sharding.passes_of(dataset)
    unread = passes.seek(seen)
    steps = -(-(LENGTH - seen) // TOGETHER)
    assert unread == len(dataset) - steps
    rows = [[*zip(x.numpy(), w.numpy(), strict=True)] for x, _, w in dataset.take(steps)]
    everyone = agree.gather_json("rest", [int(x) for step in rows for x, w in step if w])
    assert sorted(joined(everyone)) == list(range(seen, LENGTH))
    with pytest.raises(tf.errors.DataLossError, match="a damaged record"):
        next(iter(dataset))  # the next pass is a whole one


def test_seeds_depend_on_row_and_epoch_only(pattern: str) -> None:
    def parse(records, seeds):
        x = tf.strings.to_number(tf.strings.strip(records), tf.int64)
        tf.debugging.assert_equal(seeds[:, 1], x)
        return x, seeds[:, 0]

    dataset = data.shard(data.files(pattern, map=parse, seeds=True), batch_size=BATCH, seed=3)
    for epoch in range(2):
        seeds = {int(seed) for _, batch in dataset for seed in batch}
        assert seeds == {3 + (epoch << 32)}
    ordered = data.shard(
        data.files(pattern, map=parse, seeds=True), batch_size=BATCH, shuffle=False
    )
    for _ in range(RANK):
        list(ordered)
    if SIZE > 1:
        passes = sharding.passes_of(ordered)
        begun = agree.gather_json("begun", sources.begun(passes))
        with pytest.raises(ValueError, match="different numbers of passes"):
            sources.check_passes(passes, begun, hvd.global_process_set)


def test_an_index_is_kept_and_not_trusted_when_its_file_has_changed(pattern: str) -> None:
    of_all(shard(pattern))
    folder = pathlib.Path(pattern).parent
    indices = {path: path.stat().st_mtime_ns for path in folder.glob(".*.hvd-index")}
    assert len(indices) == len(ROWS)
    of_all(shard(pattern))
    assert {path: path.stat().st_mtime_ns for path in indices} == indices, "counted again"
    hvd.barrier()
    if RANK == 0:
        more = write(folder / "more", [LENGTH, 9])
        os.replace(more.replace("*", "part-001"), pattern.replace("*", "part-007"))
        header = b"\x93NUMPY\x01\x00\x10\x00{'descr': '<i8', \n"
        for number, damaged in (0, b"no index"), (3, b"PK\x03\x04"), (5, header):
            (folder / f".part-00{number}.tfrecord.hvd-index").write_bytes(damaged)
    hvd.barrier()
    rows = joined(of_all(shard(pattern, uneven="pad", shuffle=False)))
    assert set(rows) == {*range(LENGTH - TOGETHER), *range(LENGTH, LENGTH + 9)}


def test_a_folder_that_may_not_be_written(pattern: str, directory: pathlib.Path) -> None:
    rows = joined(of_all(shard(pattern, index=str(directory / "none"), uneven="trim")))
    assert len(set(rows)) == len(rows) == LENGTH // TOGETHER * TOGETHER
    assert [path for path in directory.rglob("*") if "index" in path.name] == []
    hvd.barrier()
    if RANK == 0:
        (directory / "there").mkdir()
    hvd.barrier()
    shard(pattern, index=str(directory / "there"))
    assert len([*(directory / "there").iterdir()]) == len(ROWS)
    assert [*directory.glob(".*")] == []


def test_files_that_cannot_be_used(pattern: str, directory: pathlib.Path) -> None:
    assert "no file matches" in error_of(shard, str(directory / "nothing-*"))
    if SIZE > 1:
        mine = pattern.replace("*", f"part-00{RANK}")
        assert "the ranks have different files" in error_of(shard, mine)
        other = data.files(pattern) if RANK else np.arange(9)
        assert "different files" in error_of(data.shard, other, batch_size=2)
    if RANK == 0:
        write(directory / "zip", [2], "GZIP")
        write(directory / "cut", [4])
        path = directory / "cut" / "part-000.tfrecord"
        path.write_bytes(path.read_bytes()[:-1])
        write(directory / "none", [0])
    hvd.barrier()
    for folder, text in {"zip": "no record of an uncompressed", "cut": "the file ends"}.items():
        with pytest.raises(RuntimeError, match=f"part-000.tfrecord: {text}"):
            shard(str(directory / folder / "*.tfrecord"))
    assert "000.tfrecord'], expected some" in error_of(shard, str(directory / "none" / "*"))
    assert "no row is in the source" in error_of(data.shard, Squares(0), batch_size=1)
    assert "shuffle=-1, seed=0, start_epoch=0, expected" in error_of(shard, pattern, shuffle=-1)
