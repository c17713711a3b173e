"""Functional, two inputs by name, two outputs with losses, weights and metrics of their own.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH = 16

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(2)
title = random.integers(0, 50, size=(160, 6))
tags = random.integers(0, 2, size=(160, 5)).astype("float32")
priority = random.uniform(size=(160, 1)).astype("float32")
department = random.integers(0, 3, size=160)

title_input = keras.Input((6,), name="title", dtype="int32")
tags_input = keras.Input((5,), name="tags")
features = layers.Embedding(50, 8)(title_input)
features = layers.GlobalAveragePooling1D()(features)
features = layers.concatenate([features, tags_input])
model = keras.Model(
    inputs={"title": title_input, "tags": tags_input},
    outputs={
        "priority": layers.Dense(1, activation="sigmoid", name="priority")(features),
        "department": layers.Dense(3, activation="softmax", name="department")(features),
    },
)
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.RMSprop(0.01)),
    loss={
        "priority": keras.losses.BinaryCrossentropy(),
        "department": keras.losses.SparseCategoricalCrossentropy(),
    },
    loss_weights={"priority": 1.0, "department": 0.2},
    metrics={"department": ["accuracy"]},
)
mine = slice(hvd.rank(), None, hvd.size())
history = model.fit(
    {"title": title[mine], "tags": tags[mine]},
    {"priority": priority[mine], "department": department[mine]},
    batch_size=BATCH // hvd.size(),
    epochs=2,
    shuffle=False,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ],
    verbose=0,
)
accuracy = history.history["department_accuracy"]
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights(), accuracy)
