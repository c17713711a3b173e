"""Runs programs, one after the other, and writes down all that their user can see.

    python -m tests.programs.program SPECS FOLDER alone|ranks|auto

SPECS is a file with a JSON object of specs by name. What a program shows is written to
FOLDER/NAME.RANK.npz. Only those of ``ranks`` use hvd_keras.
"""

import contextlib
import csv
import functools
import gc
import importlib
import io
import itertools
import json
import os
import pathlib
import shutil
import sys
import traceback
import zipfile
from collections.abc import Sequence
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

from tests.programs import model
from tests.programs.data import Feed, Side, frames
from tests.programs.draw import View


class StopError(Exception):
    """Ends fit as a crash would."""


def stopping(where: str) -> Any:
    """Stops between the first two epochs, or within the second one."""
    epochs: list[int] = []

    def begin(epoch: int, logs: Any) -> None:
        epochs.append(epoch)
        if where in ("epoch", "fewer") and len(epochs) == 2:
            raise StopError

    def batch(number: int, logs: Any) -> None:
        if number and len(epochs) == 2:
            raise StopError

    return keras.callbacks.LambdaCallback(on_epoch_begin=begin, on_train_batch_begin=batch)


class Program:
    """A program in this process."""

    def __init__(self, spec: dict[str, Any], side: Side, noise: float) -> None:
        self.spec, self.side, self.noise, self.hvd = View(spec), side, noise, side.hvd
        self.seen: dict[str, Any] = {}
        self.folder = pathlib.Path("files")  # of all ranks
        self.step = "fit"  # what the program does

    def begin(self) -> None:
        """Makes all that a script makes."""
        self.model = self.new_model()
        of = self.spec, self.side
        self.train, self.other = Feed("train", *of), Feed("other", *of)
        self.validation = Feed("validation", *of)
        self.given = self.train.fit()

    def run(self) -> None:
        """Does what the spec says."""
        keras.config.set_dtype_policy(self.spec.precision)
        self.begin()
        if self.spec.before == "made":  # as train_on_batch does
            self.model.make_train_function()
        elif self.spec.before == "evaluate":
            self.evaluated(self.validation.evaluation("dataset"))
        if self.spec.restart == "none" or not self.hvd:
            self.fits(initial_epoch=self.spec.initial_epoch)
        elif self.spec.restart == "elastic":
            self.elastic()
        else:
            self.restart()
            if not self.side.process_set.included():
                return
        for number, action in enumerate(self.spec.then):
            self.step = f"then {number}, {action},"
            getattr(self, f"then_{action}")()
        for path in sorted(self.folder.rglob("*")):
            name = str(path.relative_to(self.folder))
            if path.is_file() and not name.startswith("state"):
                found = {"": 1, **numbers(path)}
                self.seen |= {f"file {name} {key}": value for key, value in found.items()}

    def new_model(self) -> Any:
        # The ranks' weights differ; those of rank 0 are broadcast.
        made = model.build(self.spec, 100 * (self.side.rank or 0), self.noise, self.side)
        return model.compiled(made, self.spec, self.side, self.noise)

    def callbacks(self) -> list[Any]:
        """As the spec says, in the order that docs/guide.md asks for."""
        of, hvd, path, rate = keras.callbacks, self.hvd, self.folder, model.rate_of(self.spec)
        path.mkdir(exist_ok=True)
        monitored = "val_loss" if self.spec.validates else "loss"
        best = {"monitor": monitored, "save_best_only": True, "save_weights_only": True}

        def schedule() -> Any:
            if hvd:
                given = {"initial_lr": rate, "multiplier": lambda epoch: 0.7**epoch}
                scheduled = hvd.callbacks.LearningRateScheduleCallback
                return scheduled(**given, momentum_correction=False)

            def begin(epoch: int, logs: Any) -> None:
                self.model.optimizer.learning_rate = rate * 0.7**epoch

            def end(epoch: int, logs: Any) -> None:
                logs["lr"] = float(self.model.optimizer.learning_rate)

            return of.LambdaCallback(on_epoch_begin=begin, on_epoch_end=end)

        def hears() -> Any:
            """Writes down what callbacks get."""

            def on(event: str) -> Any:
                def hear(*given: Any) -> None:
                    when = " ".join(map(str, [self.step, event, *given[:-1]]))
                    for key, value in (given[-1] or {}).items():
                        self.seen[f"{when} hears {key}"] = np.asarray(value, "float64")

                return hear

            heard = of.LambdaCallback(on_epoch_end=on("epoch"))
            heard.on_test_end, heard.on_train_end = on("test"), on("train")
            return heard

        found = []
        if hvd:
            own = [v for layer in model.own_layers(self.model) for v in layer.variables]
            of_rank = own if own and self.spec.step == "tape" else None  # an optimizer knows
            found.append(hvd.callbacks.BroadcastGlobalVariablesCallback(0, of_rank))
            found += [hvd.callbacks.MetricAverageCallback()] if self.spec.average else []
        made = {
            "hvd_schedule": schedule,
            "scheduler": lambda: of.LearningRateScheduler(lambda epoch, rate: rate * 0.8),
            "evaluates": lambda: of.LambdaCallback(on_epoch_end=self.evaluate_within),
            "early_stopping": lambda: of.EarlyStopping(monitored, restore_best_weights=True),
            "plateau": lambda: of.ReduceLROnPlateau(monitored, factor=0.5, patience=1),
            "nan": of.TerminateOnNaN,
            "swap_ema": lambda: of.SwapEMAWeights(swap_on_epoch=True),
            "checkpoint": lambda: of.ModelCheckpoint(path / "{epoch}.keras"),
            "best": lambda: of.ModelCheckpoint(path / "best.weights.h5", **best),
            "every_batch": lambda: of.ModelCheckpoint(
                path / "{epoch}-{batch}.weights.h5", save_freq=2, save_weights_only=True
            ),
            "verify": lambda: hvd.callbacks.VerifyWeights(1) if hvd else of.Callback(),
            "hears": hears,
            "csv": lambda: of.CSVLogger(path / "log.csv", append=self.spec.restart != "none"),
        }
        return [*found, *(make() for name, make in made.items() if name in self.spec.callbacks)]

    def evaluate_within(self, epoch: int, logs: Any) -> None:
        """Evaluates other rows, the same on all ranks, in fit."""
        self.seen[f"{self.step} evaluated in epoch {epoch}"] = self.evaluated(*self.other.data[:2])

    def evaluated(self, *data: Any, **options: Any) -> Any:
        options = {"batch_size": self.spec.batch, **options} if len(data) > 1 else options
        return np.asarray(self.model.evaluate(*data, verbose=0, **options))

    def fits(self, *checkpoint: Any, stop: Sequence[Any] = (), **arguments: Any) -> None:
        """Trains as the spec says; if that is to stop in a later fit, after another one."""
        if self.spec.restart == "later":
            self.history(self.other.fit(), *checkpoint, epochs=1)
        self.fit(self.given, *checkpoint, *stop, epochs=self.spec.epochs, **arguments)

    def history(self, given: dict[str, Any], *more: Any, **arguments: Any) -> Any:
        """Trains, and returns Keras's history."""
        if self.spec.weights == "class":
            arguments["class_weight"] = {0: 0.5, 1: 2.0, 2: 1.0}
        arguments |= {"callbacks": [*self.callbacks(), *more], "verbose": 0}
        return self.model.fit(**given, **arguments, **self.validation.validation())

    def fit(self, given: dict[str, Any], *more: Any, **arguments: Any) -> None:
        """Trains, and writes down what came of it."""
        spec, history = self.spec, self.history(given, *more, **arguments)
        for key, values in history.history.items():
            in_first = not key.startswith("val_") or spec.validation_freq == 1
            # That of a fit that goes on after a restart begins with the second epoch, or the first:
            # an exception may come before all ranks have written their parts of a checkpoint.
            has_restarted = spec.restart != "none" and self.step == "fit" and in_first
            if has_restarted:
                values = [value for i, value in zip(history.epoch, values, strict=True) if i]
            found = np.asarray(values, "float64")
            compared = spec.average and (key.startswith("val_") or not spec.logs_padding)
            self.seen[f"{self.step} history {key}"] = found if compared else len(found)
        self.look()

    def look(self) -> None:
        """Writes down the model's and the optimizer's state."""
        found: dict[str, Any] = {}
        optimizer = self.model.optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        sums = getattr(inner, "_accumulated_gradients", None) or []
        variables = {"weight": self.model.weights}
        if not self.spec.shards:  # of whose state each rank has a part
            every = [*optimizer.variables, *(inner.variables if inner is not optimizer else [])]
            # Each rank has the sum of its own gradients.
            variables["optimizer"] = [v for v in every if all(v is not own for own in sums)]
        every = [v for some in variables.values() for v in some]
        own = {id(v) for v in every if "own" in v.path}
        for slots in vars(inner).values():  # the names of some say nothing
            if isinstance(slots, list) and len(slots) == len(inner._trainable_variables):
                pairs = zip(slots, inner._trainable_variables, strict=True)
                own |= {id(slot) for slot, weight in pairs if id(weight) in own}
        for kind, some in variables.items():
            shared = [v for v in some if id(v) not in own]
            found |= {f"{kind} {i} {v.name}": self.whole(v) for i, v in enumerate(shared)}
            parts = [np.ravel(v) for v in some if id(v) in own]
            if parts:
                every = np.concatenate(parts)
                every = self.hvd.allgather(every, **self.side.options) if self.hvd else every
                found[f"{kind} own"] = np.sort(every)
        found["rate"] = float(getattr(optimizer, "learning_rate", 0))
        found["iterations"] = int(optimizer.iterations)
        self.seen |= {f"{self.step} {name}": value for name, value in found.items()}

    def whole(self, variable: Any) -> Any:
        """The array of a variable, of which this rank may have a part."""
        if self.spec.is_divided and self.hvd:
            return importlib.import_module("hvd_keras.gradients.shards").whole(variable)
        return np.asarray(variable)

    def restart(self) -> None:
        """Breaks off, and goes on with all new; "fewer": without the last rank."""
        where = self.spec.restart
        every = 1 if where in ("batch", "later") else "epoch"
        of_all = self.side.process_set

        def checkpoint() -> Any:
            folder = self.folder / "state"
            return self.hvd.callbacks.Checkpoint(folder, save_freq=every, **self.side.options)

        with contextlib.suppress(StopError):
            self.fits(checkpoint(), stop=[stopping(where)])
        keras.backend.clear_session()  # which names variables anew, as a new process does
        if where == "fewer":
            self.side = of_ranks(tuple(range(of_all.size() - 1)))
            if not self.side.process_set.included():
                self.seen.clear()
                return
        self.begin()
        self.fits(checkpoint())

    def elastic(self) -> None:
        """Breaks off behind the first epoch, and goes on from the last commit with all new."""
        elastic = importlib.import_module("hvd_keras.horovod.elastic")
        if self.side.rank == 0:
            shutil.rmtree(os.environ["HVD_COMMITS"], ignore_errors=True)
        self.hvd.barrier()
        for stop in ([stopping("epoch")], []):
            if not stop:
                keras.backend.clear_session()
                self.begin()
            self.model(tf.nest.map_structure(lambda part: part[:1], self.train.data[0]))
            updated = [self.model.trainable_variables]
            if (second := getattr(self.model, "second", None)) is not None:
                updated = self.model.by_optimizer()
                second.build(updated[1])
            self.model.optimizer.build(updated[0])
            elastic._numbers = itertools.count()  # as in a new process
            state = elastic.KerasState(self.model, epoch=0, batch=0)
            of_state = (
                elastic.UpdateEpochStateCallback(state),
                elastic.UpdateBatchStateCallback(state),
                elastic.CommitStateCallback(state, 9),
            )

            @elastic.run
            def train(state: Any, *more: Any) -> None:
                self.fits(*more, initial_epoch=state.epoch)

            with contextlib.suppress(StopError):
                train(state, *of_state, *stop)

    def then_fit(self) -> None:
        self.fit(self.given, epochs=1)

    def then_fit_other(self) -> None:
        self.fit(self.other.fit(), epochs=1)

    def then_evaluate(self) -> None:
        """The ranks evaluate together."""
        options = {}
        if self.hvd:
            options["callbacks"] = [self.hvd.callbacks.MetricAverageCallback()]
        form = "padded" if self.spec.validation == "padded" else "sharded"
        spec = View({**self.spec.spec, "validation": form})
        data = Feed("validation", spec, self.side).evaluation(form)
        self.seen[f"{self.step} evaluated"] = self.evaluated(data, **options)

    def then_evaluate_all(self) -> None:
        """Each rank evaluates all rows."""
        data = self.other.data[:2]
        data = frames(self.spec, data) if self.spec.data == "frame" else data
        self.seen[f"{self.step} evaluated"] = self.evaluated(*data)

    def then_predict(self) -> None:
        found = self.model.predict(self.other.data[0], batch_size=5, verbose=0)
        for number, part in enumerate(tf.nest.flatten(found)):
            self.seen[f"{self.step} predicted {number}"] = part

    def then_save(self) -> None:
        """Goes on with what was saved."""
        if self.spec.shards and self.hvd:
            self.hvd.save_model(self.model, self.folder / "saved.keras", **self.side.options)
        else:
            self.model.save(self.folder / "saved.keras")
        load = keras.models.load_model
        if self.hvd:
            load = functools.partial(self.hvd.load_model, average_aggregated_gradients=True)
        self.model = load(self.folder / "saved.keras")
        model.prepare(self.model, self.spec, self.side)
        if self.spec.is_divided:  # which no file has with its optimizer
            model.compiled(self.model, self.spec, self.side, self.noise)
        self.then_fit()

    def then_weights(self) -> None:
        """Goes on with the weights alone, in a new model."""
        self.model.save_weights(self.folder / "saved.weights.h5")
        self.model = self.new_model()
        self.model(tf.nest.map_structure(lambda part: part[:1], self.train.data[0]))
        self.model.load_weights(self.folder / "saved.weights.h5")
        self.then_fit()

    def then_freeze(self) -> None:
        """Goes on without training the first layer."""
        parts = getattr(self.model, "parts", self.model.layers)
        next(layer for layer in parts if layer.weights).trainable = False
        model.compiled(self.model, self.spec, self.side, self.noise)
        self.then_fit()

    def then_rate(self) -> None:
        self.model.optimizer.learning_rate = model.rate_of(self.spec) / 3
        self.then_fit()

    def my_rows(self, feed: Feed, step: int) -> Any:
        """This rank's rows of a step of a feed."""
        number = len(tf.nest.flatten(feed.data)[0])
        at = np.arange(number) // self.spec.batch == step
        at &= np.arange(number) % self.side.size == (self.side.rank or 0)
        return tf.nest.map_structure(lambda part: part[at], feed.data)

    def then_on_batch(self) -> None:
        self.model.train_on_batch(*self.my_rows(self.train, 0))
        self.look()

    def then_loop(self) -> None:
        """Goes on in a loop of its own."""
        net, optimizer, losses = self.model, self.model.optimizer, []

        def step(data: Any) -> Any:
            x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                predicted = net(x, training=True)
                loss = net.compute_loss(x, y, predicted, weights, training=True)
                scaled = optimizer.scale_loss(loss)
            tape = net.tape(tape) if self.spec.step == "tape" else tape
            gradients = tape.gradient(scaled, net.trainable_variables)
            optimizer.apply(gradients, net.trainable_variables)
            return loss

        if self.spec.mode != "eager":
            step = tf.function(step, jit_compile=self.spec.mode == "xla")
        for number in range(2):
            loss = step(tf.nest.map_structure(tf.constant, self.my_rows(self.other, number)))
            loss = self.hvd.allreduce(loss, **self.side.options) if self.hvd else loss
            losses.append(float(loss))
        self.seen[f"{self.step} losses"] = losses
        self.look()


