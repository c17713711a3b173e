"""How tables are divided between ranks, without ranks."""

import dataclasses

import numpy as np
import pytest

from hvd_keras.gradients import shards
from hvd_keras.gradients.shards import Layout
from hvd_keras.layers import plan

MB = 1 << 20


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("kind", ["rows", "columns", "whole"])
def test_the_parts_cover_a_table_once(monkeypatch, kind, ranks) -> None:
    table = np.arange(11 * 7).reshape(11, 7)
    layout = Layout(kind, *table.shape, ranks, owner=ranks - 1)
    seen = np.zeros_like(table)
    for rank in range(ranks):
        part = layout.part(rank)
        assert layout.size(rank) == part.shape[0] * part.shape[1]
        monkeypatch.setattr(shards, "BLOCK", 4 * 7)  # values: 3 blocks
        values = part.read(lambda first, last: table[first:last], 7, table.dtype)
        columns = slice(part.columns.start, part.columns.stop)
        np.testing.assert_array_equal(values, table[list(part.rows), columns])
        seen[list(part.rows), columns] += 1
    assert (seen == 1).all()
    assert Layout(**dataclasses.asdict(layout)) == layout


def table(name: str, mb: float, shard: plan.Choice = "auto", width: int = 64) -> plan.TableSize:
    return plan.TableSize(name, int(mb * MB / 4 / width), width, 4, shard)


def kinds(tables: list[plan.TableSize], ranks: int) -> list[str | None]:
    return [layout and layout.kind for layout in plan.layouts(tables, ranks)]


def test_one_table() -> None:
    assert kinds([table("small", 1)], 4) == [None]
    assert kinds([table("large", 1.1)], 4) == ["rows"]
    assert kinds([table("small", 0.1, "rows")], 4) == ["rows"]
    assert kinds([table("large", 100, None)], 4) == [None]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_many_tables_are_balanced(ranks) -> None:
    random = np.random.default_rng(ranks)
    sizes = [0.5, 900, 300, *random.uniform(2, 60, 40)]
    tables = [table(str(i), mb) for i, mb in enumerate(sizes)]
    layouts = plan.layouts(tables, ranks)
    assert layouts == plan.layouts(tables, ranks)
    assert layouts[0] is None
    assert layouts[1].kind == "rows"
    assert "whole" in kinds(tables, ranks)
    loads = [sum(lay.size(r) for lay in layouts if lay is not None) for r in range(ranks)]
    assert max(loads) < 1.15 * sum(loads) / ranks


def test_what_would_unbalance_the_ranks_is_divided_by_columns() -> None:
    tables = [table("rows", 30, "rows"), *(table(str(i), 12) for i in range(3))]
    layouts = plan.layouts(tables, 2)  # 33 MB each: 15 and 12 and 12 are too much
    assert [layout.kind for layout in layouts] == ["rows", "whole", "whole", "columns"]
    assert [layout.owner for layout in layouts[1:3]] == [0, 1]


def test_the_plan_as_text() -> None:
    tables = [table("large", 100), table("small", 1, width=16)]
    text = plan.as_text(tables, plan.layouts(tables, 2), 2).splitlines()
    assert text[0].split() == ["table", "size", "divided", "rank", "0", "rank", "1"]
    assert text[1].split("  ")[0] == "large"
    assert "by rows" in text[1]
    assert text[1].count("52.4 MB, 50%") == 2
    assert text[2].count("1.0 MB, its own") == 2
    assert text[3].split() == ["all", "53.5", "MB", "53.5", "MB"]
