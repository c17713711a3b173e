"""The manifests for Kubernetes: valid, equal to the chart's, and their pods train.

There is no cluster here. kubernetes-validate has the schemas of Kubernetes, kubeflow-trainer-api
the models of Trainer's objects; MPIJOB is the part of the MPIJob's definition that we use. The pods
are namespaces of this machine: see tests.harness.pods.
"""

import pathlib
import re
import shutil
import subprocess
from typing import Any

import pytest

from tests.harness import pods, restarting
from tests.harness.hosts import missing

yaml = pytest.importorskip("yaml")

FOLDER = pathlib.Path(__file__).parents[2] / "deploy" / "kubernetes"
CHART = FOLDER / "chart"

_ROLE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["template"],
    "properties": {
        "replicas": {"type": "integer"},
        "restartPolicy": {"enum": ["Never", "OnFailure"]},
        "template": {"type": "object"},
    },
}
MPIJOB = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "kubeflow.org/v2beta1"},
        "kind": {"const": "MPIJob"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["mpiReplicaSpecs"],
            "properties": {
                "slotsPerWorker": {"type": "integer"},
                "mpiImplementation": {"enum": ["OpenMPI", "Intel", "MPICH"]},
                "sshAuthMountPath": {"type": "string"},
                "launcherCreationPolicy": {"enum": ["AtStartup", "WaitForWorkersReady"]},
                "runLauncherAsWorker": {"type": "boolean"},
                "runPolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "cleanPodPolicy": {"enum": ["None", "Running", "All"]},
                        "ttlSecondsAfterFinished": {"type": "integer"},
                        "activeDeadlineSeconds": {"type": "integer"},
                        "backoffLimit": {"type": "integer"},
                        "suspend": {"type": "boolean"},
                    },
                },
                "mpiReplicaSpecs": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["Launcher"],
                    "properties": {"Launcher": _ROLE, "Worker": _ROLE},
                },
            },
        },
    },
}


def load(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def check(document: dict[str, Any]) -> None:
    """Raise if Kubernetes would not take this."""
    validate = pytest.importorskip("kubernetes_validate").validate
    jsonschema = pytest.importorskip("jsonschema")
    if document["kind"] != "MPIJob":
        validate(document, "1.31", strict=True)
        return
    jsonschema.validate(document, MPIJOB)
    for role, replica in document["spec"]["mpiReplicaSpecs"].items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role.lower()}}
        pod |= {"spec": replica["template"]["spec"]}
        pod["metadata"] |= replica["template"].get("metadata", {})
        validate(pod, "1.31", strict=True)
        # Kubernetes's standard "restricted", as far as it concerns us.
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        assert pod["spec"]["automountServiceAccountToken"] is False
        (container,) = pod["spec"]["containers"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("helm") or shutil.which("helm", path=FOLDER.parents[1] / "build/helm")
    if program is None:
        pytest.skip("helm is not installed")
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=60, cwd=FOLDER
    )


def rendered(*settings: str) -> list[dict[str, Any]]:
    values = [word for setting in settings for word in ("--set", setting)]
    done = helm("template", "train", str(CHART), *values)
    assert done.returncode == 0, done.stderr
    return load(done.stdout)


