"""Averaging the gradients of known models as DistributedOptimizer does, against MPI and memcpy.

    hvdrun -np 2 --oversubscribe python benchmarks/gradients.py

Ours: one tensor per trainable variable, all in one tf.function, packed, summed, divided and
unpacked. As in training, the gradients are computed inside the function, so that their memory can
be reused for the averages, and the function returns one number that depends on all of them. The
same function with tf.identity in place of the exchange is measured in turn, and its time is
subtracted, pair by pair: training computes the gradients and calls the function anyway.

MPI: one in-place MPI_Allreduce of equally many float32 in one buffer, without packing or dividing.
Memcpy: one core copies the same bytes twice while the other ranks sleep.

For the first model the same difference is measured after a pause before each call, and in a
function that also updates variables with the averages, as a training does. And once the time of a
function is subtracted in which all gradients exist at once, as they must for an exchange, so that
they are in memory and not in the cache: what is left is that of the exchange alone.
"""

import time
from collections.abc import Callable, Sequence

import clock  # first
import numpy as np
import report
import tensorflow as tf
from clock import MPI

import hvd_keras as hvd
from hvd_keras.gradients.agreement import ExchangeOptions
from hvd_keras.gradients.reducer import GradientReducer

MODELS = ("ResNet50", "InceptionV3", "ResNet101", "VGG16")
SYNTHETIC = [(3, 3, 16, 32), (32,), (512, 64), (64,), (64, 10), (10,)]


def shapes_of(model: str) -> list[tuple[int, ...]]:
    """Returns the shapes of the trainable variables; rank 0 builds the model for all ranks."""
    shapes = None
    if hvd.rank() == 0:
        import keras

        built = getattr(keras.applications, model)(weights=None)
        shapes = [tuple(variable.shape) for variable in built.trainable_variables]
        del built
        keras.backend.clear_session()
    return hvd.broadcast_object(shapes, 0)


def gradient(shape: tuple[int, ...]) -> tf.Tensor:
    """Returns small integers that differ by element and rank, so that sums are exact."""
    values = np.full(int(np.prod(shape)), hvd.rank(), np.float32)
    values[::3] += 1
    values[::7] += 2
    return tf.constant(values.reshape(shape))


Exchange = Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]


def step(exchange: Exchange, values: list[tf.Tensor], whole: bool) -> Callable[[], object]:
    """Computes gradients and exchanges them; returns all, or a number that depends on all."""
    scale = tf.Variable(1.0)

    @tf.function(autograph=False)
    def run(values):
        results = exchange([value * scale for value in values])
        return results if whole else tf.add_n([tf.reshape(r, [-1])[0] for r in results])

    return lambda: run(values)


