"""Random collectives, valid and invalid, in random orders: each gives NumPy's result or an error.

All ranks draw the same examples. An example consists of a few cases; a case is one collective.
Without a fault all ranks make the same call; with one, a single rank differs in dtype, shape, op,
... More cases: ``--fuzz-cases N``.
"""

import concurrent.futures
import dataclasses
import itertools
import traceback
import zlib
from collections.abc import Collection

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

import hvd_keras as hvd
from hvd_keras.runtime import libraries

RANK, SIZE = hvd.rank(), hvd.size()
pytestmark = pytest.mark.ranks(1, 2, 3)
# Cases per example; with threads, this many requests are in flight at once.
CASES = 10

FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
REDUCE = {"Sum": np.sum, "Average": np.mean, "Min": np.min, "Max": np.max, "Product": np.prod}

ALL = tuple(range(SIZE))
SETS = sorted({ALL, ALL[1:], ALL[:1], (0, SIZE - 1) if SIZE > 1 else ALL} - {()})
# In what a single rank may differ from the others.
FAULTS = {
    "allreduce": ["dtype", "shape", "op", "factor", "tensors"],
    "reducescatter": ["dtype", "shape", "op", "factor", "tensors"],
    "allgather": ["dtype", "shape", "tensors"],
    "broadcast": ["dtype", "shape", "root"],
    "alltoall": ["dtype", "shape", "splits"],
    "barrier": [],
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One collective.

    ``rows`` are the first dimensions by rank, if they may differ; ``splits`` the rows from each
    rank to each. ``fault`` is in what the rank ``culprit`` differs from the others, or "".
    """

    kind: str
    members: tuple[int, ...]
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    op: str
    factor: float
    root: int
    rows: tuple[int, ...]
    splits: tuple[tuple[int, ...], ...]
    fault: str
    culprit: int
    salt: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(sorted(FAULTS)))
    members = draw(st.sampled_from([ALL] * len(SETS) + SETS))
    count = draw(st.integers(1, 3)) if kind in ("allreduce", "reducescatter", "allgather") else 1
    op = draw(st.sampled_from(["Sum", "Average"] if kind == "reducescatter" else sorted(REDUCE)))
    reduces = kind in ("allreduce", "reducescatter")
    allowed = FLOATS + INTEGERS if reduces else [*FLOATS, *INTEGERS, "bool"]
    dtypes = draw(st.tuples(*[st.sampled_from(FLOATS if op == "Average" else allowed)] * count))
    floating = all(dtype in FLOATS for dtype in dtypes)
    least = 0 if kind in ("allreduce", "broadcast") else 1
    small = st.lists(st.integers(0, 5), min_size=least, max_size=3).map(tuple)
    large = st.sampled_from([(70_000,), (300, 301)])
    shape = draw(st.one_of(*[small] * 9, large))
    faults = FAULTS[kind] if len(members) > 1 else [f for f in FAULTS[kind] if f == "splits"]
    if not floating:
        faults = [f for f in faults if f != "factor"]
    if kind == "reducescatter" and not floating:  # which has no average, and there is no third op
        faults = [f for f in faults if f != "op"]
    number = st.integers(0, 4)
    return Case(
        kind,
        members,
        dtypes,
        shape,
        op,
        factor=draw(st.sampled_from([1.0, 0.5, 2.0])) if floating and reduces else 1.0,
        root=draw(st.sampled_from(members)),
        rows=draw(st.tuples(*[number] * SIZE)),
        splits=draw(st.tuples(*[st.tuples(*[number] * SIZE)] * SIZE)),
        fault=draw(st.sampled_from(faults)) if faults and draw(st.integers(0, 3)) == 0 else "",
        culprit=draw(st.sampled_from(members)),
        salt=draw(st.integers(0, 9)),
    )


def splits_of(case: Case, rank: int) -> list[int]:
    return list(case.splits[rank][: len(case.members)])


def shape_of(case: Case, rank: int) -> tuple[int, ...]:
    if case.kind == "allgather":
        return (case.rows[rank], *case.shape[1:])
    if case.kind == "alltoall":
        return (sum(splits_of(case, rank)), *case.shape[1:])
    return case.shape


def tensor(case: Case, rank: int, i: int) -> np.ndarray:
    """Values from 1 to 3: sums, products and averages of few ranks are exact in every dtype."""
    shape = shape_of(case, rank)
    index = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    values = (index * 5 + rank * 2 + i + case.salt) % 3 + 1
    if case.op == "Average":
        values *= len(case.members)
    dtype = tf.as_dtype(case.dtypes[i]).as_numpy_dtype
    return (values > 2).astype(dtype) if case.dtypes[i] == "bool" else values.astype(dtype)


def call(case: Case, process_set: hvd.ProcessSet, name: str | None) -> list[tf.Tensor]:
    """Makes this rank's call; results are read later, since they have no values in a function."""
    fault = case.fault if case.culprit == RANK else ""
    tensors = [tf.constant(tensor(case, RANK, i)) for i in range(len(case.dtypes))]
    if fault == "dtype":
        tensors[-1] = tf.cast(
            tensors[-1], "float64" if tensors[-1].dtype == tf.float32 else "float32"
        )
    elif fault == "shape":
        tensors[-1] = tf.stack([tensors[-1]] * 2, -1)
    elif fault == "tensors":
        tensors.append(tensors[0])
    op = case.op
    if fault == "op":
        op = "Sum" if op != "Sum" else "Average" if case.kind == "reducescatter" else "Max"
    root = case.root
    if fault == "root":
        root = next(rank for rank in case.members if rank != root)
    common = {"name": name, "process_set": process_set}
    scaled = {
        "op": hvd.ReduceOp(op),
        "prescale_factor": case.factor * (3 if fault == "factor" else 1),
    }
    if case.kind == "allreduce":
        results = hvd.grouped_allreduce(tensors, **scaled, **common)
    elif case.kind == "reducescatter":
        results = hvd.grouped_reducescatter(tensors, **scaled, **common)
    elif case.kind == "allgather":
        results = hvd.grouped_allgather(tensors, **common)
    elif case.kind == "broadcast":
        results = [hvd.broadcast(tensors[0], root, **common)]
    elif case.kind == "alltoall":
        splits = splits_of(case, RANK)
        splits[0] += fault == "splits"
        results = hvd.alltoall(tensors[0], splits, **common)
    else:
        hvd.barrier(process_set=process_set)
        results = []
    return list(results)


def expected(case: Case, joined: Collection[int] = ()) -> list[np.ndarray]:
    """Computes the result with NumPy from the tensors of the members that have not joined."""
    place = case.members.index(RANK)
    if case.kind == "barrier":
        return []
    if case.kind == "alltoall":
        parts = [
            np.split(tensor(case, rank, 0), np.cumsum(splits_of(case, rank))[:-1])[place]
            for rank in case.members
        ]
        return [np.concatenate(parts), np.array([splits_of(case, r)[place] for r in case.members])]
    results = []
    for i in range(len(case.dtypes)):
        everyone = [tensor(case, rank, i) for rank in case.members if rank not in joined]
        if case.kind == "broadcast":
            results.append(tensor(case, case.root, i))
        elif case.kind == "allgather":
            results.append(np.concatenate(everyone))
        else:
            whole = REDUCE[case.op](np.stack(everyone).astype("float64") * case.factor, axis=0)
            if case.op == "Average":
                whole = whole * len(everyone) / len(case.members)
            whole = np.asarray(whole).astype(everyone[0].dtype)
            if case.kind == "reducescatter":
                whole = np.array_split(whole, len(case.members))[place]
            results.append(whole)
    return results


def check(case: Case, process_set: hvd.ProcessSet, name: str | None) -> None:
    """Runs one case on this rank and compares."""
    if case.fault:
        error = tf.errors.FailedPreconditionError
        if case.fault == "splits":
            error = tf.errors.InvalidArgumentError
        with pytest.raises(error) as raised:
            call(case, process_set, name)
        named = [case.culprit] if case.fault == "splits" else case.members
        for rank in named if len(case.members) > 1 else []:
            assert f"rank {rank}: " in str(raised.value)
        return
    assert_equal(call(case, process_set, name), expected(case))


def assert_equal(results: list[tf.Tensor], right: list[np.ndarray]) -> None:
    for one, other in zip((result.numpy() for result in results), right, strict=True):
        assert one.shape == other.shape
        np.testing.assert_array_equal(one, other)


def run_until_all_join(example: list[Case]) -> None:
    """Each rank joins after a different number of cases; the others' calls continue without it."""
    left = [(example[0].salt + 3 * rank) % CASES for rank in ALL]
    for i, case in enumerate(example):
        if i == left[RANK]:
            break
        case = dataclasses.replace(case, members=ALL, fault="")
        joined = [rank for rank in ALL if i >= left[rank]]
        if joined and (
            case.kind == "alltoall" or (case.kind == "broadcast" and case.root in joined)
        ):
            with pytest.raises(tf.errors.FailedPreconditionError, match="which has joined"):
                call(case, hvd.global_process_set, None)
        else:
            assert_equal(call(case, hvd.global_process_set, None), expected(case, joined))
    last = hvd.join()
    assert len(set(hvd.allgather([last]).numpy())) == 1


def test_random_collectives(request, capfd) -> None:
    process_sets = {
        members: hvd.global_process_set if len(members) == SIZE else hvd.add_process_set(members)
        for members in SETS
    }
    total = request.config.getoption("--fuzz-cases")
    examples = itertools.count()
    pool = concurrent.futures.ThreadPoolExecutor(CASES)

    def run(example: list[Case], mode: str) -> None:
        if mode == "joining":
            return run_until_all_join(example)
        mine = [(i, case) for i, case in enumerate(example) if RANK in case.members]
        if mode == "function":
            mine = [(i, dataclasses.replace(case, fault="")) for i, case in mine]

            @tf.function
            def together() -> list[list[tf.Tensor]]:
                return [call(case, process_sets[case.members], None) for _, case in mine]

            for _ in range(2):
                for (_, case), results in zip(mine, together(), strict=True):
                    assert_equal(results, expected(case))
            return
        if mode == "in order":
            for _, case in mine:
                check(case, process_sets[case.members], None)
            return
        # All at once, started in an order that differs by rank.
        order = np.random.default_rng([example[0].salt, RANK]).permutation(len(mine))
        under_way = [
            pool.submit(check, mine[k][1], process_sets[mine[k][1].members], f"case {mine[k][0]}")
            for k in order
        ]
        for one in under_way:
            one.result()

    @hypothesis.settings(
        max_examples=-(-total // CASES),
        derandomize=True,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(
        st.lists(cases(), min_size=CASES, max_size=CASES),
        st.sampled_from(["in order", "at once", "function", "joining"]),
    )
    def fuzz(example: list[Case], mode: str) -> None:
        next(examples)
        try:
            drawn = zlib.crc32(repr((example, mode)).encode())
            assert len(set(hvd.allgather([drawn]).numpy())) == 1, "the ranks drew other examples"
            run(example, mode)
        except BaseException:
            # Hypothesis would repeat the example on this rank alone, so end the whole job.
            with capfd.disabled():
                print(
                    f"\nrank {RANK} failed {mode} in {example}:\n{traceback.format_exc()}",
                    flush=True,
                )
            libraries.core().hvd_abort(1)

    with pool:
        fuzz()
    assert next(examples) * CASES >= total
