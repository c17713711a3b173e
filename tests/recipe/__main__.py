"""Adds the toy collective to a copy of the sources, builds it and runs it. Takes minutes.

The copy is installed into an environment of symbolic links to everything in this one but hvd_keras.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile

from tests.recipe.steps import STEPS

ROOT = pathlib.Path(__file__).parents[2]
JOB = pathlib.Path(__file__).with_name("job.py")
SIZES = (2, 3)
BUILD_SECONDS, JOB_SECONDS = 1800, 300


def copy_sources(target: pathlib.Path) -> None:
    """Copies all files that git tracks, or would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def link_environment(target: pathlib.Path) -> None:
    """Makes a virtual environment that has everything of this one but hvd_keras."""
    own = pathlib.Path(sys.prefix)
    packages = pathlib.Path(sysconfig.get_path("purelib")).relative_to(own)
    # What pip writes into must be folders of the new environment, not links to those of this one.
    folders = [*reversed(packages.parents), packages, pathlib.Path("bin")]
    for folder in folders:
        (target / folder).mkdir(exist_ok=True)
    for folder in folders:
        for path in (own / folder).iterdir():
            linked = target / folder / path.name
            if "hvd" not in path.name and not linked.exists():
                linked.symlink_to(path)


def run(*command: str | pathlib.Path, timeout: float, **env: str) -> str:
    """Returns the output; ends this program with it if the command fails."""
    done = subprocess.run(
        command,
        cwd="/",
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}\nexit status {done.returncode}")
    return done.stdout


def main() -> None:
    """Everything."""
    with tempfile.TemporaryDirectory() as folder:
        sources, environment = pathlib.Path(folder, "sources"), pathlib.Path(folder, "environment")
        copy_sources(sources)
        for step in STEPS:
            step.apply(sources)
        link_environment(environment)
        python = environment / "bin" / "python"
        path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
        print("Building a copy of the sources with the collective 'shift'", flush=True)
        install = ["-m", "pip", "install", "-qq", "--no-build-isolation", "--no-deps"]
        run(python, *install, str(sources), timeout=BUILD_SECONDS, PATH=path)
        for size in SIZES:
            command = ["-m", "hvd_keras.hvdrun", "-np", str(size), "--oversubscribe"]
            output = run(python, *command, python, JOB, timeout=JOB_SECONDS, PATH=path)
            right = output.count("shift is right")
            if right != size:
                sys.exit(f"{output}\n{right} of {size} ranks said that it is right")
            print(f"{size} ranks: right", flush=True)


if __name__ == "__main__":
    main()
