"""Some random programs have the results of one process; ``make programs`` runs more."""

from tests.programs import draw, run

SEEDS = (1, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14)


def test_random_programs() -> None:
    specs = {str(seed): draw.draw(seed) for seed in SEEDS}
    # Also those that fail alone, or differ from themselves: they would show nothing.
    assert run.judged(specs, (2, 3), "ranks") == {}
