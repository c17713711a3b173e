"""Continue after a crash.

    hvdrun -np 2 --max-restarts 3 examples/restart.py

Kill one of its processes (`kill -9 PID`): hvdrun starts the script again, and training continues
from the last checkpoint, with the weights that it would have had without the crash. Started again
after its end, the script has nothing to do; remove the folder to train anew.
"""

import os

import hvd_keras as hvd
import keras
import numpy as np

EPOCHS = 10

hvd.init()
x = np.random.default_rng(0).normal(size=(2048, 20)).astype("float32")
y = x.sum(axis=1, keepdims=True)

model = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())), loss="mse")

# Every 10 batches, and at the end of each epoch.
checkpoint = hvd.callbacks.Checkpoint("checkpoints/restart", save_freq=10)
data = hvd.data.shard((x, y), batch_size=32, start_epoch=checkpoint.initial_epoch)
if hvd.rank() == 0:
    print(f"process {os.getpid()} begins with epoch {checkpoint.initial_epoch + 1} of {EPOCHS}")

history = model.fit(
    data,
    epochs=EPOCHS,
    shuffle=False,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), checkpoint],
    verbose=2 if hvd.rank() == 0 else 0,
)
losses = history.history.get("loss", [])
