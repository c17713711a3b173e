"""Lookups in tables of which each rank holds a part: ids there, rows back, gradients there.

    rank that looks up                          rank that holds the part
      sorts the ids by their owners
      ────── ids, one alltoall ──────────────▶  gathers the rows
      repeats rows that it asked for twice ◀──  sends each row once
      ────── gradients ──────────────────────▶  has one gradient for each id, by ranks

A gradient for each id, not for each row: optimizers such as Adam square the gradients of an id that
occurs twice separately, so only this gives the result of one process.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

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


# A script's tf.function would convert this code, and convert it wrongly.
@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
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
    asked = [_Asked(table, i, process_set) for table, i in zip(tables, safe, strict=True)]
    messages = []
    for r in range(process_set.size()):
        # int64: this rank's first bad id, how many ids of each table follow, and these.
        counts = tf.stack([tf.size(a.ids[r], tf.int64) for a in asked])
        messages.append(tf.concat([bad, counts, *(a.ids[r] for a in asked)], axis=0))
    received, lengths = ops.alltoall(
        tf.concat(messages, axis=0),
        [tf.size(message) for message in messages],
        name=f"{name} ids",
        process_set=process_set,
    )
    wanted = _wanted(tables, received, lengths, process_set)
    with tf.control_dependencies(_refuse(tables, wanted[0].problems, process_set.ranks)):
        rows = [tf.cast(tf.gather(w.table.part, w.local), w.table.dtype) for w in wanted]
    return _exchange(name, asked, wanted, rows, process_set)


def _out_of_range(tables: Sequence[Table], ids: Sequence[Any]) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Find the first id that is out of range.

    Returns:
        int64 ``[2]``: the number of its table and the id, or -1 and 0; and the ids with 0 in place
        of those that are out of range.
    """
    sizes = tf.stack([tf.size(i) for i in ids])
    every = tf.concat([tf.cast(i, tf.int64) for i in ids], axis=0)
    limits = tf.repeat(tf.constant([t.layout.input_dim for t in tables], tf.int64), sizes)
    wrong = tf.logical_or(every < 0, every >= limits)
    # Its place in all ids, -1 without one; and the number of the table whose ids end behind it.
    place = tf.concat([tf.where(wrong)[:1, 0], [-1]], axis=0)[0]
    table = tf.searchsorted(tf.cumsum(tf.cast(sizes, tf.int64)), place[tf.newaxis], side="right")[0]
    found = tf.gather(tf.concat([every, [0]], axis=0), tf.maximum(place, 0))
    bad = tf.where(
        place < 0, tf.constant([-1, 0], tf.int64), tf.stack([tf.cast(table, tf.int64), found])
    )
    return bad, tf.split(tf.where(wrong, tf.zeros_like(every), every), sizes, num=len(tables))


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
    """What this rank looks up in one table."""

    def __init__(self, table: Table, ids: tf.Tensor, process_set: ProcessSet) -> None:
        self.table = table
        self.ranks = n = process_set.size()
        layout = table.layout
        if layout.kind == "columns":
            self.ids = [ids] * n  # every rank has some columns of all rows
            unique, self._place = tf.unique(ids)
            self.rows = [tf.size(unique)] * n
            return
        if layout.kind == "rows":
            owner = tf.cast(ids % n, tf.int32)  # row i is row i // n of rank i % n
            self._order = tf.dynamic_partition(tf.range(tf.size(ids)), owner, n)
        else:
            nothing, every = tf.zeros([0], tf.int32), tf.range(tf.size(ids))
            self._order = [every if r == layout.owner else nothing for r in range(n)]
        self.ids = [tf.gather(ids, order) for order in self._order]  # that each rank is asked for
        # By ranks; unique() keeps the order, so the owners number their rows alike.
        unique, place = tf.unique(tf.concat(self.ids, axis=0))
        # From the order by ranks back to that of the ids.
        self._place = tf.gather(place, tf.math.invert_permutation(tf.concat(self._order, axis=0)))
        # The number of rows that come from each rank.
        if layout.kind == "rows":
            self.rows = tf.unstack(_count(unique % n, n), n)
        else:
            self.rows = [tf.size(unique) if r == layout.owner else 0 for r in range(n)]

    def width(self, rank: int) -> int:
        return len(self.table.layout.part(rank).columns)

    def result(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the rows of all ids, from the values that each rank has sent."""
        matrices = [tf.reshape(v, [-1, self.width(r)]) for r, v in enumerate(values)]
        axis = 1 if self.table.layout.kind == "columns" else 0
        return tf.gather(tf.concat(matrices, axis=axis), self._place)

    def gradients(self, upstream: tf.Tensor) -> list[tf.Tensor]:
        """For each rank the gradients that it gets, of shape ``[size]``."""
        if self.table.layout.kind == "columns":
            parts = [self.table.layout.part(r).columns for r in range(self.ranks)]
            pieces = [upstream[:, part.start : part.stop] for part in parts]
        else:
            pieces = [tf.gather(upstream, order) for order in self._order]
        return [tf.reshape(piece, [-1]) for piece in pieces]


class _Wanted:
    """What all ranks look up in this rank's part of one table."""

    def __init__(self, table: Table, problems: tf.Tensor, ids: Sequence[tf.Tensor]) -> None:
        self.table = table
        self.problems = problems  # int64 [ranks, 2]
        n = len(ids)
        self.counts = tf.stack([tf.size(i) for i in ids])
        every = tf.concat(ids, axis=0)
        # The rows of the part for all ids, in the order of the ranks that ask.
        self.local = every // n if table.layout.kind == "rows" else every
        rank = tf.repeat(tf.range(n, dtype=tf.int64), self.counts)  # that asks, of each id
        # The places of ids that a rank asks for the first time, and their number by rank.
        unique, number = tf.unique(rank * table.layout.input_dim + every)
        self.first = tf.math.unsorted_segment_min(tf.range(tf.size(every)), number, tf.size(unique))
        self.rows = _count(unique // table.layout.input_dim, n)

    def width(self, process_set: ProcessSet) -> int:
        return len(self.table.layout.part(process_set.rank()).columns)


def _count(ranks: tf.Tensor, n: int) -> tf.Tensor:
    """How often each rank from 0 to n - 1 occurs, int32."""
    return tf.math.unsorted_segment_sum(tf.ones_like(ranks, tf.int32), ranks, n)


def _wanted(
    tables: Sequence[Table], received: tf.Tensor, lengths: tf.Tensor, process_set: ProcessSet
) -> list[_Wanted]:
    """Take the ranks' messages apart."""
    n, t = process_set.size(), len(tables)
    problems, ids = [], []  # by rank, ids then by table
    for message in tf.split(received, lengths, num=n):
        problem, counts, rest = tf.split(message, [2, t, -1])
        problems.append(problem)
        ids.append(tf.split(rest, counts, num=t))
    stacked = tf.stack(problems)
    return [
        _Wanted(table, stacked, [of_rank[number] for of_rank in ids])
        for number, table in enumerate(tables)
    ]


def _exchange(
    name: str,
    asked: Sequence[_Asked],
    wanted: Sequence[_Wanted],
    rows: Sequence[tf.Tensor],
    process_set: ProcessSet,
) -> list[tf.Tensor]:
    """Send each row once to each rank that wants it; and the gradients of all ids back."""
    n, t = process_set.size(), len(asked)

    def alltoall(messages: Sequence[Sequence[tf.Tensor]], what: str) -> tf.Tensor:
        """Send to each rank its pieces of shape ``[size]``."""
        joined = [tf.concat(message, axis=0) for message in messages]
        received, _ = ops.alltoall(
            tf.concat(joined, axis=0),
            [tf.size(message) for message in joined],
            name=f"{name} {what}",
            process_set=process_set,
        )
        return received

    def gradient(*upstream: Any) -> list[tf.Tensor]:
        pieces = [
            a.gradients(tf.convert_to_tensor(u)) for a, u in zip(asked, upstream, strict=True)
        ]
        received = alltoall([[piece[r] for piece in pieces] for r in range(n)], "gradients")
        # Values from each rank for each table, [n · t]; the pieces of a table are t apart.
        sizes = tf.stack([w.counts * w.width(process_set) for w in wanted], axis=1)
        found = tf.split(received, tf.reshape(sizes, [-1]), num=n * t)
        return [
            tf.reshape(tf.concat(found[number::t], axis=0), [-1, w.width(process_set)])
            for number, w in enumerate(wanted)
        ]

    # Not alltoall's own gradient: rows that are sent once stand for several ids.
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def forward(*rows: tf.Tensor) -> Any:
        pieces = [
            [
                tf.reshape(part, [-1])
                for part in tf.split(tf.gather(of_table, w.first), w.rows, num=n)
            ]
            for of_table, w in zip(rows, wanted, strict=True)
        ]
        received = alltoall([[piece[r] for piece in pieces] for r in range(n)], "rows")
        sizes = [a.rows[r] * a.width(r) for r in range(n) for a in asked]
        found = tf.split(received, tf.stack(sizes), num=n * t)
        return [a.result(found[number::t]) for number, a in enumerate(asked)], gradient

    return list(forward(*rows))
