"""Fine-tune a network: first a new head on frozen layers, then all layers with a small rate.

    hvdrun -np 2 examples/fine_tuning.py

Replace the base by one with weights, such as a KerasHub backbone (from_preset) or a model of
keras.applications (weights="imagenet", include_top=False). Rank 0 broadcasts its weights.
"""

import hvd_keras as hvd
import keras
import numpy as np

layers = keras.layers

hvd.init()
random = np.random.default_rng(0)
images = random.uniform(size=(512, 16, 16, 3)).astype("float32")
labels = random.integers(0, 2, size=512)
images[labels == 1, :, :8] += 0.5  # brighter on the left
data = hvd.data.shard((images, labels), batch_size=16)

base = keras.Sequential(
    [
        keras.Input((16, 16, 3)),
        layers.Conv2D(16, 3, strides=2, use_bias=False),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.Conv2D(16, 3, activation="relu"),
    ]
)
base.trainable = False
inputs = keras.Input((16, 16, 3))
features = layers.Flatten()(base(inputs))
model = keras.Model(inputs, layers.Dense(2)(features))


def train(rate, epochs):
    # compile again after a change of trainable, with a new distributed optimizer.
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.Adam(rate * hvd.size())),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(
        data,
        epochs=epochs,
        shuffle=False,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ],
        verbose=2 if hvd.rank() == 0 else 0,
    )
    return history.history["loss"]


losses = train(1e-3, epochs=3)
base.trainable = True
for layer in base.layers:  # BatchNormalization keeps its statistics, of many more rows than these
    layer.trainable = not isinstance(layer, layers.BatchNormalization)
losses += train(1e-4, epochs=3)
