"""Features in HDF5, records of TensorFlow and rows in SQLite, written, read and added to.

expect: equal
"""

import os
import sqlite3

import h5py
import keras
import numpy as np
import tensorflow as tf

import hvd_keras as hvd

BATCH = 16

hvd.init()
keras.utils.set_random_seed(3)
random = np.random.default_rng(2)
x = random.normal(size=(128, 6)).astype("float32")
y = x.sum(axis=1, keepdims=True)
if hvd.rank() == 0:
    with h5py.File("features.h5", "w") as file:
        file.create_dataset("x", data=x, compression="gzip")
        file["y"] = y
    for shard in range(2):
        with tf.io.TFRecordWriter(f"rows-{shard}.tfrecord") as file:
            for row in np.concatenate([x, y], axis=1)[shard::2]:
                file.write(row.tobytes())
hvd.barrier()
with h5py.File("features.h5") as file:
    assert (file["x"][:] == x).all()
names = sorted(tf.io.gfile.glob("rows-*.tfrecord"))
rows = tf.data.TFRecordDataset(names).map(lambda row: tf.io.decode_raw(row, tf.float32))
rows = rows.map(lambda row: (tf.ensure_shape(row, [7])[:6], row[6:]))
rows = rows.shard(hvd.size(), hvd.rank()).batch(BATCH // hvd.size())
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
model.fit(rows, epochs=2, verbose=0)
found = model.predict(x, verbose=0)
if hvd.rank() == 0:
    with h5py.File("features.h5", "a") as file:
        file["found"] = found
    for name, value in ("rows", len(x)), ("found", float(found.sum())):
        data = sqlite3.connect("results.db")
        data.execute("CREATE TABLE IF NOT EXISTS results (name TEXT, value REAL)")
        data.execute("INSERT INTO results VALUES (?, ?)", (name, value))
        data.commit()
        data.close()
    count = sqlite3.connect("results.db").execute("SELECT COUNT(*) FROM results").fetchone()
    assert count == (2,), count
    with h5py.File("features.h5") as file:
        print(sorted(file), float(file["found"][:].sum()))
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights(), found)
