"""Proves the protocol of a host's ranks over a model of atomics: native/tests/prove.

With --preemptions N, also all executions on two ranks with at most N preemptions.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
# Of the installation: the core need not be compiled again.
BUILD = next(ROOT.glob("build/py3-*/CMakeCache.txt")).parent
# What Debian's packages install.
NEEDED = {"relacy-dev": pathlib.Path("/usr/include/relacy/relacy.hpp")}


def tool(name: str) -> str:
    """Returns the path of a build tool, preferably this environment's."""
    beside = pathlib.Path(sys.executable).parent
    return shutil.which(name, path=beside) or name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preemptions", type=int, default=1)
    arguments = parser.parse_args()
    lacking = [package for package, path in NEEDED.items() if not path.exists()]
    if lacking:
        sys.exit(f"NOT PROVEN: needs Debian's {', '.join(lacking)}: apt-get install it first.")
    subprocess.run(
        [tool("cmake"), "-DHVD_BUILD_TESTS=ON", "-UHVD_RELACY", str(BUILD)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    jobs = str(os.cpu_count())
    subprocess.run(
        [tool("ninja"), "-C", str(BUILD), "--quiet", "-j", jobs, "prove_test"], check=True
    )
    subprocess.run([str(BUILD / "tests" / "prove_test"), str(arguments.preemptions)], check=True)
    print("All is proven.")


if __name__ == "__main__":
    main()
