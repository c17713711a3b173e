"""Features in combination: N ranks train as one process does, or an error says why not.

tests/harness/features.py has the table; docs/combinations.md is written from it.
"""


import numpy as np
import pytest

import hvd_keras as hvd
from hvd_keras import agree
from tests.harness import crossing, features

pytestmark = pytest.mark.ranks(2, 3)
# float16 on the wire; and the moving averages of sums in another order.
TOLERANCE = {True: {"rtol": 2e-2, "atol": 4e-3}, False: {"rtol": 1e-3, "atol": 2e-5}}


@pytest.mark.parametrize("case", crossing.cases(hvd.size()))
def test_features_in_combination(case: crossing.Case, directory) -> None:
    of = hvd.global_process_set
    if "process set" in case.features:
        of = hvd.add_process_set(range(hvd.size() - 1))
    try:
        if of.included():
            run(case, of, directory)
    finally:
        hvd.barrier()
        if of is not hvd.global_process_set:
            hvd.remove_process_set(of)


def run(case: crossing.Case, of, directory) -> None:
    side = features.side_of(case.names, of)
    situation = features.SITUATIONS[case.situation]
    refusal = crossing.refusal(case.names)
    if refusal is not None:
        with pytest.raises((ValueError, RuntimeError), match=refusal.text):
            situation(side, directory)
        return
    found = situation(side, directory)
    alone = features.with_all_rows(side, of, alone=True)
    expected = None
    if of.rank() == 0:
        with hvd.local_fit():
            expected = situation(alone, directory)
    for name, value in found.items():
        views = (
            agree.gather_bytes(name, value.tobytes(), of) if "ranks" not in case.situation else []
        )
        assert len(set(views)) <= 1, f"{name} differs between the ranks"
    if expected is not None:
        assert found.keys() == expected.keys()
        tolerance = TOLERANCE["compression" in case.names]
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, err_msg=name, **tolerance)
