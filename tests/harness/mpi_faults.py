"""A library that lets calls of MPI fail, loaded before MPI itself."""

import pathlib
import re
import subprocess
import sysconfig

# Before MPI runs, after all is lost, or with HVD_ALLREDUCE=mpi alone.
WITHOUT_FAULTS = {"MPI_Abort", "MPI_Error_string", "MPI_Get_library_version", "MPI_Test"}

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
