"""Draws random programs: the choices that a seed makes, as a dictionary, without the defaults.

RULES undo what does not exist in Keras, and what the pages of hvd_keras exclude; these name the
page. Everything else must have the results of one process.
"""

import itertools
import random
import types
from collections.abc import Callable, Sequence
from typing import Any

Spec = dict[str, Any]

OPTIMIZERS = (
    "SGD Momentum Adam AdamW Nadam Adamax RMSprop Adagrad Adadelta Adafactor Ftrl Lamb Lion Muon "
    "ScheduleFreeAdamW Own Clipping"
)
# The values of each choice; the first one is the default.
CHOICES: dict[str, Any] = {
    "body": "dense batchnorm layernorm embedding positions masked masked conv1d conv2d lstm gru",
    "style": "functional sequential subclassed unbuilt nested",
    "inputs": "one tuple dict",
    "outputs": "one list dict",
    "regularizer": "none kernel activity own",  # own: of activities, and no sum over the rows
    "constraint": [False, True],
    "loss": "mse huber log_cosh mae sparse ignored probabilities categorical binary focal dice "
    "root flooded capped marked",
    "loss_weights": [False, True],
    "reduction": "sum_over_batch_size sum mean_with_sample_weight none",
    "flat": [False, True],  # targets of one dimension
    "weights": "none sample class",
    # scores: that count, or are of a class of one's own; whole: of all rows, not of each
    "metrics": "none metrics weighted both scores whole",
    "data": "arrays rows batches regrouped generator pydataset tfrecord frame local agree",
    "order": "kept hvd own",  # hvd.data.shard or the dataset itself shuffles
    "change": "none map prefetch cache",
    "repeat": [0, 2, 5],  # steps per epoch of repeated data
    "batch": [12, 6],  # rows of a step, of all ranks
    "steps": [3, 2, 4],
    "rest": [0, 6, 7, 1, 5],  # rows of the last step
    "uneven": "share pad trim",
    "unequal": [False, True],  # ranks have batches of different sizes
    "validation": "none arrays sharded rows batches dataset padded local",
    "validation_freq": [1, 2],
    "validation_steps": [0, 1],
    "optimizer": OPTIMIZERS,
    "option": "none weight_decay clipnorm global_clipnorm clipvalue use_ema ema_overwrites "
    "loss_scale_factor",
    "accumulation": [1, 2, 3],
    "backward_passes": [False, True],  # asks hvd.DistributedOptimizer for it
    "loss_scale": [False, True],
    "schedule": [False, True],
    "distributed": "plain sparse_as_dense num_groups shard_state gradient_predivide_factor",
    "average": [True, False],  # MetricAverageCallback
    "before": "none made evaluate",  # fit: Keras has made the step's function, or evaluates
    "at_once": [1, 2, 3],  # steps_per_execution
    "mode": "eager graph graph graph graph xla",  # what traces nothing is fastest
    "precision": "float32 mixed_bfloat16 mixed_float16",
    "epochs": [2, 1, 3],
    "initial_epoch": [0, 1],
    # fewer: ranks go on; later: in a second fit; elastic: from a commit
    "restart": "none epoch batch fewer later elastic",
    "table": "plain rows columns",
    "normalization": [False, True],
    # The model's own train_step, with a tape, two optimizers, or a mean of the losses of rows; or
    # its own compute_loss, as it is or in a tf.function.
    "step": "keras own tape second divides adds function",
    "op": "mean sum",  # of the ranks' gradients
    "multi": [False, True],  # MultiOptimizer
    "compression": "none fp16 bf16",
    "local": [0, 2, 3],  # so many ranks, each with a layer of its own
    "beside": [False, True],  # the last rank is not in the process set that trains
}
# Some of these.
LISTS = {
    "callbacks": "early_stopping plateau checkpoint best every_batch csv scheduler nan evaluates "
    "hvd_schedule swap_ema verify hears",
    "then": "fit fit_other evaluate evaluate_all predict save weights freeze rate on_batch loop",
}
VALUES = {n: v.split() if isinstance(v, str) else v for n, v in CHOICES.items()}
DEFAULTS: Spec = {n: values[0] for n, values in VALUES.items()} | {n: [] for n in LISTS}
# How often a choice is not the default, if not in 30 % of the programs.
OFTEN = {"body": 0.8, "weights": 0.45, "data": 0.85, "validation": 0.75, "optimizer": 0.6}
OFTEN |= {"metrics": 0.5, "mode": 0.45, "restart": 0.2, "table": 0.5, "beside": 0.2}
OFTEN |= dict.fromkeys(["precision", "average", "loss_scale", "before", "multi"], 0.1)
OFTEN |= dict.fromkeys(["compression", "local"], 0.1)
DECIDERS = ["early_stopping", "plateau", "best"]
OUTSIDE = ["then:on_batch", "then:loop"]  # fit

