"""How a table is divided between ranks."""

import dataclasses
import math
from typing import Any, Literal

Kind = Literal["rows", "columns", "whole"]


@dataclasses.dataclass(frozen=True)
class Part:
    """The rows and columns of a table that one rank holds.

    Attributes:
        rows: their numbers in the table.
        columns: their numbers in the table; they are neighbours.
    """

    rows: range
    columns: range

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the rank's variable."""
        return len(self.rows), len(self.columns)

    def cut(self, block: Any, first: int) -> tuple[slice, Any]:
        """Returns what this part has of a block of the table's rows.

        Args:
            block: an array of whole rows.
            first: the number of the block's first row in the table.

        Returns:
            The rows of this part that the block contains, as a slice, and their values.
        """
        place = self.between(first, first + len(block))
        mine = self.rows[place]
        values = block[mine.start - first : mine.stop - first : mine.step] if mine else block[:0]
        return place, values[:, self.columns.start : self.columns.stop]

    def between(self, first: int, last: int) -> slice:
        """Which of this part's rows are in [first, last) of the table."""
        return slice(self._at_or_after(first), self._at_or_after(last))

    def _at_or_after(self, row: int) -> int:
        """How many rows of this part come before a row of the table."""
        before = -(-(row - self.rows.start) // self.rows.step)
        return min(max(before, 0), len(self.rows))


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a table is divided between ranks.

    Attributes:
        kind: "rows": row i belongs to rank i modulo ``ranks``, because the ids of many vocabularies
            are sorted by frequency, so that the first rows are looked up most; "columns": each rank
            has some neighbouring columns of all rows; "whole": one rank has the whole table.
        input_dim, output_dim: the table's rows and columns.
        ranks: the number of ranks.
        owner: of a whole table.
    """

    kind: Kind
    input_dim: int
    output_dim: int
    ranks: int
    owner: int = 0

    def part(self, rank: int) -> Part:
        """What a rank holds; its number counts in the process set."""
        rows, columns = range(self.input_dim), range(self.output_dim)
        if self.kind == "rows":
            return Part(rows[rank :: self.ranks], columns)
        if self.kind == "columns":
            first, last = (self.output_dim * r // self.ranks for r in (rank, rank + 1))
            return Part(rows, columns[first:last])
        return Part(rows if rank == self.owner else range(0), columns)

    def size(self, rank: int) -> int:
        """The number of values that a rank holds."""
        return math.prod(self.part(rank).shape)

    def as_json(self) -> dict[str, Any]:
        """The arguments of an equal layout."""
        return dataclasses.asdict(self)
