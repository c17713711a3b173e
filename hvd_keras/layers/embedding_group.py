"""``Embeddings``: lookups in many tables with one exchange."""

import dataclasses
from typing import Any

import tensorflow as tf

from hvd_keras.layers.embedding import Embedding
from hvd_keras.layers.lookup import lookup
from hvd_keras.layers.plan import TableSize, as_text, layouts
from hvd_keras.runtime.keras import keras


@keras.saving.register_keras_serializable(package="hvd_keras")
class Embeddings(keras.layers.Layer):  # type: ignore[misc]
    """Looks up many features in many tables, with one alltoall each way.

    Tables with ``shard="auto"`` are planned together: small ones are on all ranks, the largest are
    divided by rows, and the others are whole on one rank each, or by columns on all, so that each
    rank holds about the same number of bytes. The plan depends on nothing but the tables and the
    number of ranks; ``print(layer.plan())`` shows it.

    Args:
        tables: ``hvd.layers.Embedding`` layers by name, all of one process set and one dtype.
        features: for each feature the name of its table. Several features may share a table.
            Default: the tables are the features.
        kwargs: of ``keras.layers.Layer``.

    Raises:
        ValueError: there are no tables, a feature's table does not exist, or the tables' process
            sets or dtypes differ; and as ``hvd.layers.Embedding``.
        TypeError: a table is not a ``hvd.layers.Embedding``.

    Input shape:
        A dict with the ids of each feature.

    Output shape:
        A dict with the output of each feature, as ``hvd.layers.Embedding``.

    Example:
        lookup = hvd.layers.Embeddings(
            {
                "item": hvd.layers.Embedding(10_000_000, 64),
                "country": hvd.layers.Embedding(200, 16),
            },
            features={"bought": "item", "seen": "item", "country": "country"},
        )
        print(lookup.plan())
        rows = lookup({"bought": bought, "seen": seen, "country": country})
    """

    def __init__(
        self,
        tables: dict[str, Embedding],
        features: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not tables:
            raise ValueError(f"{self.name}: got no tables, expected at least one.")
        if not isinstance(tables, dict):
            raise TypeError(f"{self.name}: tables is {tables!r:.99}, expected a dict of names.")
        for name, table in tables.items():
            if not isinstance(table, Embedding):
                raise TypeError(
                    f"{self.name}: table {name!r} is {table!r}, expected a hvd.layers.Embedding."
                )
        features = dict(features) if features is not None else {name: name for name in tables}
        if missing := {f: t for f, t in features.items() if t not in tables}:
            raise ValueError(
                f"{self.name}: features {missing} name tables that do not exist. The tables are "
                f"{', '.join(tables)}."
            )
        self.process_set = next(iter(tables.values())).process_set
        for what, values in (
            ("process sets", {str(t.process_set) for t in tables.values()}),
            (
                "dtypes",
                {f"{t.variable_dtype}, computing in {t.compute_dtype}" for t in tables.values()},
            ),
        ):
            if len(values) > 1:
                raise ValueError(
                    f"{self.name}: the tables have different {what}: {'; '.join(sorted(values))}. "
                    "Use one Embeddings layer for each."
                )
        self.tables = dict(tables)
        self.features = features
        self.autocast = False
        self.supports_jit = False
        self.supports_masking = any(t.supports_masking for t in tables.values())
        # Each table had a plan for itself alone. One that has its values stays as it is.
        chosen = layouts(self._sizes(), self.process_set.size())
        for table, layout in zip(tables.values(), chosen, strict=True):
            if not table.built:
                table.set_layout(layout)

    def plan(self) -> str:
        """Which rank holds what, as a text of one line per table: MB, and share of the lookups."""
        chosen = [table.layout for table in self.tables.values()]
        return as_text(self._sizes(), chosen, self.process_set.size())

    def _sizes(self) -> list[TableSize]:
        return [
            dataclasses.replace(table.table_size(), name=name)
            for name, table in self.tables.items()
        ]

    def build(self, input_shape: Any = None) -> None:
        for table in self.tables.values():
            table.build()
        self.built = True

    def call(self, inputs: dict[str, Any]) -> dict[str, Any]:
        self._check_features(inputs)
        names = [name for name in self.tables if name in self.features.values()]
        divided = [name for name in names if self.tables[name].layout is not None]
        outputs: dict[str, Any] = {}
        for group, process_set in (
            (divided, self.process_set),
            ([name for name in names if name not in divided], None),
        ):
            if not group:
                continue
            # The ids of all features of a table travel as one list, and are taken apart again.
            users = [[f for f, t in self.features.items() if t == name] for name in group]
            tables = [self.tables[name] for name in group]
            for table in tables:
                table.compare()
            ids = [
                [table.flat_ids(inputs[f]) for f in features]
                for table, features in zip(tables, users, strict=True)
            ]
            found = lookup(
                f"embeddings {tables[0].request_name()}",
                [
                    dataclasses.replace(table.as_table(), name=name)
                    for name, table in zip(group, tables, strict=True)
                ],
                [tf.concat(of_table, axis=0) for of_table in ids],
                process_set,
            )
            for table, features, of_table, rows in zip(tables, users, ids, found, strict=True):
                sizes = tf.stack([tf.size(one) for one in of_table])
                parts = tf.split(rows, sizes, num=len(features))
                for feature, part in zip(features, parts, strict=True):
                    outputs[feature] = table.shaped(inputs[feature], part)
        return {feature: outputs[feature] for feature in self.features}

    def _check_features(self, inputs: Any) -> None:
        if not isinstance(inputs, dict) or set(inputs) != set(self.features):
            got = sorted(inputs) if isinstance(inputs, dict) else type(inputs).__name__
            raise ValueError(
                f"{self.name}: got {got}, expected a dict with the features "
                f"{sorted(self.features)}."
            )

    def _each(self, method: str, inputs: Any) -> dict[str, Any]:
        self._check_features(inputs)
        return {
            feature: getattr(self.tables[table], method)(inputs[feature])
            for feature, table in self.features.items()
        }

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        return self._each("compute_mask", inputs) if self.supports_masking else None

    def compute_output_shape(self, input_shape: Any) -> Any:
        return self._each("compute_output_shape", input_shape)

    def compute_output_spec(self, inputs: Any) -> Any:
        return self._each("compute_output_spec", inputs)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments; the tables as Keras's serialized layers."""
        tables = {
            name: keras.saving.serialize_keras_object(table) for name, table in self.tables.items()
        }
        return {**super().get_config(), "tables": tables, "features": dict(self.features)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Embeddings":
        tables = {
            name: keras.saving.deserialize_keras_object(table)
            for name, table in config["tables"].items()
        }
        return cls(**{**config, "tables": tables})
