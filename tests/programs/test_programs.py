"""Some random programs have the results of one process; ``make programs`` runs more.

What docs/tables/combinations.md refuses is an error on each rank.
"""

from typing import Any

import pytest

from tests.programs import draw, run

# By the number of ranks: together nearly each value of each choice occurs.
SEEDS = {
    2: (7047, 619, 10807, 5828, 5883, 10702, 10058, 11903),
    3: (3556, 11897, 5434, 8329, 8691, 11590, 4348, 9508),
}


def of(**choices: Any) -> draw.Spec:
    return choices


# What a choice meets seldom.
SHORT = {
    "weights of rows that are compared": of(
        loss="capped", weights="sample", mode="graph", optimizer="Adadelta"
    ),
    "norms count local layers, and an accumulation goes on in the next epoch": of(
        local=2,
        accumulation=2,
        option="global_clipnorm",
        distributed="shard_state",
        optimizer="Momentum",
    ),
    "each optimizer has slots of what it updates": of(
        step="second", restart="epoch", option="use_ema", optimizer="Adam"
    ),
    "Adagrad squares each gradient of a row": of(body="embedding", optimizer="Adagrad"),
    "a tape in a loop": of(body="embedding", step="tape", then=["loop"]),
    "a tape that XLA compiles": of(mode="xla", step="tape", then=["loop"]),
    "statistics count rows": of(body="batchnorm", data="local", unequal=True),
    "what is added counts by rows": of(
        data="local", unequal=True, step="adds", regularizer="activity", optimizer="Muon"
    ),
    "eager gradients are scaled": of(
        data="local", unequal=True, step="divides", option="loss_scale_factor"
    ),
    "functions keep nothing of a trial": of(
        step="function", reduction="sum", style="unbuilt", mode="graph"
    ),
    "a function keeps no number of rows of the step that has traced it": of(
        data="agree",
        at_once=3,
        mode="graph",
        step="function",
        steps=2,
        metrics="whole",
        accumulation=3,
    ),
    "a tape's regularizers see all rows": of(regularizer="own", loss="root", step="tape"),
    "sums of all ranks are logged": of(reduction="sum", op="sum"),
    "an optimizer may change the mean of each step": of(optimizer="Clipping", accumulation=2),
    "layers of ranks have names of their own": of(local=2, restart="epoch", reduction="none"),
    "one rank trains": of(body="batchnorm", beside=True, then=["on_batch"]),
}


@pytest.mark.parametrize("ranks", SEEDS)
def test_random_programs(ranks: int) -> None:
    """Each program runs on one number of ranks here, and on both by ``make programs``."""
    specs = {str(seed): draw.draw(seed) for seed in SEEDS[ranks]}
    specs |= SHORT if ranks == 2 else {}
    assert all(draw.can_run(spec, ranks) for spec in specs.values())
    # None differs, and none fails alone or differs from itself, which would prove nothing.
    assert run.run(specs, (ranks,)) == ({}, {})


TABLE = of(body="embedding", table="rows")
OWN = of(local=2, rest=6)
NORMS = "computes norms over all ranks"
REFUSED = {
    "sum, tape": (of(step="tape", reduction="sum"), "is a sum, and hvd.DistributedGradientTape"),
    "slots": (of(multi=True, distributed="shard_state"), "not possible for MultiOptimizer"),
    "table, tape": (of(**TABLE, step="tape", option="clipnorm"), NORMS),
    "table, several": (of(**TABLE, multi=True, option="global_clipnorm"), NORMS),
    "own layer, tape": (of(**OWN, step="tape", option="global_clipnorm"), NORMS),
    "own layer, several": (of(**OWN, multi=True, option="global_clipnorm"), NORMS),
    "slots, elastic": (
        of(optimizer="Adam", distributed="shard_state", restart="elastic"),
        "those of rank 0",
    ),
    "own layer, fewer": (of(**OWN, restart="fewer"), "differs between the 2 ranks"),
    "whole": (of(**TABLE, optimizer="Muon", step="second"), "computes with whole variables"),
    "averages": (
        of(callbacks=["swap_ema"], option="use_ema", distributed="shard_state"),
        "needs all moving averages",
    ),
}


def test_what_is_refused() -> None:
    specs = {name: spec for name, (spec, _) in REFUSED.items()}
    assert all(draw.legal(spec) != spec for spec in specs.values())
    with run.ended([2], specs, "ranks") as (job,):
        for name, (_, text) in REFUSED.items():
            for seen in job.seen(name):
                assert not seen or text in str(seen["error"]), (name, seen)
            assert any(job.seen(name))
