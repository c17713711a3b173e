"""A dataset that a loader of images gave, batched already, shared out by hvd.data.shard.

expect: equal
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_keras as hvd

BATCH = 16

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(12)
folder = f"images-{hvd.rank()}"
for number in range(64):
    image = random.integers(0, 256, size=(12, 12, 3))
    image[..., number % 2] //= 2
    keras.utils.save_img(f"{folder}-{number % 2}-{number:02}.png", image, scale=False)
    os.makedirs(f"{folder}/{number % 2}", exist_ok=True)
    os.rename(f"{folder}-{number % 2}-{number:02}.png", f"{folder}/{number % 2}/{number:02}.png")

images = keras.utils.image_dataset_from_directory(
    folder, image_size=(12, 12), batch_size=8, shuffle=False, verbose=False
)
images = images.map(lambda x, y: (x / 255.0, tf.cast(y, tf.float32)))
train = hvd.data.shard(images.unbatch(), batch_size=BATCH // hvd.size(), shuffle=False)

model = keras.Sequential(
    [
        layers.Conv2D(4, 3, activation="relu"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)), loss="binary_crossentropy"
)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(train, epochs=2, shuffle=False, callbacks=callbacks, verbose=0)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", *model.get_weights())
