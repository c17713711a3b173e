"""Rank 0 alone loads the checkpoint and goes on; the other ranks make the model anew.

expect: equal
"""

import os

import keras
import numpy as np
from keras import layers

import hvd_keras as hvd

BATCH, FILE = 32, "checkpoint-{epoch}.keras"


def make():
    model = keras.Sequential(
        [layers.Conv2D(4, 3, activation="relu"), layers.GlobalAveragePooling2D(), layers.Dense(3)]
    )
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model


def train(model, first, last):
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(FILE))
    model.fit(
        x[mine],
        y[mine],
        batch_size=BATCH // hvd.size(),
        initial_epoch=first,
        epochs=last,
        shuffle=False,
        callbacks=callbacks,
        verbose=0,
    )


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(15)
x = random.normal(size=(128, 8, 8, 3)).astype("float32")
y = x.mean(axis=(1, 2)).argmax(axis=1)
mine = slice(hvd.rank(), None, hvd.size())
train(make(), 0, 2)

resume_from_epoch = 0
for epoch in range(4, 0, -1):
    if os.path.exists(FILE.format(epoch=epoch)):
        resume_from_epoch = epoch
        break
resume_from_epoch = int(hvd.broadcast(resume_from_epoch, 0, name="resume_from_epoch"))
assert resume_from_epoch == 2
model = hvd.load_model(FILE.format(epoch=2)) if hvd.rank() == 0 else make()
train(model, resume_from_epoch, 4)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
