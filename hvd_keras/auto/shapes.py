"""Infers shapes again, with the sizes that ``sizes`` knows: a step's gradients often lack them."""

from typing import Any

import tensorflow as tf

from hvd_keras.auto.places import Dim, Node, Value


class Shapes:
    """A graph that never runs, whose ops are those of the step."""

    def __init__(self) -> None:
        self._graph = tf.Graph()
        self._have: dict[int, Any] = {}

    def add(self, value: Value) -> None:
        """Take the shape of a value as it is."""
        with self._graph.as_default():
            self._have[id(value)] = tf.compat.v1.placeholder(value.dtype, value.shape)

    def infer(self, node: Node, inputs: list[Value]) -> None:
        """Set the shapes of a node's outputs."""
        op = node.op
        if node.calls:
            tensors = [None] * len(node.outputs)
        elif node.outputs and all(v.sym is not None for v in node.outputs):
            tensors = [self._sizes(v) for v in node.outputs]
        else:
            have = [self._have[id(x)] for x in inputs]
            dtypes = [t.dtype for t in op.outputs]
            new = self._graph._create_op_internal(
                op.type, have, dtypes, attrs=node.attributes, op_def=op.op_def
            )
            tensors = list(new.outputs)
        for value, tensor in zip(node.outputs, tensors, strict=True):
            if tensor is None:
                self.add(value)
                continue
            tensor.set_shape(value.shape)
            value.shape = tensor.shape
            self._have[id(value)] = tensor

    def _sizes(self, value: Value) -> Any:
        with self._graph.as_default():
            assert value.sym is not None
            parts = [
                tf.compat.v1.placeholder(value.dtype, [])
                if isinstance(n, Dim)
                else tf.constant(n, value.dtype)
                for n in value.sym.ravel()
            ]
            if value.sym.ndim == 0:
                return parts[0]
            flat = tf.stack(parts) if parts else tf.zeros([0], value.dtype)
            return flat if value.sym.ndim == 1 else tf.reshape(flat, value.sym.shape)
