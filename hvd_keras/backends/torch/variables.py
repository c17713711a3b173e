"""Broadcasts the variables of a training."""

from collections.abc import Iterable
from typing import Any

from hvd_keras.backends.torch.collectives import grouped_broadcast
from hvd_keras.gradients import missing_calls, specs
from hvd_keras.hooks.variables import give_each_rank_its_own_randomness
from hvd_keras.runtime.process_sets import ProcessSet, global_process_set


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Assign the root rank's values to the variables of every rank.

    The states of random generators get the root's seed mixed with the rank.

    Args:
        variables: Keras variables, in the same order on all ranks.
        root_rank: the rank of the job whose values all ranks get.
        process_set: the ranks that take part.

    Raises:
        ValueError: (on every rank) the ranks' variables differ, or ``root_rank`` is none of theirs.
    """
    process_set.check_included("broadcast_variables")
    variables = list(variables)
    if process_set.size() == 1:
        return
    if not variables:
        missing_calls.warn_of_empty_broadcast(process_set)
    specs.check_specs("broadcast", list(map(specs.spec_of, variables)), process_set)
    for number, bucket in enumerate(specs.in_buckets(variables)):
        values = [variable.value.detach() for variable in bucket]
        values = grouped_broadcast(values, root_rank, f"variables {number}", process_set)
        for variable, value in zip(bucket, values, strict=True):
            variable.assign(value)
        missing_calls.synchronized.add(*bucket)
    seeds = [v for v in variables if specs.common_path(v.path).endswith("seed_generator_state")]
    give_each_rank_its_own_randomness(seeds, process_set)
