"""Models and batches of fit.py and backends.py. Only Keras and NumPy, for any of its backends."""

import keras
import numpy as np

BATCH = 64
ROWS, WIDTH, LENGTH = 50_000, 64, 32  # of the embedding; the length of a text in words


def perceptron() -> keras.Model:
    layers = [keras.layers.Flatten()]
    layers += [keras.layers.Dense(n, activation="relu") for n in (256, 128)]
    return keras.Sequential([keras.Input((28, 28, 1)), *layers, keras.layers.Dense(10)])


def convnet() -> keras.Model:
    layers = []
    for filters in (16, 32):
        layers += [keras.layers.Conv2D(filters, 3, activation="relu"), keras.layers.MaxPool2D()]
    layers += [keras.layers.Flatten(), keras.layers.Dense(64, activation="relu")]
    return keras.Sequential([keras.Input((28, 28, 1)), *layers, keras.layers.Dense(10)])


def embedding() -> keras.Model:
    layers = [keras.layers.Embedding(ROWS, WIDTH), keras.layers.GlobalAveragePooling1D()]
    return keras.Sequential(
        [keras.Input((LENGTH,), dtype="int32"), *layers, keras.layers.Dense(10)]
    )


def resnet() -> keras.Model:
    return keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10)


CASES = {
    "perceptron": (perceptron, keras.optimizers.SGD),
    "convnet": (convnet, keras.optimizers.SGD),
    "embedding, SGD": (embedding, keras.optimizers.SGD),
    "embedding, Adam": (embedding, keras.optimizers.Adam),
}
MORE = {"ResNet-50, 32 x 32": (resnet, keras.optimizers.SGD)}  # if asked for


def made(case: str) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    """Returns the model, with the same first weights at every call and on every rank."""
    keras.utils.set_random_seed(1)
    build, make_optimizer = (CASES | MORE)[case]
    return build(), make_optimizer(0.01)


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def rows(case: str) -> int:
    """Returns the rows of a batch; few for ResNet-50, of 102 MB: so the exchange counts."""
    return BATCH // 16 if (CASES | MORE)[case][0] is resnet else BATCH


def batch(case: str, rank: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(rank)
    build = (CASES | MORE)[case][0]
    if build is embedding:
        x = random.integers(0, ROWS, (BATCH, LENGTH)).astype("int32")
    else:
        shape = (32, 32, 3) if build is resnet else (28, 28, 1)
        x = random.normal(size=(rows(case), *shape)).astype("float32")
    return x, random.integers(0, 10, rows(case))
