"""A sample of docs/tables/combinations.md, whose cells measure.py measures."""

import pytest

import hvd_keras as hvd
from tests.parallel.features import measure, table

pytestmark = pytest.mark.ranks(2, 3)


@pytest.mark.cases(6)
@pytest.mark.parametrize("case", table.sample(hvd.size()), ids=str)
def test_features_in_combination(case: table.Case, directory) -> None:
    result, text = measure.outcome(case, directory)
    if "process set" in case.features and hvd.rank() == hvd.size() - 1:
        return  # this rank is beside the set
    assert result == table.expected(case), text
    rule = table.rule(case)
    assert rule is None or rule.text in text
