"""Decides how the tables of a model are divided between ranks."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from hvd_keras.gradients.shards import Layout

Choice = Literal["auto", "rows", "columns"] | None
CHOICES = ("auto", "rows", "columns", None)

# A table of this size costs less to have on all ranks than to ask other ranks for.
SMALL_BYTES = 1 << 20
# How much more than its share a rank may have before a table is divided by columns.
_UNBALANCED = 1.1


@dataclasses.dataclass(frozen=True)
class TableSize:
    """What the plan depends on."""

    name: str
    input_dim: int
    output_dim: int
    item_bytes: int  # of a value
    shard: Choice = "auto"

    @property
    def size(self) -> int:
        return self.input_dim * self.output_dim * self.item_bytes


def layouts(tables: Sequence[TableSize], ranks: int) -> list[Layout | None]:
    """How each table is divided; None: every rank has all of it.

    With "auto", small tables are on all ranks. Of the others, the largest is divided by rows, and
    so are those that are larger than half of a rank's fair share. The rest goes, the largest first,
    to the rank that has least; or by columns to all, where that rank would get more than its share.
    """

    def make(table: TableSize, kind: Literal["rows", "columns", "whole"], owner: int = 0) -> Layout:
        return Layout(kind, table.input_dim, table.output_dim, ranks, owner)

    chosen: dict[int, Layout] = {}
    open_: list[int] = []  # tables of which the plan decides
    for i, table in enumerate(tables):
        if table.shard == "rows" or table.shard == "columns":
            chosen[i] = make(table, table.shard)
        elif table.shard == "auto" and table.size > SMALL_BYTES:
            open_.append(i)
    # The bytes that each rank should get; tables that are everywhere do not count.
    share = sum(tables[i].size for i in (*chosen, *open_)) / ranks
    whole: list[int] = []
    largest = max((*chosen, *open_), key=lambda i: tables[i].size, default=None)
    for i in open_:
        if ranks == 1 or i == largest or 2 * tables[i].size > share:
            chosen[i] = make(tables[i], "rows")
        else:
            whole.append(i)
    loads = [sum(chosen[i].size(r) * tables[i].item_bytes for i in chosen) for r in range(ranks)]
    # Ties are broken by place, so all ranks make one plan without a message.
    for i in sorted(whole, key=lambda i: (-tables[i].size, i)):
        rank = loads.index(min(loads))
        too_much = loads[rank] + tables[i].size > _UNBALANCED * share
        divide = too_much and tables[i].output_dim >= ranks
        chosen[i] = make(tables[i], "columns") if divide else make(tables[i], "whole", rank)
        for r in range(ranks):
            loads[r] += chosen[i].size(r) * tables[i].item_bytes
    return [chosen.get(i) for i in range(len(tables))]


def as_text(tables: Sequence[TableSize], chosen: Sequence[Layout | None], ranks: int) -> str:
    """The plan as a table: for each rank the MB that it has, and its share of the lookups."""
    heads = ["table", "size", "divided", *(f"rank {r}" for r in range(ranks))]
    lines = [heads]
    loads = [0.0] * ranks
    for table, layout in zip(tables, chosen, strict=True):
        sizes = [layout.size(r) * table.item_bytes if layout else table.size for r in range(ranks)]
        mb = [size / 1e6 for size in sizes]
        loads = [a + b for a, b in zip(loads, mb, strict=True)]
        how = "on all ranks" if layout is None else "on one rank"
        if layout is not None and layout.kind != "whole":
            how = f"by {layout.kind}"
        size = f"{table.input_dim} x {table.output_dim}"
        cells = [f"{m:.1f} MB, {_lookups(layout, r)}" for r, m in enumerate(mb)]
        lines.append([table.name, size, how, *cells])
    lines.append(["all", "", "", *(f"{load:.1f} MB" for load in loads)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(row.rstrip() for row in rows)


def _lookups(layout: Layout | None, rank: int) -> str:
    """The share of all ranks' lookups that a rank answers, if all ids are equally frequent."""
    if layout is None:
        return "its own"
    if layout.kind == "columns":
        return "100%"
    return f"{len(layout.part(rank).rows) / layout.input_dim:.0%}"
