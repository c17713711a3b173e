"""Moves tensors to the ranks that own them, and from there to all."""

import collections
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvd_keras import ops
from hvd_keras.gradients import owners
from hvd_keras.runtime.process_sets import ProcessSet


class Packed:
    """Tensors of one dtype, each owned by one rank, and the requests in which they travel.

    Args:
        name: identifies the requests on all ranks.
        shapes: of the tensors, in the order in which they become ready.
        owned_by: the owner of each, a rank of the process set.
        process_set: the ranks that take part.
        limits: the most elements of the first request, and of each other.

    Attributes:
        alone: the tensors that do not travel here, see ``owners.pack``.
    """

    def __init__(
        self,
        name: str,
        shapes: Sequence[Sequence[int]],
        owned_by: Sequence[int],
        process_set: ProcessSet,
        limits: tuple[int, int],
    ) -> None:
        self._name = name
        self._shapes = [tf.TensorShape(shape) for shape in shapes]
        self._owned_by = list(owned_by)
        self._process_set = process_set
        sizes = [shape.num_elements() for shape in self._shapes]
        self._requests, self.alone = owners.pack(sizes, owned_by, process_set.size(), limits)

    def reduce(
        self, tensors: Sequence[Any], after: list[Any], **how: Any
    ) -> tuple[dict[int, Any], list[Any]]:
        """Return the tensors that this rank owns, reduced over all ranks.

        Args:
            tensors: of this rank, all of them.
            after: what the first request waits for, so that all ranks submit in one order.
            how: arguments for ``ops.reducescatter``.

        Returns:
            The reduced tensors by number, and what a next request shall wait for.
        """
        flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
        dtype = flat[0].dtype
        rank, ranks = self._process_set.rank(), self._process_set.size()
        found: dict[int, list[Any]] = collections.defaultdict(list)
        for number, request in enumerate(self._requests):
            rows = (_row(flat, pieces, request.length, dtype) for pieces in request.rows)
            # [ranks, length], row r for owner r; reducescatter leaves each rank its own row.
            packed = tf.reshape(tf.concat(list(itertools.chain(*rows)), 0), [ranks, request.length])
            with tf.control_dependencies(after):
                mine = ops.reducescatter(
                    packed,
                    name=f"{self._name} gradients to owners {number}, {dtype.name}",
                    process_set=self._process_set,
                    **how,
                )
            after = [mine]
            self._take(tf.reshape(mine, [-1]), request.rows[rank], found)
        return self._joined(found), after

    def share(
        self, tensors: Mapping[int, Any], dtype: tf.DType, after: list[Any]
    ) -> tuple[dict[int, Any], list[Any]]:
        """Give all ranks what each owns.

        Args:
            tensors: those that this rank owns, by number.
            dtype: of all tensors.
            after: what the first request waits for.

        Returns:
            The tensors that other ranks own, by number, and what a next request shall wait for.
        """
        flat = {i: tf.reshape(tensor, [-1]) for i, tensor in tensors.items()}
        rank = self._process_set.rank()
        found: dict[int, list[Any]] = collections.defaultdict(list)
        for number, request in enumerate(self._requests):
            mine = tf.concat(_row(flat, request.rows[rank], request.length, dtype), 0)
            with tf.control_dependencies(after):
                gathered = ops.allgather(
                    mine,
                    name=f"{self._name} values of owners {number}, {dtype.name}",
                    process_set=self._process_set,
                )
            # [ranks · length]: the owners' rows, one after another.
            whole = tf.debugging.assert_equal(
                tf.size(gathered),
                request.length * self._process_set.size(),
                "shard_state=True: a rank has joined (hvd.join), so nobody updates the variables "
                "that it owns. Give all ranks the same number of batches, or leave shard_state out",
            )
            with tf.control_dependencies([] if whole is None else [whole]):
                gathered = tf.identity(gathered)
            after = [gathered]
            for other, pieces in enumerate(request.rows):
                if other != rank:
                    begin = other * request.length
                    self._take(gathered[begin : begin + request.length], pieces, found)
        return self._joined(found), after

    def _take(self, row: Any, pieces: list[owners.Piece], found: dict[int, list[Any]]) -> None:
        begin = 0
        for piece in pieces:
            end = begin + piece.last - piece.first
            found[piece.tensor].append(row[begin:end])
            begin = end

    def _joined(self, found: dict[int, list[Any]]) -> dict[int, Any]:
        return {
            i: tf.reshape(pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0), self._shapes[i])
            for i, pieces in found.items()
        }


def _row(flat: Any, pieces: list[owners.Piece], length: int, dtype: tf.DType) -> list[Any]:
    row = [flat[piece.tensor][piece.first : piece.last] for piece in pieces]
    padding = length - sum(piece.last - piece.first for piece in pieces)
    return [*row, tf.zeros([padding], dtype)] if padding else row
