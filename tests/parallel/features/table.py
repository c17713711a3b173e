"""The features that are crossed, and what is expected of a case that is not equal.

A feature is one entry of FEATURES; what options cannot say is in sides.py. test_combinations.py
tries a sample of the cases, measure.py all of them.
"""

import dataclasses
import itertools
import random
from collections.abc import Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Feature:
    """What a feature adds to a training.

    Attributes:
        alone: whether one process has it, too; otherwise it must not change the result.
        optimizer: arguments of Keras's optimizer.
        distributed: arguments of ``hvd.PartialDistributedOptimizer`` or of the tape.
        compile: arguments of ``compile``.
        own_step: whether the model has a ``train_step`` of its own.
    """

    alone: bool = False
    optimizer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    distributed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    compile: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    own_step: bool = False


FEATURES = {
    "local layers": Feature(alone=True),
    "divided table": Feature(),
    "shard_state": Feature(distributed={"shard_state": True}),
    "accumulation": Feature(alone=True, optimizer={"gradient_accumulation_steps": 2}),
    "loss scaling": Feature(),
    "MultiOptimizer": Feature(alone=True),
    "second optimizer": Feature(alone=True, own_step=True),
    "EMA": Feature(alone=True, optimizer={"use_ema": True, "ema_momentum": 0.8}),
    "process set": Feature(),
    "join": Feature(alone=True, own_step=True),
    "compression": Feature(),
    "sparse": Feature(),
    "masked loss": Feature(alone=True),
    "Normalization": Feature(alone=True),
    "jit_compile": Feature(compile={"jit_compile": True}),
    "run_eagerly": Feature(compile={"run_eagerly": True}),
    "unbuilt": Feature(),
    "steps_per_execution": Feature(compile={"steps_per_execution": 2}),
    "tape": Feature(own_step=True),
    "custom train_step": Feature(own_step=True),
    "VerifyWeights": Feature(),
    "files": Feature(alone=True),
    "tf_keras": Feature(alone=True),
}
# With whether one process does the same; otherwise it does what it does in "plain".
SITUATIONS = {
    "plain": True,
    "clipnorm": True,
    "global_clipnorm": True,
    "clipvalue": True,
    "restart": False,
    "fewer ranks": False,
    "save and load": True,
    "early stopping": True,
    "frozen layer": True,
    "evaluate and predict": True,
    "unknown length": True,
    "short last batch": True,
    "padded last batch": True,
}
# How many pairs the ordinary tests try, by the number of ranks.
SAMPLE = {2: 20, 3: 4}


@dataclasses.dataclass(frozen=True)
class Case:
    """Features in a situation."""

    features: tuple[str, ...]
    situation: str

    @property
    def names(self) -> frozenset[str]:
        """The features and the situation."""
        return frozenset({*self.features, self.situation})

    @property
    def ranks(self) -> int:
        """A process set trains beside another rank."""
        return 3 if "process set" in self.features else 2

    @property
    def is_legacy(self) -> bool:
        """A process has one Keras."""
        return "tf_keras" in self.features

    @property
    def alone(self) -> frozenset[str]:
        """The names of what one process trains."""
        has_table = not {"divided table", "sparse"}.isdisjoint(self.features)
        found = {name for name in self.features if FEATURES[name].alone}
        found.add(self.situation if SITUATIONS[self.situation] else "plain")
        return frozenset(found | {"sparse"} if has_table else found)

    def __str__(self) -> str:
        return ", ".join((*self.features, self.situation))


def _case(names: Iterable[str]) -> Case:
    names = set(names)
    situation = next((s for s in SITUATIONS if s in names), "plain")
    return Case(tuple(f for f in FEATURES if f in names), situation)


@dataclasses.dataclass(frozen=True)
class Rule:
    """What becomes of cases that have certain names.

    Attributes:
        outcome: "error", "≠", or "no": they do not go together.
        names: of features and situations.
        why: for the page.
        text: a part of the error.
    """

    outcome: str
    names: frozenset[str]
    why: str
    text: str = ""


