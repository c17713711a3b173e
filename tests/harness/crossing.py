"""Which features of tests/harness/features.py are crossed, and which pairs are refused."""

import dataclasses
import itertools
import random
from collections.abc import Iterable

import pytest

# In the order of the page.
FEATURES = (
    "local layers",
    "divided table",
    "shard_state",
    "accumulation",
    "loss scaling",
    "MultiOptimizer",
    "second optimizer",
    "EMA",
    "process set",
    "join",
    "compression",
    "sparse",
    "masked loss",
    "Normalization",
    "jit_compile",
    "eager",
    "unbuilt",
    "steps_per_execution",
    "tape",
    "custom train_step",
)
SITUATIONS = (
    "plain",
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "restart",
    "fewer ranks",
    "save and load",
    "early stopping",
    "frozen layer",
    "evaluate and predict",
    "data of unknown length",
    "unequal batches",
)
# So many pairs the default tests try.
SAMPLE = 12


@dataclasses.dataclass(frozen=True)
class Case:
    """Features in a situation."""

    features: tuple[str, ...]
    situation: str

    @property
    def names(self) -> frozenset[str]:
        """The features and the situation."""
        return frozenset({*self.features, self.situation})

    def __str__(self) -> str:
        return ", ".join((*self.features, self.situation))


@dataclasses.dataclass(frozen=True)
class Rule:
    """What some names make of a case that has them all.

    Attributes:
        names: features and situations.
        text: a part of the error, for refused cases.
        why: for the page.
    """

    names: frozenset[str]
    text: str
    why: str


def _rules(text: str, why: str, *many: str) -> list[Rule]:
    return [Rule(frozenset(names.split(" + ")), text, why) for names in many]


REFUSED = [
    *_rules(
        "not possible for MultiOptimizer",
        "a MultiOptimizer has no slots of its own",
        "shard_state + MultiOptimizer",
    ),
    *_rules(
        "computes norms over all ranks",
        "only hvd.DistributedOptimizer computes norms over all ranks",
        "tape + divided table + clipnorm",
        "tape + divided table + global_clipnorm",
        "MultiOptimizer + divided table + clipnorm",
        "MultiOptimizer + divided table + global_clipnorm",
        "tape + local layers + global_clipnorm",
        "MultiOptimizer + local layers + global_clipnorm",
    ),
    *_rules(
        "differs between the 2 ranks",
        "layers of single ranks cannot be given to other ranks",
        "fewer ranks + local layers",
    ),
    *_rules(
        "has joined", "nobody updates the part of a rank that has joined", "join + shard_state"
    ),
    *_rules(
        "cannot run without rank",
        "the part of a rank that has joined is missing",
        "join + divided table",
    ),
]
# Pairs that contradict each other.
_NONE = [
    *_rules(
        "",
        "a loop with `hvd.join` is eager and needs no `fit`",
        *(
            f"join + {name}"
            for name in (
                "second optimizer",
                "process set",
                "masked loss",
                "jit_compile",
                "eager",
                "unbuilt",
                "steps_per_execution",
                "custom train_step",
                *SITUATIONS[4:],
            )
        ),
    ),
    *_rules("", "what a rank has accumulated when it joins is lost", "join + accumulation"),
    *_rules("", "a rank that has joined does not update its layer", "join + local layers"),
    *_rules("", "each rank has a model of its own", "local layers + save and load"),
    *_rules("", "`shard_state` is an option of `hvd.DistributedOptimizer`", "tape + shard_state"),
    *_rules("", "either one or the other", "eager + jit_compile", "divided table + sparse"),
    *_rules("", "the other number of ranks is a process set", "process set + fewer ranks"),
]


def refusal(names: Iterable[str]) -> Rule | None:
    """Why a case is an error, or None."""
    return next((rule for rule in REFUSED if rule.names <= set(names)), None)


def contradiction(names: Iterable[str]) -> Rule | None:
    """Why a case does not exist, or None."""
    return next((rule for rule in _NONE if rule.names <= set(names)), None)


def every(most: int) -> list[Case]:
    """All cases: a feature in a situation, two in the plain one; with three, two in a situation."""
    found = [Case((f,), s) for f in FEATURES for s in SITUATIONS]
    for pair in itertools.combinations(FEATURES, 2):
        found += [Case(pair, s) for s in (SITUATIONS if most == 3 else SITUATIONS[:1])]
    return [case for case in found if contradiction(case.names) is None]


def cases(ranks: int) -> list[object]:
    """The cases for so many ranks, as parameters; those outside of the sample are marked."""
    pairs = every(2)
    sample = random.Random(1).sample(pairs, SAMPLE)
    found: list[object] = []
    for case in every(3):
        if ("process set" in case.features) == (ranks == 3):
            marks = [] if case in sample else [pytest.mark.matrix]
            if case not in pairs:
                marks = [pytest.mark.triples]
            found.append(pytest.param(case, id=str(case), marks=marks))
    return found
