"""That nothing of the code for GPUs escapes mutants.py and the faults of gpu_faults_test."""

import re

from tests.gpu import mutants

# They only turn an error into text, or come after a failure, or before there is anything to fail.
WITHOUT_FAULTS = {"cudaGetErrorString", "ncclGetErrorString", "ncclGetLastError"}
WITHOUT_FAULTS |= {"ncclCommAbort", "cudaRuntimeGetVersion"}


def test_each_place_is_in_a_mutant() -> None:
    sites = mutants.sites()
    assert {sort for sort, _, _ in sites} == set(mutants.SITES)
    assert [where for _, where, inside in sites if not inside] == []


def test_each_function_fails() -> None:
    core = mutants.ROOT / mutants.GPU
    called = (core / "cuda_api.h").read_text() + (core / "nccl_api.h").read_text()
    cases = (mutants.ROOT / "native" / "tests" / "gpu" / "gpu_faults_test.cc").read_text()
    functions = set(re.findall(r'library\["(\w+)"\]', called))
    failing = set(re.findall(r'\{"((?:cuda|nccl)\w+)", When::', cases))
    assert functions - failing == WITHOUT_FAULTS