def test_the_mpijob_is_valid() -> None:
    (job,) = load((FOLDER / "mpijob.yaml").read_text())
    check(job)
    for path in (("runPolicies",), ("mpiReplicaSpecs", "Worker", "image")):
        wrong = load((FOLDER / "mpijob.yaml").read_text())[0]
        place = wrong["spec"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = "x"
        with pytest.raises(Exception, match=path[-1]):
            check(wrong)


def test_the_runtime_and_the_trainjob_are_valid() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    runtime, job = load((FOLDER / "trainer.yaml").read_text())
    # The models leave out what they do not know.
    known = models.TrainerV1alpha1ClusterTrainingRuntime.from_dict(runtime).to_dict()
    assert known == runtime
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (node, launcher) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    for template in (node, launcher):
        spec = template["template"]["spec"]["template"]["spec"]
        metadata = {"name": template["name"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        pytest.importorskip("kubernetes_validate").validate(pod, "1.31", strict=True)


def test_the_chart_is_the_mpijob() -> None:
    assert helm("lint", "--strict", str(CHART)).returncode == 0
    (job,) = load((FOLDER / "mpijob.yaml").read_text())
    assert rendered("storage.claim=train-data") == [job]


def test_the_charts_values_reach_the_pods() -> None:
    settings = ["workers=3", "ranksPerWorker=4", "gpus=true", "sharedMemory=8Gi", "minRanks=4"]
    settings += ["storage.claim=data", "storage.size=5Gi", "env.NAME=a b", "maxRestarts=7"]
    settings += ["options={--verbose,--stats}", "script=print(1)", "image=here/it:1"]
    settings += ["secretEnv.TOKEN.name=keys", "secretEnv.TOKEN.key=wandb", "launcherMemory=3Gi"]
    documents = {document["kind"]: document for document in rendered(*settings)}
    for document in documents.values():
        check(document)
    assert documents["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    assert documents["ConfigMap"]["data"] == {"train.py": "print(1)\n"}
    spec = documents["MPIJob"]["spec"]
    launcher, worker = (spec["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    assert (worker["replicas"], spec["slotsPerWorker"]) == (3, 4)
    for role in (launcher, worker):
        (container,) = role["template"]["spec"]["containers"]
        assert container["image"] == "here/it:1"
        secret = {"secretKeyRef": {"name": "keys", "key": "wandb"}}
        assert container["env"] == [
            {"name": "NAME", "value": "a b"},
            {"name": "TOKEN", "valueFrom": secret},
        ]
        volumes = {volume["name"]: volume for volume in role["template"]["spec"]["volumes"]}
        places = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        memory = places["/dev/shm"]["emptyDir"]
        assert memory == {"medium": "Memory", "sizeLimit": "8Gi"}
        assert places["/home/hvd/data"]["persistentVolumeClaim"]["claimName"] == "data"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    container = launcher["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["memory"] == "3Gi"
    line = " ".join(container["args"])
    assert "--max-restarts 7" in line
    assert line.endswith(
        "--min-np 4 --env NAME --env TOKEN --verbose --stats python /opt/job/train.py"
    )


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("workers=0", "workers"),
        ("worker=2", "worker"),
        ("memory=lots", "memory"),
        ("minRanks=3", "minRanks is 3; expected at most workers * ranksPerWorker, which is 2"),
        ("minRanks=1", "minRanks without storage.claim"),
        ("secretEnv.TOKEN.name=keys", "key"),
        ("storage.size=1Gi", "storage.size without storage.claim"),
    ],
)
def test_bad_values_are_refused(setting: str, text: str) -> None:
    done = helm("template", "train", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert text in done.stderr


SCRIPT = f"""\
import runpy, sys
sys.argv[1:] = ["checkpoints", "2", "0.05"]
runpy.run_path({restarting.__file__!r}, run_name="__main__")
"""


def digest(output: str) -> str:
    (found,) = re.findall(r"ends with (\w+)", output)
    return found


def wait_for(text: str, process: subprocess.Popen[str]) -> str:
    """Read a launcher's output up to a line with this text."""
    output = ""
    for line in process.stdout:
        output += line
        if text in line:
            return output
    raise AssertionError(f"no {text!r} in {output}")


def end(process: subprocess.Popen[str], job: pods.Pods) -> str:
    """The rest of the output of a launcher, which must end well and leave nothing behind."""
    output, _ = process.communicate(timeout=pods.LIMIT)
    assert process.returncode == 0, output
    assert job.left() == []
    return output


def folder(path: pathlib.Path, script: str) -> pathlib.Path:
    """Where the claims are; the claim train-data has train.py."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    (path / "train-data").mkdir(parents=True)
    (path / "train-data" / "train.py").write_text(script)
    return path


SUM = """\
import os, tensorflow as tf, hvd_keras as hvd
hvd.init()
total = int(hvd.allreduce(tf.constant(10 ** hvd.rank()), op=hvd.Sum))
print(f"sum {total} on {os.uname().nodename} in {os.getcwd()}", flush=True)
"""


def test_the_pods_start_a_job(tmp_path: pathlib.Path) -> None:
    """The launcher waits for the workers, which start after it."""
    (manifest,) = load((FOLDER / "mpijob.yaml").read_text())
    with pods.mpijob(manifest, folder(tmp_path, SUM)) as job:
        launcher = job.launch()
        told = wait_for("train-worker-1.train.default.svc cannot be reached by ", launcher)
        assert "--wait-for-hosts): train-worker-0.train.default.svc cannot be reached by " in told
        job.start_workers()
        output = end(launcher, job)
        for number in (0, 1):
            line = f"[{number}] sum 11 on train-worker-{number} in /home/hvd/data"
            assert line in output.splitlines(), output


@pytest.mark.slow
def test_the_pods_train_and_outlive_a_worker(tmp_path: pathlib.Path) -> None:
    """An MPIJob that loses a worker's container ends as an undisturbed TrainJob does."""
    runtime, trainjob = load((FOLDER / "trainer.yaml").read_text())
    with pods.trainjob(runtime, trainjob, folder(tmp_path / "trainjob", SCRIPT)) as job:
        job.start_workers()
        undisturbed = end(job.launch(), job)
        places = re.findall(r"begins with epoch 0 on (train-\S+)", undisturbed)
        assert sorted(places) == ["train-launcher-0-0", "train-node-0-0"]
    (manifest,) = load((FOLDER / "mpijob.yaml").read_text())
    with pods.mpijob(manifest, folder(tmp_path / "mpijob", SCRIPT)) as job:
        job.start_workers()
        launcher = job.launch()
        wait_for("epoch 0 batch 8", launcher)
        job.kill_worker("train-worker-1")
        told = wait_for("hvdrun: lost", launcher)
        assert "train-worker-1.train.default.svc with rank 1" in told.splitlines()[-1]
        job.start_worker("train-worker-1")
        output = end(launcher, job)
        assert "hvdrun: restart 1 of 3: 2 ranks on train-worker-0" in output
        assert "begins with epoch 0 on train-worker-1" in output
        assert digest(output) == digest(undisturbed)
