"""That no event, wait, stream, group, buffer or offset of the code for GPUs escapes mutants.py."""

from tests.gpu import mutants


def test_each_place_is_in_a_mutant() -> None:
    sites = mutants.sites()
    assert {sort for sort, _, _ in sites} == set(mutants.SITES)
    assert [where for _, where, inside in sites if not inside] == []
