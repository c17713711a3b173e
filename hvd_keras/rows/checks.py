"""What the ranks compare before they read rows, on every backend of Keras."""

from collections.abc import Callable
from typing import Any

from hvd_keras.rows import MODES, Split, reading
from hvd_keras.rows.passes import Passes, Source
from hvd_keras.runtime import agree, log
from hvd_keras.runtime.keras import PyDataset, keras
from hvd_keras.runtime.process_sets import ProcessSet


def check_arguments(
    batch_size: int | None, seed: int, start_epoch: int, uneven: str | None
) -> None:
    """Raise ValueError if arguments of ``shard`` are impossible."""
    if min(seed, start_epoch) < 0:
        raise ValueError(f"{seed=}, {start_epoch=}, expected 0 or more.")
    if uneven not in (None, *MODES):
        raise ValueError(f"{uneven=}, expected one of {', '.join(map(repr, MODES))}.")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"{batch_size=}, expected 1 or more rows per rank and step.")


def check_source(
    rows: Source,
    given: str,
    split: Split,
    uneven: str | None,
    is_unshuffled: bool,
    process_set: ProcessSet,
) -> None:
    """Raise ValueError on all ranks if their sources or arguments (``given``) cannot be used."""
    description = f"{rows.length} rows of {rows.spec}, batch_size={rows.batch_size}, "
    description += f"{rows.description}, {given}"
    views = agree.gather_json("hvd.data.shard arguments", description, process_set)
    if len(set(views)) > 1:
        raise ValueError(
            "hvd.data.shard: the ranks have different sources or arguments: "
            f"{agree.by_rank(views, process_set)}. Give every rank the same whole source, in the "
            "same order (with the same seeds, the global one too), and apply random maps after "
            "shard(…). A dataset that shuffles itself has another order in each pass: look at its "
            "rows on all ranks, or on none. If each rank has its own files, use "
            "hvd.data.agree_on_steps."
        )
    if rows.steps == 0 or (rows.left_out and split.uneven == "error"):
        global_batch = split.size * rows.batch_size
        raise ValueError(
            f"hvd.data.shard: {rows.length} rows do not make whole steps of {global_batch} "
            f"({split.size} ranks with batch_size={rows.batch_size}), uneven={split.uneven!r}. Use "
            "another batch_size, uneven='share' (needs a row for each rank) or 'pad' (needs y)."
        )
    if rows.left_out and (uneven or split.uneven) != "trim" and is_unshuffled and not split.rank:
        log.logger.warning(
            "hvd.data.shard leaves out %s of %s rows, so that all %s ranks get the same number. "
            "uneven='pad' includes them, with sample weights.",
            *(rows.left_out, rows.length, split.size),
        )
    if split.uneven == "pad" and keras.utils.unpack_x_y_sample_weight(rows.spec)[1] is None:
        raise ValueError(
            "hvd.data.shard: uneven='pad' adds sample weights and so needs y, but the source has "
            f"only x: {rows.spec}. Use 'share' or 'trim'."
        )


def steps(
    source: Any, length: Callable[[Any], Any], kinds: str, uneven: str, process_set: ProcessSet
) -> int:
    """See ``hvd.data.agree_on_steps``; ``length`` returns that of sources of ``kinds``."""
    process_set.check_included("data.agree_on_steps")

    def look() -> int | None:
        if uneven not in ("trim", "error"):
            raise ValueError(f"{uneven=}, expected 'trim' or 'error'.")
        is_batches = isinstance(source, PyDataset)
        steps = reading.number_of_batches(source) if is_batches else length(source)
        try:
            return None if steps is None else int(steps)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"got {type(source).__name__}, expected a number of steps, {kinds} or a "
                "keras.utils.PyDataset."
            ) from error

    mine = agree.on_all_ranks("hvd.data.agree_on_steps", look, process_set)
    gathered = agree.gather_json("hvd.data.agree_on_steps numbers", mine, process_set)
    known = [steps for steps in gathered if steps is not None]
    if not known:
        problem = "no length is known. Pass numbers of steps (count the batches once)."
    elif min(known) < 1:
        problem = "a rank has no data. Use fewer ranks, or smaller files or batches."
    elif uneven == "error" and len(set(known)) > 1:
        problem = "the ranks' numbers of steps differ. uneven='trim' takes the least."
    else:
        return int(min(known))
    raise ValueError(
        f"hvd.data.agree_on_steps: {problem} By rank: {agree.by_rank(gathered, process_set)}."
    )


def check_passes(passes: list[Passes], process_set: ProcessSet) -> None:
    """Raise ValueError on all ranks if they have begun different numbers of shuffled passes."""
    begun = [one.begun for one in passes if one.source.is_shuffled]
    if not begun:
        return
    gathered = agree.gather_json("fit passes", begun, process_set)
    if any(theirs != gathered[0] for theirs in gathered):
        raise ValueError(
            "fit: the ranks have begun different numbers of passes over the shuffled data of "
            f"hvd.data.shard ({agree.by_rank(gathered, process_set)}), so their orders differ. "
            "Iterate over it on all ranks, or on none."
        )
