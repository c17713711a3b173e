"""A loop without tf.function: broadcast before the first batch, a metric, a validation loop.

expect: equal
"""

import os

import keras
import numpy as np
import tensorflow as tf

import hvd_keras as hvd

BATCH = 32

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(5)
x = random.normal(size=(256, 6)).astype("float32")
y = np.argmax(x[:, :3], axis=1)
train_x, train_y = x[hvd.rank() : 192 : hvd.size()], y[hvd.rank() : 192 : hvd.size()]
train = tf.data.Dataset.from_tensor_slices((train_x, train_y)).batch(BATCH // hvd.size())

inputs = keras.Input((6,))
outputs = keras.layers.Dense(3)(keras.layers.Dense(16, activation="tanh")(inputs))
model = keras.Model(inputs, outputs)
optimizer = keras.optimizers.Adam(0.01)
optimizer.build(model.trainable_variables)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
accuracy = keras.metrics.SparseCategoricalAccuracy()

hvd.broadcast_variables(model.variables, root_rank=0)
hvd.broadcast_variables(optimizer.variables, root_rank=0)
for epoch in range(2):
    for x_batch, y_batch in train:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_fn(y_batch, model(x_batch, training=True))
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply(gradients, model.trainable_weights)
    accuracy.reset_state()
    accuracy.update_state(y[192:], model(x[192:]))
    mean_loss = hvd.allreduce(loss, op=hvd.Average)
    if hvd.rank() == 0:
        print(
            f"Epoch {epoch}: loss {float(mean_loss):.4f}, accuracy {float(accuracy.result()):.3f}"
        )
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights(), mean_loss)
