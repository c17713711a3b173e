"""OCR in the manner of CTC: a layer that adds the loss, labels as an input, compile without a loss.

expect: equal
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import hvd_keras as hvd

BATCH, STEPS, CHARACTERS = 16, 10, 5


class CTCLayer(layers.Layer):
    def call(self, y_true, y_pred):
        rows = ops.shape(y_pred)[0]
        lengths = ops.ones((rows,), "int32")
        loss = ops.ctc_loss(y_true, y_pred, lengths * 3, lengths * STEPS, mask_index=CHARACTERS)
        self.add_loss(ops.mean(loss))
        return y_pred


hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(9)
images = random.normal(size=(128, STEPS, 4)).astype("float32")
labels = random.integers(0, CHARACTERS, size=(128, 3)).astype("int32")
dataset = tf.data.Dataset.from_tensor_slices((images, labels))
dataset = dataset.shard(hvd.size(), hvd.rank()).batch(BATCH // hvd.size())
dataset = dataset.map(lambda image, label: {"image": image, "label": label})

image = keras.Input((STEPS, 4), name="image")
label = keras.Input((3,), name="label", dtype="int32")
h = layers.Bidirectional(layers.LSTM(6, return_sequences=True))(image)
h = layers.Dense(CHARACTERS + 1, name="dense2")(h)
model = keras.Model([image, label], CTCLayer(name="ctc_loss")(label, h))
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.003)))
model.fit(
    dataset, epochs=2, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
)
prediction_model = keras.Model(image, model.get_layer("dense2").output)
logits = prediction_model.predict(images[:8], verbose=0)
np.savez(f"{os.environ['RESULT']}/{hvd.rank()}", logits, *model.get_weights())
