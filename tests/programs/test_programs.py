"""Some random programs have the results of one process; ``make programs`` runs more."""

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