def _rules(outcome: str, why: str, *many: str, text: str = "") -> list[Rule]:
    return [Rule(outcome, frozenset(names.split(" + ")), why, text) for names in many]


RULES = [
    *_rules(
        "no",
        "this test's loop with `hvd.join` is eager, with one optimizer, without `fit`",
        *(
            f"join + {name}"
            for name in (
                "second optimizer",
                "masked loss",
                "jit_compile",
                "run_eagerly",
                "unbuilt",
                "steps_per_execution",
                "custom train_step",
                "VerifyWeights",
                "files",
                *list(SITUATIONS)[4:],
            )
        ),
    ),
    *_rules("no", "`hvd.join` is for all ranks", "join + process set"),
    *_rules(
        "no",
        "`hvd.join` drops what a rank has accumulated, with a warning",
        "join + accumulation",
    ),
    *_rules("no", "a rank that has joined does not update its layer", "join + local layers"),
    *_rules("no", "each rank's model differs", "local layers + save and load"),
    *_rules("no", "`shard_state` is an option of `DistributedOptimizer`", "tape + shard_state"),
    *_rules("no", "one excludes the other", "run_eagerly + jit_compile", "divided table + sparse"),
    *_rules(
        "no",
        "tf_keras has no such option",
        "tf_keras + accumulation",
        "tf_keras + MultiOptimizer",
    ),
    *_rules(
        "no",
        "this test's training step needs Keras 3",
        "tf_keras + loss scaling",
        "tf_keras + second optimizer",
        "tf_keras + join",
        "tf_keras + tape",
        "tf_keras + custom train_step",
    ),
    *_rules(
        "≠",
        "Keras also counts the padding's valid entries",
        "masked loss + padded last batch",
    ),
    *_rules("no", "the fewer ranks are a process set", "process set + fewer ranks"),
    *_rules(
        "error",
        "a MultiOptimizer has no slots",
        "shard_state + MultiOptimizer",
        text="not possible for MultiOptimizer",
    ),
    *_rules(
        "error",
        "needs `DistributedOptimizer`",
        "tape + divided table + clipnorm",
        "tape + divided table + global_clipnorm",
        "MultiOptimizer + divided table + clipnorm",
        "MultiOptimizer + divided table + global_clipnorm",
        "tape + local layers + global_clipnorm",
        "MultiOptimizer + local layers + global_clipnorm",
        text="computes norms over all ranks",
    ),
    *_rules(
        "error",
        "the layers belong to single ranks",
        "fewer ranks + local layers",
        text="differs between the 2 ranks",
    ),
    *_rules(
        "error",
        "only in Keras 3",
        "tf_keras + restart",
        "tf_keras + fewer ranks",
        "tf_keras + divided table",
        text="needs Keras 3, but tf_keras is in use",
    ),
    *_rules(
        "error",
        "only in Keras 3",
        "tf_keras + shard_state",
        text="it needs an optimizer of Keras 3",
    ),
    *_rules(
        "error",
        "Keras cannot load the function that divides the variables",
        "MultiOptimizer + save and load",
        text="deserialization of a Python lambda",
    ),
    *_rules(
        "error",
        "a MultiOptimizer needs the gradients of all variables",
        "MultiOptimizer + second optimizer",
        text="Gradients must match trainable variables",
    ),
    *_rules(
        "error",
        "no rank updates the joined rank's part",
        "join + shard_state",
        text="has joined",
    ),
    *_rules(
        "error",
        "the joined rank's part is missing",
        "join + divided table",
        text="cannot run without rank",
    ),
]


def rule(case: Case) -> Rule | None:
    """What is expected of a case; None: it is equal."""
    return next((rule for rule in RULES if rule.names <= case.names), None)