def in_a_training(
    model: str, exchanges: Sequence[Exchange], gradients: list[tf.Tensor], repeats: int
) -> list[report.Row]:
    """Compares the exchange as measured above with the exchange under other circumstances."""
    variables = [tf.Variable(tf.zeros_like(value)) for value in gradients]

    def updating(exchange: Exchange) -> Callable[[], object]:
        def update(values: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
            results = exchange(values)
            for variable, value in zip(variables, results, strict=True):
                variable.assign_sub(0.01 * value)
            return results[:1]

        return step(update, gradients, False)

    def after_a_pause(call: Callable[[], float]) -> Callable[[], float]:
        def measured() -> float:
            time.sleep(0.1)
            return call()

        return measured

    def all_at_once(values: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        with tf.control_dependencies(values):
            return [tf.identity(value) for value in values]

    ways = {"all at once": clock.together(step(all_at_once, gradients, False), 3)}
    for name, exchange in zip(("with", "without"), exchanges, strict=True):
        plain = clock.together(step(exchange, gradients, False), 3)
        update = clock.together(updating(exchange), 3)
        once = clock.together(step(exchange, gradients, False))
        ways |= {
            f"plain {name}": plain,
            f"update {name}": update,
            f"pause {name}": after_a_pause(once),
        }
    times = clock.interleaved(ways, repeats)
    plain, update, pause = (
        times[f"{way} with"] - times[f"{way} without"] for way in ("plain", "update", "pause")
    )
    alone = times["plain with"] - times["all at once"]
    return [
        report.compare(f"{model}, alone", hvd.size(), "one after the other", alone, plain),
        report.compare(
            f"{model}, each after 0.1 s", hvd.size(), "one after the other", pause, plain
        ),
        report.compare(
            f"{model}, with an update", hvd.size(), "one after the other", update, plain
        ),
    ]


def rows_of(model: str, shapes: list[tuple[int, ...]], repeats: int) -> list[report.Row]:
    gradients = [gradient(shape) for shape in shapes]
    variables = [tf.TensorSpec(shape, tf.float32, f"v{i}") for i, shape in enumerate(shapes)]
    reducer = GradientReducer(model, ExchangeOptions(), 0)

    def average(tensors: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        return reducer.reduce(tensors, variables)

    def identity(tensors: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        return [tf.identity(tensor) for tensor in tensors]

    ours, alone = (step(exchange, gradients, False) for exchange in (average, identity))

    flat = np.empty(sum(int(np.prod(shape)) for shape in shapes), np.float32)
    spare = np.empty_like(flat if hvd.rank() == 0 else flat[:0])
    bounds = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)])
    parts = [flat[a:b].reshape(s) for a, b, s in zip(bounds, bounds[1:], shapes, strict=False)]

    def fill() -> None:
        for part, tensor in zip(parts, gradients, strict=True):
            np.copyto(part, tensor.numpy())

    def allreduce() -> None:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat)

    def raw() -> float:
        fill()  # otherwise the in-place sums would grow with each call
        return clock.together(allreduce)()

    def copy_twice() -> None:
        np.copyto(spare, flat)
        np.copyto(flat, spare)

    # The mean over all ranks, less this rank's value.
    shift = (hvd.size() - 1) / 2 - hvd.rank()
    for mine, result in zip(gradients, step(average, gradients, True)(), strict=True):
        error = result.numpy() - mine.numpy()
        error -= shift
        clock.expect(max(error.max(), -error.min()) < 1e-5, f"{model}: averages")
    del result, error
    # Both functions return the sum of the first values, which shows that they have run.
    first = sum(float(tf.reshape(mine, [-1])[0]) for mine in gradients)
    clock.expect(abs(float(alone()) - first) < 1e-2, f"{model}: without exchange")
    clock.expect(abs(float(ours()) - first - shift * len(shapes)) < 1e-2, f"{model}: all averages")
    raw()
    for mine, part in zip(gradients, parts, strict=True):
        part /= hvd.size()
        part -= mine.numpy()
        clock.expect(max(part.max() - shift, shift - part.min()) < 1e-5, "MPI_Allreduce")

    times = clock.interleaved(
        {
            "ours": clock.together(ours),
            "identity": clock.together(alone),
            "raw": raw,
            "memcpy": clock.alone(copy_twice),
        },
        repeats,
    )
    exchange = times["ours"] - times["identity"]
    more = []
    if model == MODELS[0]:
        more = in_a_training(model, (average, identity), gradients, repeats)
    what = f"{model}, {len(shapes)} tensors, {flat.nbytes / 1e6:.3g} MB"
    return [
        report.compare(what, hvd.size(), "MPI_Allreduce", exchange, times["raw"]),
        report.compare(what, hvd.size(), "memcpy, twice", exchange, times["memcpy"]),
        *more,
    ]


def main() -> None:
    options = clock.options(__doc__, repeats=9)
    rows = []
    for model in ("synthetic",) if options.smoke else MODELS:
        shapes = SYNTHETIC if options.smoke else shapes_of(model)
        rows += rows_of(model, shapes, options.repeats)
    if hvd.rank() == 0:
        report.show(rows, options.json)


if __name__ == "__main__":
    main()
