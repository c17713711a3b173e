"""Proves two protocols by machine: see docs/protocol.md.

That of a host's ranks, over a model of C++ atomics, and the agreement, by a model whose
negotiations decide() must decide alike.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
MODEL = ROOT / "native" / "tests" / "prove" / "agreement.pml"
# Of the installation: the core need not be compiled again.
BUILD = next(ROOT.glob("build/py3-*/CMakeCache.txt")).parent
# What Debian's packages install.
NEEDED = {"relacy-dev": pathlib.Path("/usr/include/relacy"), "spin": pathlib.Path("/usr/bin/spin")}


def tool(name: str) -> str:
    """Returns the path of a build tool, preferably this environment's."""
    return shutil.which(name, path=pathlib.Path(sys.executable).parent) or name


def build(*targets: str) -> None:
    """Compiles programs of native/tests."""
    subprocess.run(
        [tool("cmake"), "-DHVD_BUILD_TESTS=ON", "-UHVD_RELACY", str(BUILD)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    ninja = [tool("ninja"), "-C", str(BUILD), "--quiet", "-j", str(os.cpu_count())]
    subprocess.run([*ninja, *targets], check=True)


def prove_shared_memory(preemptions: int) -> None:
    """Runs random executions and, on two ranks, all with at most so many preemptions."""
    subprocess.run([str(BUILD / "tests" / "prove_test"), str(preemptions)], check=True)


def prove_agreement(ranks: int) -> None:
    """Checks all interleavings of so many ranks, and each negotiation in them against decide()."""
    folder = BUILD / f"agreement-{ranks}"
    folder.mkdir(exist_ok=True)
    subprocess.run(["spin", f"-DN={ranks}", "-a", str(MODEL)], cwd=folder, check=True)
    compiler = ["gcc", "-O2", "-w", "-DSAFETY", "-DPRINTF", "-DMEMLIM=4096", "-o", "pan", "pan.c"]
    subprocess.run(compiler, cwd=folder, check=True)
    with (folder / "found").open("w+") as found:
        subprocess.run(["./pan", "-m10000"], cwd=folder, check=True, stdout=found)
        found.seek(0)
        summary = [line for line in found if not line.startswith("negotiation")]
        text = "".join(summary)
        if "errors: 0\n" not in text or "not completed" in text:
            sys.exit(f"FAILED the agreement of {ranks} ranks, in {folder}:\n{text}")
        states = next(line.split()[0] for line in summary if "states, stored" in line)
        print(f"ok     the agreement of {ranks} ranks: all {states} states", flush=True)
        found.seek(0)
        subprocess.run([str(BUILD / "tests" / "replay_test")], check=True, stdin=found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preemptions", type=int, default=1, help="0: only what takes seconds")
    preemptions = parser.parse_args().preemptions
    lacking = [package for package, path in NEEDED.items() if not path.exists()]
    if lacking:
        sys.exit(f"NOT PROVEN: install Debian's {' and '.join(lacking)} first.")
    build("prove_test", "replay_test")
    for ranks in (2, 3) if preemptions else (2,):
        prove_agreement(ranks)
    prove_shared_memory(preemptions)
    print("All is proven.")


if __name__ == "__main__":
    main()
