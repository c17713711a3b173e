"""Where ``fit`` is in its data, as bytes, if TensorFlow can save that."""

import re
import struct
from typing import Any

import tensorflow as tf

from hvd_keras.data.sources import Passes
from hvd_keras.data.tensorflow import datasets
from hvd_keras.runtime import agree

_HEADER = struct.Struct("<4q")  # length, digest of how the data are made, passes: next and begun
_STATE_IS_IGNORED = 1  # external_state_policy: that of random operations, and of our functions
_READS = re.compile(r"_?\w+Dataset(V\d)?|PyFunc|EagerPyFunc")
# Datasets whose iterators TensorFlow saves, without all that they have read.
_SAVED = re.compile(
    r"_?(AssertCardinality|Batch|Concatenate|DirectedInterleave|Filter|FixedLengthRecord|FlatMap|"
    r"Interleave|Map|Options|PaddedBatch|ParallelBatch|ParallelInterleave|ParallelMap|Prefetch|"
    r"Random|Range|Repeat|Scan|Shard|Shuffle|Skip|Take|TakeWhile|Tensor|TensorSlice|TextLine|"
    r"TFRecord|Unbatch|Unique|Window|Zip)Dataset(V\d)?"
)


class Position:
    """The iterator over a sharded source that ``fit`` reads.

    Args:
        dataset: what ``fit`` reads.
        passes: over the source.
        source: what ``hvd.data.shard`` was given.
    """

    def __init__(self, dataset: Any, passes: Passes, source: Any) -> None:
        self._dataset, self._passes, self._source = dataset, passes, source
        self._iterator: Any = None
        self._restored = b""

    def __iter__(self) -> Any:
        """Return the iterator for ``fit``."""
        self._iterator = iter(self._dataset)
        if self._restored:
            state = tf.io.parse_tensor(self._restored, tf.variant)
            resource = self._iterator._iterator_resource
            tf.raw_ops.DeserializeIterator(resource_handle=resource, serialized=state)
            self._restored = b""
        return self._iterator

    def problem(self) -> str:
        """Return what of the source TensorFlow cannot save; "" if it can."""
        if not isinstance(self._source, tf.data.Dataset):
            return ""  # read by our functions, which keep nothing
        names = set()
        for node in datasets.nodes(self._source):
            names.add(type(node).__name__)
            for function in node._functions():
                graph = function.function.graph.as_graph_def()
                parts = [graph.node, *(part.node_def for part in graph.library.function)]
                names |= {op.op for ops in parts for op in ops}
        reads = filter(_READS.fullmatch, names)
        return ", ".join(sorted(name.strip("_") for name in reads if not _SAVED.fullmatch(name)))

    def save(self) -> bytes:
        """Return where the iterator is."""
        while True:
            begun = self._passes.begun
            state = tf.raw_ops.SerializeIterator(
                resource_handle=self._iterator._iterator_resource,
                external_state_policy=_STATE_IS_IGNORED,
            )
            if begun == self._passes.begun:  # otherwise a thread has begun a pass meanwhile
                break
        data: bytes = tf.io.serialize_tensor(state).numpy()
        return _HEADER.pack(len(data), self._digest(), self._passes.next, begun) + data

    def fits(self, saved: bytes) -> bool:
        """Whether it was saved of data that are made in the same way."""
        return bool(_HEADER.unpack_from(saved)[1] == self._digest())

    def restore(self, saved: bytes) -> None:
        """Let the iterator that is opened next go on there; more bytes may follow."""
        length, _, number, begun = _HEADER.unpack_from(saved)
        self._passes.restore([number, begun, 0, 0])
        self._restored = saved[_HEADER.size : _HEADER.size + length]

    def _digest(self) -> int:
        made_of = [*datasets.nodes(self._dataset)]
        if isinstance(self._source, tf.data.Dataset):
            made_of += datasets.nodes(self._source)
        numbers = [
            f"{type(node).__name__} {name} {value.numpy()}"
            for node in made_of
            for name, value in vars(node).items()
            # Not those that depend on the host's processors.
            if tf.is_tensor(value) and value.ndim == 0 and name != "_num_parallel_calls"
            if value.dtype not in (tf.variant, tf.resource)
        ]
        rows = self._passes.source
        described = f"{self._passes.split} {rows.length} {rows.batch_size} {rows.description}"
        return agree.digest([*numbers, described])


def of(dataset: Any, repeats: bool) -> Position | None:
    """Return the position in data of one sharded source; None if its elements are not batches.

    ``repeats``: whether the data go on from one epoch of ``fit`` to the next.
    """
    node = datasets.below(dataset, datasets.PASSING_ON | {"Repeat"})
    if not hasattr(node, "_hvd_pass"):
        return None
    is_infinite = dataset.cardinality() == tf.data.INFINITE_CARDINALITY
    return Position(dataset, node._hvd_pass, node._hvd_source) if is_infinite == repeats else None
