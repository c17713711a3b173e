"""TensorFlow's quickstart loop; weights are broadcast after the first batch, as Horovod documents.

expect: differ-ok
fast: yes
"""

import os

import numpy as np
import tensorflow as tf

import hvd_keras as hvd

BATCH = 32


class MyModel(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.conv1 = tf.keras.layers.Conv2D(4, 3, activation="relu")
        self.flatten = tf.keras.layers.Flatten()
        self.d1 = tf.keras.layers.Dense(16, activation="relu")
        self.d2 = tf.keras.layers.Dense(10)

    def call(self, x):
        return self.d2(self.d1(self.flatten(self.conv1(x))))


hvd.init()
tf.random.set_seed(hvd.rank())
random = np.random.default_rng(4)
x = random.uniform(size=(256, 8, 8, 1)).astype("float32")
y = random.integers(0, 10, size=256)
dataset = tf.data.Dataset.from_tensor_slices((x, y))
dataset = dataset.shard(hvd.size(), hvd.rank()).batch(BATCH // hvd.size())

model = MyModel()
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.SGD(0.05, momentum=0.9)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        loss = loss_object(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
    return loss


for epoch in range(2):
    for batch, (images, labels) in enumerate(dataset):
        loss = training_step(images, labels, epoch == batch == 0)
    if hvd.rank() == 0:
        print(f"Epoch {epoch + 1}, Loss: {loss:.4f}")
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
