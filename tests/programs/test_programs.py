"""Some random programs have the results of one process; ``make programs`` runs more.

What docs/tables/combinations.md refuses is an error on each rank.
"""

import pytest

from tests.programs import draw, run

SEEDS = (121, 372, 514, 751, 906, 948, 1245, 1273, 1341)
# What those do not have.
MORE = {
    "xla": {
        **{"mode": "xla", "optimizer": "AdamW", "option": "global_clipnorm"},
        **{"accumulation": 2, "at_once": 3},
        **{"inputs": "dict", "outputs": "dict", "loss": "huber", "then": ["freeze"]},
        **{"data": "local", "rest": 6, "validation": "local", "reduction": "sum"},
    },
    "lstm": {
        **{"body": "lstm", "loss": "categorical", "optimizer": "Adagrad", "option": "clipvalue"},
        **{"data": "rows", "order": "hvd", "weights": "sample", "metrics": "weighted"},
        **{"validation": "padded", "mode": "graph", "callbacks": ["evaluates"]},
    },
    # A fit, and what it saves, goes on within an accumulation.
    "mask": {
        **{"body": "masked", "data": "rows", "weights": "sample", "validation": "rows"},
        **{"optimizer": "RMSprop", "option": "ema_overwrites"},
        **{"accumulation": 2, "epochs": 1, "then": ["fit", "evaluate", "save"]},
    },
}


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_programs(ranks: int) -> None:
    """Each program runs on one number of ranks here, and on both by ``make programs``."""
    specs = {str(seed): draw.draw(seed) for seed in SEEDS} | MORE
    assert all(draw.legal(spec) == spec for spec in MORE.values())
    mine = dict([*specs.items()][ranks % 2 :: 2])
    # None differs, and none fails alone or differs from itself, which would prove nothing.
    assert run.run(mine, (ranks,)) == ({}, {})


TABLE = {"body": "embedding", "table": "divided"}
OWN = {"local": 2, "rest": 6}
NORMS = "computes norms over all ranks"
REFUSED = {
    "slots": ({"multi": True, "distributed": "shard_state"}, "not possible for MultiOptimizer"),
    "table, tape": ({**TABLE, "step": "tape", "option": "clipnorm"}, NORMS),
    "table, several": ({**TABLE, "multi": True, "option": "global_clipnorm"}, NORMS),
    "own layer, tape": ({**OWN, "step": "tape", "option": "global_clipnorm"}, NORMS),
    "own layer, several": ({**OWN, "multi": True, "option": "global_clipnorm"}, NORMS),
    "own layer, fewer": ({**OWN, "restart": "fewer"}, "differs between the 2 ranks"),
    "whole": ({**TABLE, "optimizer": "Muon", "step": "second"}, "computes with whole variables"),
    "averages": (
        {"callbacks": ["swap_ema"], "option": "use_ema", "distributed": "shard_state"},
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
