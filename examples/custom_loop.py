"""Train in a loop with tf.GradientTape, without fit.

    hvdrun -np 2 examples/custom_loop.py

The tape is wrapped instead of the optimizer, and the broadcast is a call instead of a callback.
"""

import hvd_keras as hvd
import keras
import numpy as np
import tensorflow as tf

hvd.init()
x = np.random.default_rng(0).normal(size=(2048, 16)).astype("float32")
y = np.argmax(x[:, :4] ** 2, axis=1)
data = hvd.data.shard((x, y), batch_size=32)  # reshuffled in each epoch, alike on all ranks

model = keras.Sequential(
    [keras.Input((16,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(4)]
)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam(0.002 * hvd.size())

# All ranks start alike; the optimizer's variables, too, if a file was loaded.
optimizer.build(model.trainable_variables)
hvd.broadcast_variables(model.variables, root_rank=0)
hvd.broadcast_variables(optimizer.variables, root_rank=0)


@tf.function
def train_step(features, labels):
    with tf.GradientTape() as tape:
        loss = loss_fn(labels, model(features, training=True))
    tape = hvd.DistributedGradientTape(tape)  # its gradients are the averages over the ranks
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


losses = []
for epoch in range(5):
    steps = [train_step(features, labels) for features, labels in data]
    losses.append(float(hvd.allreduce(tf.reduce_mean(steps))))  # the mean of all ranks
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: loss {losses[-1]:.3f}")
