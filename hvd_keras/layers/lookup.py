"""Lookups in tables of which each rank holds a part: ids there, rows back, gradients there.

    rank that looks up                          rank that holds the part
      finds the different ids, by their owners
      ────── ids, and which each is ─────────▶  gathers a row for each different id
      repeats the rows                     ◀──  sends them
      ────── gradients ──────────────────────▶  has one gradient for each id, by ranks

A gradient for each id, not for each row: optimizers such as Adam square the gradients of an id that
occurs twice separately, so only this gives the result of one process.

Tables of equal width that are not divided by columns are looked up as one, a group.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_keras import ops
from hvd_keras.gradients.shards import Layout
from hvd_keras.ops import validate
from hvd_keras.runtime import rank_info
from hvd_keras.runtime.process_sets import ProcessSet


@dataclasses.dataclass(frozen=True)
class Table:
    """A table for ``lookup``, of which this rank has a part."""

    name: str  # for errors
    part: Any  # a tf.Variable
    layout: Layout  # with one rank, it has all
    dtype: str  # of the rows that are sent and returned


def lookup(
    name: str, tables: Sequence[Table], ids: Sequence[Any], process_set: ProcessSet | None
) -> list[tf.Tensor]:
    """Look up ids in the tables. All ranks of the process set must call it.

    Args:
        name: identifies the call on all ranks.
        tables: of one dtype, the same on all ranks.
        ids: for each table int64 of shape ``[n]``; n may differ by rank.
        process_set: the ranks that hold the tables. None: this rank has all of them.

    Returns:
        For each table its rows, of shape ``[n, output_dim]``.
    """
    if validate.is_compiling():
        raise NotImplementedError(
            f"XLA cannot compile the lookup in {tables[0].name!r}: how many ids go to each rank "
            "depends on the data. Use jit_compile=False, or keras.layers.Embedding."
        )
    bad, safe = _out_of_range(tables, ids)
    if process_set is None or process_set.size() == 1:
        with tf.control_dependencies(_refuse(tables, bad[tf.newaxis], [rank_info.rank()])):
            safe = [tf.identity(i) for i in safe]
        parts = zip(tables, safe, strict=True)
        return [tf.cast(tf.gather(table.part, i), table.dtype) for table, i in parts]
    groups = _groups(tables)
    asked = [
        _Asked([tables[i] for i in group], [safe[i] for i in group], process_set.size())
        for group in groups
    ]
    wanted = _ask(name, tables, bad, asked, process_set)
    rows = _exchange(name, asked, wanted, process_set)
    by_table = zip(itertools.chain(*groups), itertools.chain(*rows), strict=True)
    return [of_table for _, of_table in sorted(by_table, key=lambda pair: pair[0])]


def _groups(tables: Sequence[Table]) -> list[list[int]]:
    """Return the indices of the tables that are looked up as one."""
    groups: dict[Any, list[int]] = {}
    for i, table in enumerate(tables):
        by_columns = table.layout.kind == "columns"
        groups.setdefault(("columns", i) if by_columns else table.layout.output_dim, []).append(i)
    return list(groups.values())


def _out_of_range(tables: Sequence[Table], ids: Sequence[Any]) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Find the first id that is out of range.

    Returns:
        int64 ``[2]``: the number of its table and the id, or -1 and 0; and the ids with 0 in place
        of those that are out of range.
    """
    every, sizes = tf.concat(ids, axis=0), tf.stack([tf.size(i) for i in ids])
    limits = _for_each([t.layout.input_dim for t in tables], sizes)
    wrong = tf.logical_or(every < 0, every >= limits)
    # Its place in all ids, -1 without one; and the number of the table whose ids end behind it.
    place = tf.concat([tf.where(wrong)[:1, 0], [-1]], axis=0)[0]
    table = tf.searchsorted(tf.cumsum(tf.cast(sizes, tf.int64)), place[tf.newaxis], side="right")[0]
    found = tf.gather(tf.concat([every, [0]], axis=0), tf.maximum(place, 0))
    bad = tf.where(
        place < 0, tf.constant([-1, 0], tf.int64), tf.stack([tf.cast(table, tf.int64), found])
    )
    return bad, tf.split(tf.where(wrong, tf.zeros_like(every), every), sizes, num=len(tables))


def _for_each(numbers: Sequence[int], sizes: tf.Tensor) -> tf.Tensor:
    """Repeat each table's number for each of its ids, int64; a scalar if all are equal."""
    if len(set(numbers)) == 1:
        return tf.constant(numbers[0], tf.int64)
    return tf.gather(tf.constant(numbers, tf.int64), _owner_of(sizes))


def _owner_of(sizes: tf.Tensor) -> tf.Tensor:
    """For each of the things of which owner i has sizes[i], one after the other, its i (int32)."""
    ends = tf.cumsum(sizes)
    return tf.searchsorted(ends, tf.range(tf.reduce_sum(sizes)), side="right")


