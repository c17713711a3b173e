"""A dataset whose length nobody knows (filtered lines of text), shared out by hvd.data.shard.

expect: equal
fast: yes
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_keras as hvd

BATCH = 32

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(6)
numbers = random.normal(size=(300, 3))
numbers[::7] = np.nan
with open(f"table-{hvd.rank()}.csv", "w") as file:
    file.write("a,b,c\n")
    file.writelines(",".join("?" if np.isnan(n) else f"{n:.4f}" for n in r) + "\n" for r in numbers)


def parse(line):
    values = tf.stack(tf.io.decode_csv(line, [0.0] * 3))
    return values[:2], values[2:]


lines = tf.data.TextLineDataset(f"table-{hvd.rank()}.csv").skip(1)
rows = lines.filter(lambda line: not tf.strings.regex_full_match(line, r".*\?.*")).map(parse)
assert rows.cardinality() == tf.data.UNKNOWN_CARDINALITY

model = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
model.fit(
    hvd.data.shard(rows, batch_size=BATCH // hvd.size(), shuffle=False, uneven="pad"),
    epochs=2,
    shuffle=False,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    verbose=0,
)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
