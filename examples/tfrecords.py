"""Train from TFRecord files.

    hvdrun -np 2 examples/tfrecords.py

Each rank reads its own records only, and all make the same number of steps.
"""

from pathlib import Path

import hvd_keras as hvd
import keras
import numpy as np
import tensorflow as tf

FOLDER = Path("checkpoints/records")


def write_files():
    random = np.random.default_rng(0)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for number in range(4):
        with tf.io.TFRecordWriter(str(FOLDER / f"part-{number}.tfrecord")) as file:
            for x in random.normal(size=(250, 20)).astype("float32"):
                values = {"x": x, "y": x.sum(keepdims=True)}
                feature = {
                    name: tf.train.Feature(float_list=tf.train.FloatList(value=value))
                    for name, value in values.items()
                }
                example = tf.train.Example(features=tf.train.Features(feature=feature))
                file.write(example.SerializeToString())


def parse(records):
    shapes = {
        "x": tf.io.FixedLenFeature([20], tf.float32),
        "y": tf.io.FixedLenFeature([1], tf.float32),
    }
    example = tf.io.parse_example(records, shapes)
    return example["x"], example["y"]


hvd.init()
if hvd.rank() == 0:
    write_files()
hvd.barrier()  # the others wait until the files are complete

# Shuffles blocks of records, and the records of windows of 500.
files = hvd.data.files(str(FOLDER / "*.tfrecord"), map=parse)
data = hvd.data.shard(files, batch_size=32, shuffle=500)

model = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())), loss="mse")
history = model.fit(
    data,
    epochs=5,
    shuffle=False,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    verbose=2 if hvd.rank() == 0 else 0,
)
losses = history.history["loss"]