Rule = tuple[Callable[[Any], Any], list[str]]
# Where the function says so, these choices become the default. Of a list, "callbacks:csv" leaves
# one out.
IMPOSSIBLE: list[Rule] = [
    (lambda s: s.style in ("sequential", "unbuilt") or s.is_sequence, ["inputs", "outputs"]),
    (lambda s: s.data == "frame", ["body", "inputs", "outputs", "weights", "order", "repeat"]),
    (lambda s: s.data == "frame" and s.loss == "categorical", ["loss"]),
    (lambda s: s.is_sequence or s.loss == "categorical" or s.of_all_rows, ["flat"]),
    (lambda s: s.is_function, ["reduction"]),
    (lambda s: s.outputs == "one", ["loss_weights"]),
    (lambda s: not s.has_classes and s.weights == "class", ["weights"]),
    (lambda s: (s.is_sequence or s.outputs != "one") and s.weights == "class", ["weights"]),
    (lambda s: "mean_" in s.reduction and s.weights == "none" and not s.is_sequence, ["reduction"]),
    (lambda s: s.mode == "eager", ["at_once"]),
    # That builds the model, with weights of each rank.
    (lambda s: s.style == "unbuilt" or s.local, ["before"]),
    (lambda s: s.data not in ("rows", "batches", "regrouped", "generator"), ["change"]),
    (lambda s: s.data not in ("rows", "batches", "regrouped") and s.order == "own", ["order"]),
    (lambda s: s.data in ("local", "agree"), ["order", "repeat", "uneven"]),
    (lambda s: s.data not in ("arrays", "frame", "tfrecord", "local", "agree"), ["unequal"]),
    (lambda s: s.data == "local" and s.rest != 6, ["rest"]),
    (lambda s: s.data == "agree", ["rest"]),
    (lambda s: s.accumulation == 1, ["backward_passes"]),
    (lambda s: s.epochs <= s.initial_epoch, ["initial_epoch"]),
    (lambda s: s.validation == "none", ["validation_freq", "validation_steps"]),
    (lambda s: s.validation in ("arrays", "local"), ["validation_steps"]),
    (lambda s: s.reduction != "sum" or s.step != "keras" or s.regularizer != "none", ["op"]),
    # scale_local_gradients divides, and gradient_predivide_factor is for an average.
    (lambda s: s.local or s.distributed == "gradient_predivide_factor", ["op"]),
    # A schedule cannot be set; only one callback may set a rate.
    (lambda s: s.schedule, [f"callbacks:{c}" for c in ("plateau", "scheduler", "hvd_schedule")]),
    (lambda s: s.schedule, ["then:rate"]),
    (lambda s: "hvd_schedule" in s.callbacks, ["callbacks:plateau", "callbacks:scheduler"]),
    (lambda s: s.option not in ("use_ema", "ema_overwrites"), ["callbacks:swap_ema"]),
    # Keras itself builds it anew in each trace of a step.
    (lambda s: s.style in ("unbuilt", "subclassed") and s.schedule_free, ["style", "local"]),
    (lambda s: s.step == "second" and s.schedule_free, ["step"]),
    # XLA refuses different numbers of rows of losses of all rows, and of embeddings' gradients.
    (
        lambda s: (
            s.mode == "xla"
            and (s.of_all_rows or s.regularizer == "own" or s.metrics == "whole" or s.has_table)
        ),
        ["unequal"],
    ),
    # Alone it is built earlier, and a file of weights has the state of what is built.
    (lambda s: s.schedule_free, ["then:weights"]),
    (lambda s: not s.has_table, ["table"]),
    # Keras cannot divide sparse gradients.
    (lambda s: s.has_table and s.option == "loss_scale_factor", ["option"]),
    (lambda s: s.has_table or s.data == "frame", ["normalization"]),
    # If no other weight is left, Keras builds compile's optimizer for none, and hvd_keras for all.
    (lambda s: s.step == "second", ["multi", "then:save", "then:freeze"]),
    (lambda s: s.multi, [f"callbacks:{c}" for c in ("plateau", "scheduler", "hvd_schedule")]),
    (lambda s: s.multi, ["then:rate", "backward_passes", "callbacks:swap_ema"]),
    (lambda s: s.step == "tape", ["backward_passes"]),
    (lambda s: s.step in ("second", "divides"), ["then:loop"]),
    # Keras adds regularizers to the losses of rows, and those of half floats to none.
    (lambda s: s.step == "divides", ["outputs", "reduction", "regularizer"]),
    # Activities are tensors of the graph that calls the function, which outlives its variables.
    (lambda s: s.step == "function", ["outputs", "regularizer"]),
    (lambda s: s.is_sequence and s.metrics in ("scores", "whole"), ["metrics"]),
    (lambda s: s.metrics == "scores" and not s.has_classes, ["flat"]),
    # Keras adds regularizers to each row's.
    (lambda s: s.reduction == "none" and s.step != "keras", ["reduction"]),
    (lambda s: s.reduction == "none", ["regularizer", "outputs"]),
    (lambda s: s.precision != "float32" and s.regularizer == "activity", ["regularizer"]),
    (lambda s: s.step == "divides" and s.is_function, ["loss"]),
    # The ranks' models differ, and each has the rows of its own layer.
    (lambda s: s.is_sequence, ["local"]),
    # Keras pairs the averages of all variables with those that it applies gradients to.
    (lambda s: s.local and s.step == "second" and s.option == "ema_overwrites", ["option"]),
    (lambda s: s.local, ["inputs", "outputs", "style"]),
    (lambda s: s.local and s.data == "local", ["data"]),
    (lambda s: s.local and s.validation != "local", ["validation"]),
    (lambda s: s.local, [f"callbacks:{c}" for c in ("checkpoint", "best", "every_batch")]),
    (lambda s: s.local, ["callbacks:evaluates"]),
    (
        lambda s: s.local,
        [
            f"then:{c}"
            for c in ("evaluate", "evaluate_all", "predict", "save", "weights", "on_batch", "loop")
        ],
    ),
    # Rounding makes one process differ from itself.
    (lambda s: s.rounding != "float32" and s.optimizer not in ("SGD", "Momentum"), ["optimizer"]),
    # No process has the rows that "share" leaves out: 2 and 3 ranks must leave out equally many.
    (lambda s: s.uneven == "share" and s.rest % s.batch == 5, ["rest"]),
    (lambda s: s.uneven == "share" and s.order != "kept" and s.rest in (1, 7), ["rest"]),
]
EXCLUDED: list[Rule] = [
    # hvd.data.shard, "pad": statistics of batch normalisation, activity regularizers and what a
    # model adds to its loss, metrics without weights, masked losses, other reductions, and losses
    # that give no row its own.
    (lambda s: s.pads, ["reduction"]),
    (lambda s: s.pads and s.regularizer in ("activity", "own"), ["regularizer"]),
    (lambda s: s.pads and s.step in ("adds", "function"), ["step"]),
    (lambda s: s.pads and s.of_all_rows, ["loss"]),
    (lambda s: s.pads and (s.body == "batchnorm" or s.is_sequence), ["body"]),
    (lambda s: s.pads and s.metrics not in ("none", "weighted"), ["metrics"]),
    # The same, ``evaluation``: for the mean over the whole pass. For each of several outputs, Keras
    # takes the mean of the batches' losses, of however many rows.
    (lambda s: s.validation == "padded", ["validation_steps", "outputs"]),
    # docs/guide.md, "Validation": each rank has its own rows, of which a sum is that of all.
    (lambda s: s.validation in ("arrays", "dataset") and s.reduction == "sum", ["reduction"]),
    # docs/using/sharp-bits.md, "Output and files": sharded models need hvd.save_model.
    (lambda s: s.shards, [f"callbacks:{c}" for c in ("checkpoint", "best", "every_batch")]),
    (lambda s: s.shards, ["then:weights"]),
    # docs/tables/combinations.md: logs count the last step's padding.
    (lambda s: s.logs_padding, ["callbacks:csv"]),
    (lambda s: s.logs_padding and not s.validates, [f"callbacks:{c}" for c in DECIDERS]),
    # Those of batches have it.
    (lambda s: s.uneven == "pad", ["callbacks:hears"]),
    # hvd.data.shard: a PyDataset's batches, of which more ranks have more, are shuffled as wholes.
    (lambda s: s.data == "pydataset" and s.order == "hvd", ["order"]),
    # docs/embeddings.md, "State in shares"
    (
        lambda s: s.optimizer in ("Adafactor", "ScheduleFreeAdamW", "Clipping") and s.shards,
        ["distributed"],
    ),
    # docs/embeddings.md, "Limits of tables"
    (
        lambda s: s.optimizer in ("Adafactor", "Lamb", "Muon", "Clipping") and s.is_divided,
        ["table"],
    ),
    (lambda s: "swap_ema" in s.callbacks and s.shards, ["distributed"]),
    # docs/design.md, "Sparse gradients": adaptive optimizers square duplicate rows one by one.
    (lambda s: s.body == "positions" and s.mode == "eager", ["body"]),
    (lambda s: s.has_table and s.distributed == "sparse_as_dense", ["distributed"]),
    # docs/guide.md, "Callbacks": without MetricAverageCallback, the ranks log and write their own.
    (lambda s: not s.average, [f"callbacks:{c}" for c in [*DECIDERS, "csv", "hears"]]),
    # docs/checkpoints.md: a program that stops in the second epoch.
    (lambda s: s.epochs < 2, ["restart"]),
    (lambda s: s.at_once > 1 and s.restart in ("batch", "later"), ["restart"]),
    (lambda s: s.restart != "none", ["initial_epoch"]),
    # docs/migrating.md, "Elastic training": commits have what is common, and no data's position.
    (lambda s: s.restart == "elastic", ["local", "beside", "repeat", "order"]),
    (lambda s: s.restart == "elastic", ["callbacks:every_batch"]),
    (lambda s: s.restart == "elastic", [f"callbacks:{c}" for c in DECIDERS]),
    (lambda s: s.restart == "elastic" and s.shards, ["distributed", "table"]),
    # An exception may come before all ranks have written their parts: an epoch is logged twice.
    (lambda s: s.restart in ("epoch", "fewer") and s.is_divided, ["callbacks:csv"]),
    # A tape cannot see that the loss is a sum, nor how many rows a regularizer has, and says so.
    (lambda s: s.step == "tape", ["reduction"]),
    (
        lambda s: (
            s.step == "tape"
            and s.regularizer in ("activity", "own")
            and (s.unequal or s.data == "agree")
        ),
        ["regularizer"],
    ),
    # The same: data of one's own that repeat begin with that epoch only if they skip the others.
    (lambda s: s.data == "agree", ["restart"]),
    # Checkpoint warns: where a generator is cannot be saved, so repeated data begin anew.
    (lambda s: s.data == "generator" and s.repeat > 0, ["restart"]),
    # Two ranks are one then, which leaves no row out.
    (
        lambda s: (s.restart == "fewer" or s.beside) and s.uneven == "share" and s.rest in (1, 7),
        ["rest"],
    ),
    (lambda s: s.restart == "fewer", ["beside", "local"]),
    # docs/tables/combinations.md
    (lambda s: s.step == "tape" and s.distributed in ("shard_state", "num_groups"), ["step"]),
    (lambda s: s.step == "tape" and s.beside, ["beside"]),
    # hvd.load_model is for training on all ranks.
    (lambda s: s.beside or s.restart == "fewer", ["then:save"]),
    (lambda s: s.multi and s.distributed == "shard_state", ["multi"]),
    # docs/embeddings.md, "Limits of tables": XLA cannot compile a lookup.
    (lambda s: s.is_divided and s.mode == "xla", ["then:loop"]),
    (lambda s: s.has_norm and s.is_divided and (s.multi or s.step == "tape"), ["option"]),
    (lambda s: s.option == "global_clipnorm" and s.local and s.multi, ["option"]),
    (lambda s: s.option == "global_clipnorm" and s.local and s.step == "tape", ["option"]),
    # docs/using/sharp-bits.md, "Losses": outside fit, hvd_keras averages the ranks' losses.
    (lambda s: s.reduction != "sum_over_batch_size" or s.is_sequence, OUTSIDE),
    (lambda s: s.of_all_rows or s.loss == "ignored", OUTSIDE),
    (lambda s: s.regularizer == "own", ["then:loop"]),
    # A file that is saved within an accumulation outside fit has the sums of the rank that saves.
    (lambda s: s.accumulation > 1 and "save" in s.then, OUTSIDE),
]
# docs/using/torch.md and the errors there name what exists on TensorFlow alone.
TORCH: list[Rule] = [
    (lambda s: True, ["step", "table", "op", "multi", "local", "at_once", "repeat"]),
    (lambda s: s.restart == "elastic", ["restart"]),
    (lambda s: s.mode == "xla", ["mode"]),  # torch.compile takes minutes
    (lambda s: s.body == "batchnorm", ["body"]),  # each rank's own
    (lambda s: s.data in ("tfrecord", "agree", "regrouped"), ["data"]),
    (lambda s: s.change in ("map", "prefetch"), ["change"]),
    (lambda s: s.weights == "class", ["weights"]),
    (lambda s: s.data != "local", ["unequal"]),
    (lambda s: s.distributed != "gradient_predivide_factor", ["distributed"]),
    # Keras multiplies the weights by the mask in place.
    (lambda s: s.is_sequence, ["weights"]),
    (lambda s: s.loss == "ignored" and s.weights == "sample", ["metrics"]),
    (lambda s: s.reduction == "none", ["reduction"]),
    (lambda s: True, ["then:save", "then:loop"]),
]


