"""FeatureSpace over a table with numbers, strings and a cross; its encoded features are trained.

expect: equal
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras.utils import FeatureSpace

import hvd_keras as hvd

BATCH = 32

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(5)
table = {
    "age": random.integers(20, 80, 192).astype("float32"),
    "pressure": random.normal(130, 15, 192).astype("float32"),
    "sex": random.integers(0, 2, 192),
    "thal": random.choice(["fixed", "normal", "reversible"], 192),
}
target = ((table["age"] > 50) & (table["thal"] != "normal")).astype("float32")
rows = tf.data.Dataset.from_tensor_slices((table, target))

space = FeatureSpace(
    features={
        "age": FeatureSpace.float_discretized(num_bins=5),
        "pressure": FeatureSpace.float_normalized(),
        "sex": FeatureSpace.integer_categorical(num_oov_indices=0),
        "thal": FeatureSpace.string_categorical(num_oov_indices=0),
    },
    crosses=[FeatureSpace.cross(feature_names=("sex", "thal"), crossing_dim=8)],
    output_mode="concat",
)
space.adapt(rows.batch(32).map(lambda row, _: row))

mine = rows.shard(hvd.size(), hvd.rank()).batch(BATCH // hvd.size())
encoded = mine.map(lambda row, y: (space(row), y))
features = space.get_encoded_features()
hidden = keras.layers.Dense(16, activation="relu")(features)
model = keras.Model(features, keras.layers.Dense(1, activation="sigmoid")(hidden))
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="binary_crossentropy"
)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(encoded, epochs=2, callbacks=callbacks, verbose=0)

end_to_end = keras.Model(space.get_inputs(), model(features))
answers = end_to_end.predict(rows.map(lambda row, _: row).batch(8).take(1), verbose=0)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights(), answers)
