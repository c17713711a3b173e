"""``Embedding``: a table of which each rank holds a part."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_keras.gradients import shards, specs
from hvd_keras.layers import initializers, plan
from hvd_keras.layers.lookup import Table, lookup
from hvd_keras.runtime import agree, process_sets, rank_info
from hvd_keras.runtime.keras import is_legacy, keras
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set

_COMBINERS = (None, "sum", "mean", "sqrtn")


@keras.saving.register_keras_serializable(package="hvd_keras")
class Embedding(keras.layers.Layer):  # type: ignore[misc]
    """``keras.layers.Embedding``, with the table divided between the ranks.

    Each rank holds 1/N of the table and of the optimizer's state for it. A lookup sends ids to the
    ranks that hold their rows and gets each row once; gradients go back the same way.
    ``hvd.DistributedOptimizer`` and ``hvd.DistributedGradientTape`` recognise the table: N ranks
    train as one process with the whole table.

    All ranks must call the layer equally often, also in evaluation and prediction. XLA cannot
    compile it: ``compile(jit_compile=True)`` trains without, with a warning of Keras.

    Initial values are those that one process would draw, drawn block by block, for the initializers
    of Keras that draw each value by itself, with float32 and an integer seed; others are called for
    the whole table, on each rank.

    See docs/embeddings.md for what cannot be combined with it.

    Args:
        input_dim, output_dim, embeddings_initializer, embeddings_regularizer,
        embeddings_constraint, mask_zero, weights: as in ``keras.layers.Embedding``. A divided table
            can have the regularizers L1, L2 and L1L2 and constraints that do not cross its parts.
        shard: "rows" (row i is on rank i modulo N), "columns", "auto" (on all ranks up to 1 MiB,
            by rows above), or None: every rank has the whole table.
        combiner: "sum", "mean" or "sqrtn" (the sum over the square root of the number) combine the
            rows of the last axis of ids. With ``mask_zero`` the id 0 does not count. The rows of no
            ids are 0.
        process_set: the ranks that hold the table, those of the optimizer.
        kwargs: of ``keras.layers.Layer``.

    Raises:
        ValueError: an argument is impossible, or cannot be combined with ``shard``; ``init()`` was
            not called; tf_keras is in use. In the first lookup, on every rank: the ranks' tables
            differ.
        NotImplementedError: XLA shall compile a function that calls the layer.
        TypeError: (when called) the ids are a sparse tensor or not numbers.
        tf.errors.InvalidArgumentError: (when called, on every rank if the table is divided) an id
            is out of range.

    Input shape:
        Ids of any shape; a ragged tensor with any ragged dimensions, with ``combiner`` one.

    Output shape:
        ``(*shape of the ids, output_dim)``; with ``combiner``, without the last axis of the ids.

    Example:
        model = keras.Sequential([
            keras.Input((20,), dtype="int64"),
            hvd.layers.Embedding(50_000_000, 64, combiner="mean"),
            keras.layers.Dense(1),
        ])
    """

    built: bool

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        weights: Any = None,
        *,
        shard: plan.Choice = "auto",
        combiner: str | None = None,
        process_set: ProcessSet = global_process_set,
        **kwargs: Any,
    ) -> None:
        rank_info.rank()  # raises if init() was not called
        if is_legacy:
            raise ValueError(
                "hvd.layers.Embedding needs Keras 3, but tf_keras is in use. Unset "
                "TF_USE_LEGACY_KERAS, or use keras.layers.Embedding."
            )
        name = kwargs.get("name") or "Embedding"
        for argument, value in (("input_dim", input_dim), ("output_dim", output_dim)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: {argument} is {value!r}, expected a positive integer.")
        if shard not in plan.CHOICES:
            expected = "'auto', 'rows', 'columns' or None"
            raise ValueError(f"{name}: shard is {shard!r}, expected {expected}.")
        if combiner not in _COMBINERS:
            expected = "None, 'sum', 'mean' or 'sqrtn'"
            raise ValueError(f"{name}: combiner is {combiner!r}, expected {expected}.")
        for option in ("lora_rank", "lora_alpha", "quantization_config"):
            if kwargs.pop(option, None) is not None:
                raise ValueError(f"{name}: {option} is not supported. Use keras.layers.Embedding.")
        kwargs.pop("input_length", None)  # as keras.layers.Embedding, which ignores it
        process_sets.check(process_set, "layers.Embedding")
        super().__init__(**kwargs)
        self.input_dim = input_dim
        self.output_dim = output_dim
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.embeddings_regularizer = keras.regularizers.get(embeddings_regularizer)
        self.embeddings_constraint = keras.constraints.get(embeddings_constraint)
        self.mask_zero = mask_zero
        self.shard = shard
        self.combiner = combiner
        self.process_set = process_set
        self.supports_masking = mask_zero
        self.supports_jit = False  # the sizes of alltoall depend on the ids
        self.autocast = False  # float16 cannot hold large ids
        self._compared = False
        size = self.table_size()
        self.set_layout(plan.layouts([size], process_set.size())[0])
        if weights is not None:
            self.build()
            whole = weights[0] if isinstance(weights, (list, tuple)) else weights
            self.set_table(whole)

    def table_size(self) -> plan.TableSize:
        item_bytes = int(tf.as_dtype(self.variable_dtype).size)
        return plan.TableSize(self.name, self.input_dim, self.output_dim, item_bytes, self.shard)

    def set_layout(self, layout: shards.Layout | None) -> None:
        """Divide the table, before it is built; None: all ranks have all of it.

        Raises:
            ValueError: a regularizer, a constraint or the number of columns does not permit it.
        """
        self.layout = layout
        if layout is None:
            return
        if layout.kind == "columns" and self.output_dim < layout.ranks:
            raise ValueError(
                f"{self.name}: output_dim {self.output_dim} cannot be divided between "
                f"{layout.ranks} ranks. Use shard='rows'."
            )
        kinds = keras.regularizers
        allowed = type(None), kinds.L1, kinds.L2, kinds.L1L2
        if not isinstance(self.embeddings_regularizer, allowed):
            raise ValueError(
                f"{self.name}: embeddings_regularizer is {self.embeddings_regularizer!r}. A table "
                "that is divided between ranks can have L1, L2 and L1L2. Use shard=None."
            )
        constraint = self.embeddings_constraint
        by_row = getattr(constraint, "axis", None) in (1, -1) and layout.kind != "columns"
        if not (constraint is None or isinstance(constraint, keras.constraints.NonNeg) or by_row):
            raise ValueError(
                f"{self.name}: embeddings_constraint is {constraint!r}. A table that is divided by "
                f"{layout.kind} can have NonNeg"
                + (", and norms of rows (axis=1)" if layout.kind != "columns" else "")
                + ". Use shard=None."
            )

    def build(self, input_shape: Any = None) -> None:
        if self.built:
            return
        shape = self.input_dim, self.output_dim
        initializer, regularizer = self.embeddings_initializer, self.embeddings_regularizer
        if self.layout is not None:
            part = self.layout.part(self.process_set.rank())
            initializer = initializers.of_part(initializer, shape, part)
            shape = part.shape
            if regularizer is not None and self.layout.ranks > 1:
                regularizer = _times(self.layout.ranks, regularizer)
        self._embeddings = self.add_weight(
            shape=shape,
            initializer=initializer,
            name="embeddings",
            regularizer=regularizer,
            constraint=self.embeddings_constraint,
            autocast=False,
        )
        if self.layout is not None:
            shard = shards.Shard(self.layout, self.process_set, None, regularizer is not None)
            shards.mark(self._embeddings, shard)
        self.built = True

    @property
    def embeddings(self) -> Any:
        """This rank's part of the table, a ``keras.Variable``."""
        if not self.built:
            raise AttributeError(f"{self.name} has no table yet. Build the layer or its model.")
        return self._embeddings

    def call(self, inputs: Any) -> Any:
        self.compare()
        (rows,) = lookup(
            self.request_name(),
            [self.as_table()],
            [self.flat_ids(inputs)],
            self.process_set if self.layout is not None else None,
        )
        return self.shaped(inputs, rows)

    def request_name(self) -> str:
        return f"embedding {specs.common_path(self.embeddings.path)}"

    def as_table(self) -> Table:
        layout = self.layout or shards.Layout("whole", self.input_dim, self.output_dim, 1)
        part = shards.inner_variable(self.embeddings)
        return Table(self.name, part, layout, self.compute_dtype)

    def compare(self) -> None:
        """Compare the table with the other ranks' before its first lookup; ValueError on all."""
        if self._compared or self.layout is None or agree.is_building.get():
            return
        ranks = self.process_set
        text = (
            f"{self.input_dim} x {self.output_dim} {self.variable_dtype}, {self.layout.kind} "
            f"(owner {self.layout.owner}), combiner {self.combiner}, computing in "
            f"{self.compute_dtype}"
        )
        gathered = agree.gather_json(f"{self.request_name()} compared", text, ranks)
        if len(set(gathered)) > 1:
            views = agree.by_rank(gathered, ranks)
            raise ValueError(
                f"{self.name}: the ranks' tables differ: {views}. Every rank must use the same "
                "vocabulary: adapt it to the same data everywhere, or on one rank and call "
                "hvd.broadcast_preprocessing(layers)."
            )
        self._compared = True

    def flat_ids(self, inputs: Any) -> tf.Tensor:  # int64 [n]
        if isinstance(inputs, tf.SparseTensor):
            raise TypeError(
                f"{self.name}: got a sparse tensor, expected a dense or ragged tensor of ids. "
                "Use tf.RaggedTensor.from_sparse(ids)."
            )
        ids = inputs.flat_values if isinstance(inputs, tf.RaggedTensor) else inputs
        ids = tf.convert_to_tensor(ids)
        if not (ids.dtype.is_integer or ids.dtype.is_floating):
            raise TypeError(f"{self.name}: got ids of dtype {ids.dtype.name}, expected integers.")
        return tf.reshape(tf.cast(ids, tf.int64), [-1])

    def shaped(self, inputs: Any, rows: tf.Tensor) -> Any:
        """Return the output for ids, from the rows of ``flat_ids``."""
        if isinstance(inputs, tf.RaggedTensor):
            if self.combiner is None:
                return inputs.with_flat_values(_with_shape(rows, inputs.flat_values))
            if inputs.ragged_rank != 1 or inputs.flat_values.shape.rank != 1:
                raise ValueError(
                    f"{self.name}: combiner={self.combiner!r} got ragged ids of rank "
                    f"{inputs.shape.rank}, expected 2: [batch, ids]."
                )
            # Rows [n, dim] of all ids, and for each the row of the batch that it belongs to.
            count = inputs.nrows()
            place = inputs.value_rowids()
            weight = self._weights(inputs.flat_values)
            rows = tf.cast(rows, weight.dtype)
            total = tf.math.unsorted_segment_sum(rows * weight[:, tf.newaxis], place, count)
            return self._divided(total, tf.math.unsorted_segment_sum(weight, place, count))
        ids = tf.convert_to_tensor(inputs)
        rows = _with_shape(rows, ids)
        if self.combiner is None:
            return rows
        # [..., ids, dim] times [..., ids, 1], summed over the ids.
        weight = self._weights(ids)
        total = tf.reduce_sum(tf.cast(rows, weight.dtype) * weight[..., tf.newaxis], axis=-2)
        return self._divided(total, tf.reduce_sum(weight, axis=-1))

    def _weights(self, ids: tf.Tensor) -> tf.Tensor:
        """1 for each id that counts, otherwise 0; not in half precision, which counts to 256."""
        dtype = tf.float64 if self.compute_dtype == "float64" else tf.float32
        if self.mask_zero:
            return tf.cast(tf.not_equal(ids, 0), dtype)
        return tf.ones_like(ids, dtype)

    def _divided(self, total: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        if self.combiner != "sum":
            count = tf.maximum(count, 1)  # no ids: 0 / 1
            divisor = tf.sqrt(count) if self.combiner == "sqrtn" else count
            total /= divisor[..., tf.newaxis]
        return tf.cast(total, self.compute_dtype)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Which ids are not 0, with ``mask_zero`` and without ``combiner``."""
        if not self.mask_zero or self.combiner is not None:
            return None
        return keras.ops.not_equal(inputs, 0)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        kept = input_shape if self.combiner is None else input_shape[:-1]
        return (*kept, self.output_dim)

    def compute_output_spec(self, inputs: Any) -> Any:
        return keras.KerasTensor(
            self.compute_output_shape(inputs.shape),
            dtype=self.compute_dtype,
            ragged=getattr(inputs, "ragged", False) and self.combiner is None,
        )

    def set_table(self, table: Any) -> None:
        """Assign the table; each rank takes its part.

        Args:
            table: of shape ``[input_dim, output_dim]``: an array, or something else that has a
                shape and can be sliced by rows, such as a dataset of h5py, which is read in blocks.

        Raises:
            ValueError: the shape is another, or the layer is not built.
        """
        if not self.built:
            raise ValueError(f"{self.name}: set_table needs a built layer. Call it once before.")
        expected = self.input_dim, self.output_dim
        if tuple(table.shape) != expected:
            raise ValueError(
                f"{self.name}: got a table of shape {list(table.shape)}, expected {list(expected)}."
            )
        shards.assign(self.embeddings, table)

    def get_table(self) -> Any:
        """Return the whole table, as an array; all ranks must call it, and get it."""
        return shards.whole(self.embeddings)

    def save_own_variables(self, store: Any) -> None:
        """Called by Keras.

        Raises:
            ValueError: the table is divided between several ranks.
        """
        if self.built:
            store["0"] = shards.stored(self.embeddings)

    def load_own_variables(self, store: Any) -> None:
        """Called by Keras; reads no more than this rank's part at once, if Keras permits it."""
        if not self.built:
            return
        # What store["0"] would return is all in memory.
        dataset = getattr(store, "_h5_entry_group", {}).get("0")
        if dataset is None or "dtype" in dataset.attrs:
            dataset = store["0"]
        self.set_table(dataset)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, without ``weights`` and ``process_set``."""
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "embeddings_regularizer": keras.regularizers.serialize(self.embeddings_regularizer),
            "embeddings_constraint": keras.constraints.serialize(self.embeddings_constraint),
            "mask_zero": self.mask_zero,
            "shard": self.shard,
            "combiner": self.combiner,
        }


def _times(ranks: int, regularizer: Any) -> Callable[[Any], Any]:
    """Scale a regularizer of a part so that the mean of the ranks' losses has the whole's."""

    def times(x: Any) -> Any:
        # Where losses count by rows, this one is divided by so much.
        factor = shards.parts.get()
        value = regularizer(x)
        return value * (ranks if factor is None else tf.cast(factor, value.dtype))

    return times


def _with_shape(rows: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    columns = rows.shape[-1]
    shaped = tf.reshape(rows, tf.concat([tf.shape(ids), [columns]], axis=0))
    return tf.ensure_shape(shaped, [*ids.shape, columns])
