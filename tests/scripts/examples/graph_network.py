"""A graph network: batches of ragged graphs as tuples, gathers and segment sums in a layer.

expect: equal
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_keras as hvd

GRAPHS, NODES = 8, 6  # graphs in a batch of the job, nodes of each


class MessagePassing(layers.Layer):
    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(4, 4), initializer="glorot_uniform", name="kernel")
        self.update = layers.GRUCell(4)
        self.update.build((None, 4))

    def call(self, inputs):
        atoms, pairs = inputs
        for _ in range(2):
            messages = tf.gather(tf.matmul(atoms, self.kernel), pairs[:, 1])
            summed = tf.math.unsorted_segment_sum(messages, pairs[:, 0], tf.shape(atoms)[0])
            atoms, _ = self.update(summed, [atoms])
        return atoms


class Graphs(keras.utils.PyDataset):
    def __init__(self, atoms, edges, y, size):
        super().__init__(workers=1)
        self.atoms, self.edges, self.y, self.size = atoms, edges, y, size

    def __len__(self):
        return len(self.y) // self.size

    def __getitem__(self, i):
        chosen = range(i * self.size, (i + 1) * self.size)
        pairs = np.concatenate([self.edges[g] + n * NODES for n, g in enumerate(chosen)])
        atoms = np.concatenate([self.atoms[g] for g in chosen])
        owner = np.repeat(np.arange(self.size), NODES).astype("int32")
        return (atoms, pairs.astype("int32"), owner), self.y[list(chosen)]


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(11)
number = 64
atoms = random.normal(size=(number, NODES, 4)).astype("float32")
edges = [random.integers(0, NODES, size=(random.integers(5, 12), 2)) for _ in range(number)]
y = atoms.mean(axis=(1, 2)).astype("float32")[:, None]

atom, pair = keras.Input((4,)), keras.Input((2,), dtype="int32")
owner = keras.Input((), dtype="int32")
h = MessagePassing()([atom, pair])
h = layers.Lambda(lambda t: tf.math.segment_mean(t[0], t[1]), output_shape=(4,))([h, owner])
model = keras.Model([atom, pair, owner], layers.Dense(1)(h))
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
mine = [g for g in range(number) if g % hvd.size() == hvd.rank()]
data = Graphs(atoms[mine], [edges[g] for g in mine], y[mine], GRAPHS // hvd.size())
model.fit(
    data,
    epochs=2,
    shuffle=False,
    verbose=0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