def numbers(path: pathlib.Path) -> dict[str, Any]:
    """What a file has, by name."""
    if path.suffix == ".csv":
        with path.open() as file:
            table = list(csv.DictReader(file))
        cells = {k: [row[k].replace("NA", "") or "nan" for row in table] for k in table[0]}
        return {k: np.array(values, "float64") for k, values in cells.items()}
    found: dict[str, Any] = {}

    def add(name: str, one: Any) -> None:
        # Each rank has its own sums of gradients, and parts of states.
        if isinstance(one, h5py.Dataset) and "optimizer" not in name:
            found[name] = np.asarray(one)

    file: Any = path
    if path.suffix == ".keras":
        with zipfile.ZipFile(path) as archive:
            file = io.BytesIO(archive.read("model.weights.h5"))
    with h5py.File(file) as opened:
        opened.visititems(add)
    return found


@functools.cache
def of_ranks(ranks: tuple[int, ...]) -> Side:
    """The side of this rank in a process set, which all ranks make."""
    hvd = importlib.import_module("hvd_keras")
    of = hvd.global_process_set
    if len(ranks) < hvd.size():
        of = hvd.add_process_set(ranks)
    return Side(of.rank() if of.included() else -1, of.size(), of)


def run(spec: dict[str, Any], side: Side, noise: float = 0.0) -> dict[str, Any]:
    """What the user of a program sees; the program's folder is the current one."""
    keras.backend.clear_session()
    gc.freeze()  # it has collected; what is left stays
    keras.utils.set_random_seed(1)
    program = Program(spec, side, noise)
    try:
        program.run()
    except Exception as error:
        program.seen["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    return program.seen


def main(path: str, folder: str, how: str) -> None:
    side, rank, meet = Side(), 0, lambda: None
    if how == "ranks":
        import hvd_keras as hvd

        hvd.init()
        rank, meet = hvd.rank(), hvd.barrier
    for name, spec in json.loads(pathlib.Path(path).read_text()).items():
        noise = spec.pop("noise", 0.0)
        where = pathlib.Path(folder, name)
        where.mkdir(parents=True, exist_ok=True)
        os.chdir(where)
        meet()
        if how == "ranks":
            side = of_ranks(tuple(range(hvd.size() - View(spec).beside)))
        has_part = how != "ranks" or side.process_set.included()
        seen = run(spec, side, noise) if has_part else {}
        meet()  # the files are those of all ranks
        np.savez(f"{where}.{rank}.npz", **{k.replace("/", "|"): v for k, v in seen.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