class View(types.SimpleNamespace):
    """A spec with its defaults as attributes, and what follows from them."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(**DEFAULTS | spec, spec=spec)
        if self.local:
            self.inputs, self.style = "tuple", "subclassed"
            self.data = self.data if self.data == "agree" else "local"
        # Rows have several targets, of which masks leave some out.
        self.is_sequence = self.body == "masked"
        self.has_table = self.body in ("embedding", "positions", "masked")
        self.pads = self.uneven == "pad" or self.validation == "padded"
        # Logs have the padding of a last step that is not taken alone.
        self.logs_padding = self.uneven == "pad" and (self.at_once > 1 or self.repeat > 0)
        # There is a val_loss in each epoch.
        self.validates = self.validation != "none" and self.validation_freq == 1
        self.has_classes = self.loss in ("sparse", "ignored", "probabilities")
        self.is_divided = self.table != "plain"
        # They give no row a loss of its own.
        self.is_function = self.loss in ("root", "flooded", "capped", "marked")
        self.of_all_rows = self.is_function or self.loss == "dice"
        self.shards = self.distributed == "shard_state" or self.is_divided
        self.schedule_free = self.optimizer == "ScheduleFreeAdamW"
        self.has_norm = self.option in ("clipnorm", "global_clipnorm")
        self.rounding = rounding(spec)


def covering(seeds: Sequence[int]) -> list[int]:
    """Those with which each two values that any of these programs has occur in one, nearly fewest.

    After D. M. Cohen and others, The AETG system, IEEE Transactions on Software Engineering 23(7),
    1997.
    """
    seen: set[Any] = set()
    found: list[int] = []
    programs = {seed: draw(seed) for seed in seeds}
    for least in (128, 64, 32, 16, 8, 4, 2, 1):
        for seed, spec in programs.items():
            values = [(n, v) for n, vs in spec.items() for v in (vs if n in LISTS else [vs])]
            new = {*itertools.combinations(values, 2)} - seen
            if len(new) >= least:
                found.append(seed)
                seen |= new
    return found


def can_run(spec: Spec, ranks: int) -> bool:
    """Whether so many ranks can run a program."""
    return spec.get("local", 0) in (0, ranks - spec.get("beside", False))


def rounding(spec: Spec) -> str:
    """The dtype policy that rounds as coarsely as a program."""
    names = spec.get("precision", ""), spec.get("compression", "")
    if "mixed_bfloat16" in names or "bf16" in names:
        return "mixed_bfloat16"
    return "mixed_float16" if any(names) else "float32"


def draw(seed: int) -> Spec:
    """The program of a seed."""
    numbers, spec = random.Random(seed), {}
    for name, (_, *others) in VALUES.items():
        if numbers.random() < OFTEN.get(name, 0.3):
            spec[name] = numbers.choice(others)
    for name, text in LISTS.items():
        spec[name] = numbers.sample(text.split(), numbers.choice([0, 0, 1, 1, 2, 3]))
    return legal(spec)


def legal(spec: Spec, rules: Sequence[Rule] = ()) -> Spec:
    """Without what RULES, and others, undo, and without defaults."""
    found: Spec = dict(spec)
    for _ in range(3):  # a rule may make another one apply
        for applies, names in [*rules, *IMPOSSIBLE, *EXCLUDED]:
            if applies(View(found)):
                for name in names:
                    _undo(found, *name.split(":"))
    return {name: found[name] for name, d in DEFAULTS.items() if found.get(name, d) != d}


def _undo(spec: Spec, name: str, part: str = "") -> None:
    if part:
        spec[name] = [one for one in spec.get(name, []) if one != part]
    else:
        spec.pop(name, None)


def simpler(spec: Spec) -> list[Spec]:
    """The same program with one choice less, in all ways."""
    found = []
    for name, value in spec.items():
        for part in value if isinstance(value, list) else [""]:
            other = dict(spec)
            _undo(other, name, part)
            found.append(legal(other))
    return [other for other in found if other != spec]