def expected(case: Case) -> str:
    """The outcome that is expected of a case."""
    found = rule(case)
    return "=" if found is None else found.outcome


def _exist(cases: Iterable[Case]) -> list[Case]:
    return [case for case in dict.fromkeys(cases) if expected(case) != "no"]


def pairs() -> list[Case]:
    """A feature in a situation, two in the plain one, and what three make refused."""
    found = [Case((f,), s) for f in FEATURES for s in SITUATIONS]
    found += [Case(two, "plain") for two in itertools.combinations(FEATURES, 2)]
    return _exist([*found, *(_case(rule.names) for rule in RULES)])


def triples(seed: int) -> list[Case]:
    """Two features in a situation, shuffled."""
    two = itertools.combinations(FEATURES, 2)
    found = [Case(features, s) for features in two for s in SITUATIONS if s != "plain"]
    random.Random(seed).shuffle(found)
    return [case for case in _exist(found) if case not in set(pairs())]


def sample(ranks: int) -> list[Case]:
    """Pairs for so many ranks, in which most features and situations occur."""
    left = [case for case in pairs() if case.ranks == ranks and not case.is_legacy]
    random.Random(1).shuffle(left)
    found: list[Case] = []
    while len(found) < SAMPLE[ranks]:
        seen = set().union(*(case.names for case in found))
        found.append(max(left, key=lambda case: len(case.names - seen)))
        left.remove(found[-1])
    return found


_INTRODUCTION = """\
# Features in combination

Two ranks train with the row's feature in the column's situation, or with both features, and one
process trains with the rows of both ranks.

- "=": weights (or predictions) and the logs of `fit` are equal to rounding (relative 1e-3, with
  compression 2e-2), and what the ranks share is equal bit for bit.
- "error": an error on each rank, for the numbered reason.
- "≠": not the result of one process. "no": does not exist. Empty: not measured.

`make matrix` writes this page; `make test` repeats a sample. "process set": two ranks beside a
third. "fewer ranks": one rank continues a checkpoint of two. "frozen layer": a second `compile`
and `fit` with a frozen layer. "files": rows from `hvd.data.files`. "short" and "padded last batch":
`hvd.data.shard` with `uneven="share"` and `"pad"`, the latter without logs, in which Keras counts
the padding's rows.

"""


def _reason(rule: Rule) -> str:
    return f"{rule.why}: “{rule.text}”" if rule.text else rule.why


def page(outcomes: Mapping[Case, str]) -> str:
    """The text of docs/tables/combinations.md, from the outcomes of ``pairs()``."""
    texts = dict.fromkeys(_reason(rule) for rule in RULES)
    reasons = {text: number for number, text in enumerate(texts, 1)}

    def cell(case: Case) -> str:
        found = rule(case)
        outcome = outcomes.get(case, "" if expected(case) != "no" else "no")
        if found is None or outcome != found.outcome:
            return outcome
        return f"{outcome} {reasons[_reason(found)]}"

    def markdown(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
        head = ["", *columns]
        lines = [head, ["---", *[":-:"] * (len(head) - 1)], *rows]
        return "".join(f"|{'|'.join(line)}|\n" for line in lines)

    names = list(FEATURES)
    situations = [[f, *(cell(Case((f,), s)) for s in SITUATIONS)] for f in names]
    two = [
        [f, *(cell(_case({f, g})) if i < k else "" for i, g in enumerate(names[:-1]))]
        for k, f in enumerate(names)
    ]
    text = _INTRODUCTION + markdown(SITUATIONS, situations)
    text += "\nTwo features, in the situation “plain”:\n\n" + markdown(names[:-1], two[1:])
    many = [_case(rule.names) for rule in RULES if len(rule.names) > 2]
    lines = "".join(f"- {case}: {cell(case)}\n" for case in many)
    text += f"\nThree together, where each two work:\n\n{lines}\nReasons:\n\n"
    return text + "".join(f"{number}. {why}\n" for why, number in reasons.items())