def _refuse(tables: Sequence[Table], problems: tf.Tensor, ranks: list[int]) -> list[Any]:
    """Raise an error if a rank has an id that is out of range; in a graph, return the check.

    ``problems`` is what each rank's ``_out_of_range`` has found.
    """
    faulty = tf.where(problems[:, 0] >= 0)[:1, 0]

    def text() -> tf.Tensor:
        rank = faulty[0]
        table, wrong = tf.unstack(problems[rank])
        names = [f"{t.name}, which has ids from 0 to {t.layout.input_dim - 1}" for t in tables]
        whose = tf.strings.as_string(tf.gather(tf.constant(ranks), rank))
        parts = ["rank ", whose, " looked up id ", tf.strings.as_string(wrong), " in embedding "]
        return tf.strings.join([*parts, tf.gather(tf.constant(names), table)])

    if tf.executing_eagerly():
        if tf.size(faulty):
            raise tf.errors.InvalidArgumentError(None, None, text().numpy().decode())
        return []
    fine = tf.equal(tf.size(faulty), 0)
    message = tf.cond(fine, lambda: tf.constant(""), text)
    return [tf.debugging.Assert(fine, [message])]


class _Asked:
    """What this rank looks up in a group of tables, by the ranks that are asked."""

    def __init__(self, tables: Sequence[Table], ids: Sequence[tf.Tensor], ranks: int) -> None:
        layouts = [table.layout for table in tables]
        self.layout = layouts[0]  # width and kind, of all
        self.tables, self.ranks = tables, ranks
        self._sizes = sizes = tf.stack([tf.size(i) for i in ids])
        # Numbers for the rows of all tables, in the order of the tables.
        first = [0, *itertools.accumulate(layout.input_dim for layout in layouts)]
        numbers = tf.concat(ids, axis=0)
        if len(tables) > 1:
            numbers += _for_each(first[:-1], sizes)
        different, which = tf.unique(numbers)
        count = tf.size(different)
        table = tf.zeros([count], tf.int32)
        if len(tables) > 1:
            ends = tf.constant(first[1:], tf.int64)
            table = tf.searchsorted(ends, different, side="right")
            different -= tf.gather(tf.constant(first[:-1], tf.int64), table)
        if self.layout.kind == "columns":  # every rank has some columns of all rows
            self.ids = tf.tile(different, [ranks])
            self.counts = tf.repeat(count[tf.newaxis], ranks)[:, tf.newaxis]
            self.places = tf.tile(which, [ranks])
            self.sizes = tf.repeat(sizes[tf.newaxis], ranks, axis=0)
            self._place = which
            return
        owner = _owners(layouts, different, table)
        by_owner = tf.concat(tf.dynamic_partition(tf.range(count), owner, ranks), axis=0)
        self.ids = tf.gather(different, by_owner)  # int64
        self.counts = _count(owner, table, ranks, len(tables))  # int32 [ranks, tables]
        # Where the row of each id is among those of all ranks.
        self._place = tf.gather(tf.math.invert_permutation(by_owner), which)
        # The same, in the order in which the gradients of all ids are sent, and from the first row
        # of each rank on.
        owner = tf.gather(owner, which)
        order = tf.dynamic_partition(tf.range(tf.size(which)), owner, ranks)
        self._order = tf.concat(order, axis=0)
        before = tf.cumsum(tf.reduce_sum(self.counts, axis=1), exclusive=True)
        self.places = tf.gather(self._place - tf.gather(before, owner), self._order)
        of_table = _owner_of(sizes) if len(tables) > 1 else tf.zeros_like(owner)
        self.sizes = _count(owner, of_table, ranks, len(tables))  # of ids, as ``counts``

    def widths(self) -> np.ndarray:
        """How many columns each rank has."""
        return np.array([len(self.layout.part(r).columns) for r in range(self.ranks)], np.int32)

    def result(self, values: tf.Tensor) -> list[tf.Tensor]:
        """Return the rows of all ids by table, from the values of all ranks."""
        if self.layout.kind == "columns":
            lengths = self.widths() * self.counts[:, 0]
            pieces = zip(tf.split(values, lengths, num=self.ranks), self.widths(), strict=True)
            rows = tf.concat([tf.reshape(piece, [-1, width]) for piece, width in pieces], axis=1)
        else:
            rows = tf.reshape(values, [-1, self.layout.output_dim])
        return list(tf.split(tf.gather(rows, self._place), self._sizes, num=len(self.tables)))

    def gradients(self, upstream: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the values that the ranks get, one rank's after the other's."""
        every = tf.concat(upstream, axis=0)
        if self.layout.kind != "columns":
            return tf.reshape(tf.gather(every, self._order), [-1])
        pieces = tf.split(every, self.widths(), axis=1)
        return tf.concat([tf.reshape(piece, [-1]) for piece in pieces], axis=0)


def _owners(layouts: Sequence[Layout], ids: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
    """Return the rank that has each row, int32; ``table``: of each id."""
    by_rows = [layout.kind == "rows" for layout in layouts]
    # Row i is row i // n of rank i % n.
    owner = tf.cast(ids % layouts[0].ranks, tf.int32)
    if all(by_rows):
        return owner
    fixed = tf.gather(tf.constant([layout.owner for layout in layouts], tf.int32), table)
    return tf.where(tf.gather(tf.constant(by_rows), table), owner, fixed)


def _count(ranks: tf.Tensor, tables: tf.Tensor, n: int, t: int) -> tf.Tensor:
    """How often each pair of a rank and a table occurs, int32 ``[n, t]``."""
    pairs = ranks * t + tables
    counts = tf.math.unsorted_segment_sum(tf.ones_like(pairs), pairs, n * t)
    return tf.reshape(counts, [n, t])


class _Wanted:
    """What all ranks look up in this rank's parts of a group of tables.

    Args:
        counts, sizes: how many different ids, and ids, each rank has, int32 ``[ranks, tables]``.
        ids: the different ones, of one rank after the other.
        places: for each id, its number among the different ones of its rank.
    """

    def __init__(
        self, asked: _Asked, rank: int, counts: Any, sizes: Any, ids: Any, places: Any
    ) -> None:
        self.tables, self._ranks = asked.tables, asked.ranks
        self.counts, self.sizes = counts, sizes
        self.width = len(asked.layout.part(rank).columns)
        # Of each table, the rows of this rank's part: the different ones, and for each id.
        self._ids = self._of_part(self._by_table(ids, counts))
        before = tf.cumsum(tf.reduce_sum(counts, axis=1), exclusive=True)
        places += tf.gather(tf.cast(before, tf.int64), _owner_of(tf.reduce_sum(sizes, axis=1)))
        self._indices = self._of_part(self._by_table(tf.gather(ids, places), sizes))

    def _of_part(self, by_table: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        pairs = zip(self.tables, by_table, strict=True)
        return [i // self._ranks if t.layout.kind == "rows" else i for t, i in pairs]

    def _by_table(self, values: tf.Tensor, counts: tf.Tensor) -> list[tf.Tensor]:
        """Sort what is in the order of ranks and then tables."""
        t = len(self.tables)
        if t == 1:
            return [values]
        pieces = tf.split(values, tf.reshape(counts, [-1]), num=self._ranks * t)
        return [tf.concat(pieces[i::t], axis=0) for i in range(t)]

    def rows(self, parts: Sequence[Any]) -> tf.Tensor:
        """Return the values for the ranks, one rank's after the other's; ``parts``: handles."""
        found = [
            _gather(table.part, part, i)
            for table, part, i in zip(self.tables, parts, self._ids, strict=True)
        ]
        t = len(self.tables)
        if t > 1:
            by_table = [
                tf.split(rows, self.counts[:, i], num=self._ranks) for i, rows in enumerate(found)
            ]
            found = [by_table[i][r] for r in range(self._ranks) for i in range(t)]
        joined = tf.concat(found, axis=0)
        return tf.reshape(tf.cast(joined, self.tables[0].dtype), [-1])

    def gradients(self, values: tf.Tensor) -> list[tf.IndexedSlices]:
        """Return the gradient of each part, with one row for each id."""
        rows = self._by_table(tf.reshape(values, [-1, self.width]), self.sizes)
        return [
            tf.IndexedSlices(
                tf.cast(of_table, table.part.dtype),
                indices,
                tf.constant(table.part.shape.as_list()),
            )
            for table, of_table, indices in zip(self.tables, rows, self._indices, strict=True)
        ]


def _gather(part: Any, handle: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    if not isinstance(part, tf.Variable):  # its initial value, while Keras builds a graph
        return tf.gather(part, indices)
    return tf.raw_ops.ResourceGather(resource=handle, indices=indices, dtype=part.dtype)


def _ask(
    name: str,
    tables: Sequence[Table],
    bad: tf.Tensor,
    asked: Sequence[_Asked],
    process_set: ProcessSet,
) -> list[_Wanted]:
    """Exchange what the ranks look up; raise an error on all if one of them has a bad id."""
    n, t = process_set.size(), len(tables)
    # To each rank int64: this rank's first bad id, the numbers of ids, and these.
    numbers = [tf.cast(count, tf.int64) for a in asked for count in (a.counts, a.sizes)]
    head = tf.concat([tf.repeat(bad[tf.newaxis], n, axis=0), *numbers], axis=1)
    bodies = [tf.cast(body, tf.int64) for a in asked for body in (a.ids, a.places)]
    lengths = [tf.fill([n], 2 + 2 * t), *(tf.reduce_sum(number, axis=1) for number in numbers)]
    lengths = [tf.cast(length, tf.int32) for length in lengths]
    received, sizes = ops.alltoall(
        *_interleaved([tf.reshape(head, [-1]), *bodies], lengths),
        name=f"{name} ids",
        process_set=process_set,
    )
    starts = tf.cumsum(sizes, exclusive=True)
    heads = tf.gather(received, starts[:, tf.newaxis] + tf.range(2 + 2 * t))  # [ranks, 2 + 2t]
    with tf.control_dependencies(_refuse(tables, heads[:, :2], process_set.ranks)):
        found = tf.cast(heads[:, 2:], tf.int32)
    counts = tf.split(found, [len(a.tables) for a in asked for _ in range(2)], axis=1)
    lengths[1:] = [tf.reduce_sum(count, axis=1) for count in counts]
    _, *bodies = _taken_apart(received, lengths)
    return [
        _Wanted(a, process_set.rank(), *counts[i : i + 2], *bodies[i : i + 2])
        for i, a in zip(range(0, len(bodies), 2), asked, strict=True)
    ]


def _interleaved(values: list[tf.Tensor], lengths: list[Any]) -> tuple[tf.Tensor, tf.Tensor]:
    """Join vectors, each by rank, into one by rank; return it and its lengths by rank."""
    if len(values) == 1:
        return values[0], lengths[0]
    n = lengths[0].shape[0]
    pieces = [tf.split(v, length, num=n) for v, length in zip(values, lengths, strict=True)]
    joined = tf.concat([piece[r] for r in range(n) for piece in pieces], axis=0)
    return joined, tf.add_n(lengths)


def _taken_apart(joined: tf.Tensor, lengths: list[Any]) -> list[tf.Tensor]:
    """Undo ``_interleaved``."""
    if len(lengths) == 1:
        return [joined]
    each, n = tf.reshape(tf.stack(lengths, axis=1), [-1]), lengths[0].shape[0]
    pieces = tf.split(joined, each, num=n * len(lengths))
    return [tf.concat(pieces[i :: len(lengths)], axis=0) for i in range(len(lengths))]


def _exchange(
    name: str, asked: Sequence[_Asked], wanted: Sequence[_Wanted], process_set: ProcessSet
) -> list[list[tf.Tensor]]:
    """Send each row once to each rank that wants it; and the gradients of all ids back."""
    tables = [table for a in asked for table in a.tables]
    at_asker = [[tf.reduce_sum(c, axis=1) for c in (a.counts, a.sizes)] for a in asked]
    at_owner = [[tf.reduce_sum(c, axis=1) for c in (w.counts, w.sizes)] for w in wanted]

    def by_group(flat: Sequence[Any]) -> list[list[Any]]:
        rest = iter(flat)
        return [list(itertools.islice(rest, len(a.tables))) for a in asked]

    def send(values: list[tf.Tensor], sent: Any, received: Any, what: str) -> list[tf.Tensor]:
        found, _ = ops.alltoall(
            *_interleaved(values, sent), name=f"{name} {what}", process_set=process_set
        )
        return _taken_apart(found, received)

    def lengths(of_gradients: bool) -> tuple[list[Any], list[Any]]:
        """Values that each rank exchanges as one that looks up, and as one that holds a part."""
        asks = [c[of_gradients] * a.widths() for c, a in zip(at_asker, asked, strict=True)]
        has = [c[of_gradients] * w.width for c, w in zip(at_owner, wanted, strict=True)]
        return asks, has

    def gradient(*upstream: Any) -> list[tf.IndexedSlices]:
        given = by_group([tf.convert_to_tensor(u) for u in upstream])
        values = [a.gradients(of_group) for a, of_group in zip(asked, given, strict=True)]
        sent, received = lengths(True)
        found = send(values, sent, received, "gradients")
        return [g for w, v in zip(wanted, found, strict=True) for g in w.gradients(v)]

    # Not the gradients of alltoall and of gathered rows: a row that is sent once stands for several
    # ids.
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def forward(*parts: tf.Tensor) -> Any:
        given = by_group(parts)
        values = [w.rows(of_group) for w, of_group in zip(wanted, given, strict=True)]
        received, sent = lengths(False)
        found = send(values, sent, received, "rows")
        results = [a.result(v) for a, v in zip(asked, found, strict=True)]
        return list(itertools.chain(*results)), gradient

    handles = []
    for table in tables:
        is_variable = isinstance(table.part, tf.Variable)
        if is_variable:
            tf.gather(table.part, tf.zeros([0], tf.int32))  # tells gradient tapes of the variable
        handles.append(table.part.handle if is_variable else table.part)
    return by_group(forward(*handles))
