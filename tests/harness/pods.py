"""Pods in one machine: what Kubernetes and Kubeflow's operators make of our manifests.

Each pod is one of tests.harness.hosts with the pod's name. It runs the command of its container, in
its folder, with its environment and its volumes, and with what the operator adds: the key of the
job, the list of hosts, variables. What is not simulated: images (it has this machine's files),
users (all are root), limits of resources, and security contexts.

    with mpijob(manifest, folder) as pods:
        pods.start_workers()
        done = pods.launch()
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from tests.harness.hosts import Hosts
from tests.harness.launcher import LIMIT

ROOT = pathlib.Path(__file__).parents[2]

# A container's /etc, /home and /opt are its own. In place of the image's files come this
# repository's: the environment that we run in, as /opt/hvd, and what deploy/Dockerfile copies.
_IMAGE = """\
set -e
mount -t tmpfs tmpfs /opt
ln -s {prefix} /opt/hvd
mount -t tmpfs tmpfs /home
mkdir -p /home/hvd /home/etc /home/work
mount -t overlay overlay -o lowerdir=/etc,upperdir=/home/etc,workdir=/home/work /etc
cp {hosts} /etc/hosts
cp {root}/deploy/image/ssh_config /etc/ssh/ssh_config.d/hvd_keras.conf
cp {root}/deploy/image/hvd-sshd /opt/
sed -i 's,^root:.*,root:x:0:0::/home/hvd:/bin/sh,' /etc/passwd
"""


class Pods:
    """The pods of a job; `launcher` is a container's spec, as `workers` are, by the pod's name."""

    def __init__(
        self,
        hosts: Hosts,
        folder: pathlib.Path,
        launcher: tuple[str, Mapping[str, Any]],
        workers: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.hosts = {host.name: host for host in hosts}
        self.claims = folder
        self._launcher, self._pods = launcher, {**dict([launcher]), **workers}
        self._workers = workers
        self._sshd: dict[str, subprocess.Popen[Any]] = {}

    def prepare(self, files: Mapping[str, str], hostfile: str, slots: int) -> None:
        """Mount the volumes, and put there what the operator does."""
        for name, pod in self._pods.items():
            host = self.hosts[name]
            image = _IMAGE.format(prefix=sys.prefix, hosts=host.folder.parent / "hosts", root=ROOT)
            text = [image, *_mounts(pod, self.claims)]
            text.append("mkdir -p /etc/mpi /home/hvd/.ssh")
            for path, content in {**files, "/etc/mpi/hostfile": hostfile}.items():
                text.append(f"printf %s {shlex.quote(content)} > {path}; chmod 600 {path}")
            # As Secrets are.
            text.append("mount --bind /home/hvd/.ssh /home/hvd/.ssh")
            text.append("mount -o remount,bind,ro /home/hvd/.ssh")
            done = host.run(["sh", "-c", "\n".join(text)])
            assert done.returncode == 0, done.stderr
        # What both operators add to the launcher.
        self._variables = {
            "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "OMPI_MCA_orte_set_default_slots": str(slots),
            "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        }

    def _start(self, name: str, settings: Mapping[str, str], **options: Any) -> Any:
        container = self._pods[name]["containers"][0]
        environment = {"PATH": f"/opt/hvd/bin:/opt:{os.environ['PATH']}", "HOME": "/home/hvd"}
        # So that jobs start faster, and as many threads as in other tests.
        for variable in ("PYTHONPATH", "TF_CPP_MIN_LOG_LEVEL"):
            environment[variable] = os.environ.get(variable, "")
        environment |= {entry["name"]: entry["value"] for entry in container.get("env", [])}
        command = [*container["command"], *container.get("args", [])]
        # A shell finds the program by the container's PATH, in its folder.
        command = ["sh", "-c", 'cd "$0" && exec "$@"', container["workingDir"], *command]
        return self.hosts[name].start(command, env=environment | settings, cwd="/", **options)

    def start_worker(self, name: str) -> None:
        """Run a worker's container, whose output goes to a file."""
        with (self.hosts[name].folder / "log").open("ab") as log:
            self._sshd[name] = self._start(name, {}, stdout=log, stderr=log)

    def start_workers(self) -> None:
        """Run all workers' containers."""
        for name in self._workers:
            self.start_worker(name)

    def kill_worker(self, name: str) -> None:
        """Kill all of a worker's container, as the kernel does when it is out of memory."""
        for pid, line in self.hosts[name].all().items():
            if line.startswith("sleep 1000"):
                continue  # a host's, not a pod's
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self._sshd[name].wait(timeout=LIMIT)

    def launch(self, **settings: str) -> subprocess.Popen[str]:
        """Start the launcher's container; stdout and stderr are one pipe of text."""
        return self._start(
            self._launcher[0],
            self._variables | settings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def left(self) -> list[str]:
        """What is left of the job when the launcher has ended, besides the workers' sshd."""
        found = []
        for name, host in self.hosts.items():
            found += [f"{name}: {line}" for line in host.processes().values()]
            memory = pathlib.Path(f"/proc/{host.pid}/root/dev/shm")
            found += [f"{name}: {path.name}" for path in memory.iterdir()]
        return [line for line in found if "hvd-sshd" not in line and "sshd -D" not in line]


def _mounts(pod: Mapping[str, Any], claims: pathlib.Path) -> Iterator[str]:
    """Shell commands that mount a pod's volumes where its container wants them."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for mount in pod["containers"][0]["volumeMounts"]:
        path, volume = shlex.quote(mount["mountPath"]), volumes[mount["name"]]
        yield f"mkdir -p {path}"
        if "persistentVolumeClaim" in volume:
            folder = claims / volume["persistentVolumeClaim"]["claimName"]
            folder.mkdir(exist_ok=True)
            yield f"mount --bind {folder} {path}"
        elif volume["emptyDir"].get("medium") == "Memory":
            size = volume["emptyDir"]["sizeLimit"].removesuffix("i").lower()
            yield f"mount -t tmpfs -o size={size} tmpfs {path}"
        else:
            raise AssertionError(f"{volume} is not simulated")


def _keys(folder: pathlib.Path) -> dict[str, str]:
    """A key for the job, under the names that both operators give it."""
    make = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-C", "", "-f"]
    subprocess.run([*make, str(folder / "key")], check=True)
    private, public = (folder / "key").read_text(), (folder / "key.pub").read_text()
    place = "/home/hvd/.ssh"
    return {
        f"{place}/id_rsa": private,
        f"{place}/id_rsa.pub": public,
        f"{place}/authorized_keys": public,
    }


@contextlib.contextmanager
def mpijob(job: Mapping[str, Any], folder: pathlib.Path) -> Iterator[Pods]:
    """The pods of an MPIJob in the namespace "default"."""
    name, spec = job["metadata"]["name"], job["spec"]
    assert spec["sshAuthMountPath"] == "/home/hvd/.ssh"
    launcher, worker = (spec["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    domain = f"{name}.default.svc"
    workers = [f"{name}-worker-{number}" for number in range(worker["replicas"])]
    slots = spec["slotsPerWorker"]
    hostfile = "".join(f"{pod}.{domain} slots={slots}\n" for pod in workers)
    pods = dict.fromkeys(workers, worker["template"]["spec"])
    first = (f"{name}-launcher", launcher["template"]["spec"])
    with _pods(folder, first, pods, domain) as made:
        made.prepare(_keys(folder), hostfile, slots)
        yield made


@contextlib.contextmanager
def trainjob(
    runtime: Mapping[str, Any], job: Mapping[str, Any], folder: pathlib.Path
) -> Iterator[Pods]:
    """The pods of a TrainJob with this runtime."""
    name, policy = job["metadata"]["name"], runtime["spec"]["mlPolicy"]["mpi"]
    assert policy["sshAuthMountPath"] == "/home/hvd/.ssh"
    assert policy["runLauncherAsNode"]
    jobs = {job["name"]: job for job in runtime["spec"]["template"]["spec"]["replicatedJobs"]}
    specs = {name: job["template"]["spec"]["template"]["spec"] for name, job in jobs.items()}
    # The job's command and arguments are the launcher's.
    container = specs["launcher"]["containers"][0] | {
        key: job["spec"]["trainer"][key]
        for key in ("command", "args")
        if key in job["spec"]["trainer"]
    }
    launcher = specs["launcher"] | {"containers": [container]}
    count = max(job["spec"]["trainer"]["numNodes"] - 1, 1)
    nodes = {f"{name}-node-0-{number}": specs["node"] for number in range(count)}
    slots = policy["numProcPerNode"]
    first = f"{name}-launcher-0-0"
    hostfile = "".join(f"{pod}.{name} slots={slots}\n" for pod in (first, *nodes))
    with _pods(folder, (first, launcher), nodes, name) as made:
        made.prepare(_keys(folder), hostfile, slots)
        yield made


@contextlib.contextmanager
def _pods(
    folder: pathlib.Path,
    launcher: tuple[str, Mapping[str, Any]],
    workers: Mapping[str, Mapping[str, Any]],
    domain: str,
) -> Iterator[Pods]:
    with Hosts(0, names=[launcher[0], *workers]) as hosts:
        table = hosts[0].folder.parent / "hosts"
        lines = [f"{host.address} {host.name}.{domain} {host.name}\n" for host in hosts]
        table.write_text("127.0.0.1 localhost\n" + "".join(lines))
        yield Pods(hosts, folder, launcher, workers)
