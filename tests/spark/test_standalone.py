"""hvd.spark on a standalone cluster: faults, what encrypts, and what a driver may do meanwhile."""

import os
import pathlib
import signal
import subprocess

import pytest

from tests.harness.launcher import LIMIT, wait_until
from tests.harness.standalone import Standalone, missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

# Each rank notes that it has started, and waits for ever.
WAIT = """
def wait(folder):
    number = os.environ["OMPI_COMM_WORLD_RANK"]
    pathlib.Path(folder, f"new-{number}").touch()
    os.rename(f"{folder}/new-{number}", f"{folder}/up-{number}")
    time.sleep(100000)
"""


@pytest.fixture
def cluster(tmp_path: pathlib.Path, request: pytest.FixtureRequest):
    with Standalone(tmp_path, getattr(request, "param", {})) as started:
        yield started


def started(cluster: Standalone, driver: subprocess.Popen[str], condition) -> None:
    """Wait for the condition, or raise if the driver ends before."""
    wait_until(lambda: condition() or driver.poll() is not None, "the start of all ranks")
    assert driver.poll() is None, (cluster.folder / "errors").read_text()[-5000:]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_its_driver(cluster: Standalone, number: signal.Signals) -> None:
    script = f"{WAIT}\nhvd.spark.run(wait, (os.getcwd(),), num_proc=2)\n"
    with cluster.start(script) as driver:
        try:
            started(cluster, driver, lambda: len(list(cluster.folder.glob("up-*"))) == 2)
            # As Ctrl-C in a terminal; what kills a driver need not kill its JVM.
            (os.killpg if number == signal.SIGINT else os.kill)(driver.pid, number)
            assert driver.wait(LIMIT) != 0
        finally:
            driver.kill()
    cluster.await_end()


def keys(folder: pathlib.Path) -> dict[str, str]:
    """Settings for TLS with a key of our own."""
    path, password = str(folder / "keys"), "password"
    command = ["keytool", "-genkeypair", "-alias", "key", "-keyalg", "RSA", "-dname", "CN=test"]
    command += ["-keystore", path, "-storepass", password, "-storetype", "PKCS12"]
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT)
    names = {"keyStore": path, "keyStorePassword": password, "keyStoreType": "PKCS12"}
    names |= {"keyPassword": password, "enabled": "true"}
    names |= {"trustStore": path, "trustStorePassword": password, "trustStoreType": "PKCS12"}
    return {f"spark.ssl.rpc.{name}": value for name, value in names.items()}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"spark.authenticate": "true", "spark.authenticate.secret": "secret"}, None),
        (
            {
                "spark.authenticate": "true",
                "spark.authenticate.secret": "secret",
                "spark.network.crypto.enabled": "true",
                "spark.io.encryption.enabled": "true",
            },
            "spark.network.crypto.enabled encrypts what Spark sends, but MPI sends gradients "
            "unencrypted, and rank 0's output travels so, too; spark.io.encryption.enabled "
            "encrypts what Spark writes, but",
        ),
        ("keys", "spark.ssl.rpc.enabled encrypts what Spark sends, but MPI"),
    ],
)
def test_encryption(tmp_path: pathlib.Path, settings, reason: str | None) -> None:
    """The cluster is set up so; what it would encrypt needs the user's consent."""
    script = """
def name(number):
    import hvd_keras as hvd

    hvd.init()
    return hvd.rank() * number, sorted(hvd.allgather_object(number + hvd.rank()))

for allowed in (False, True):
    try:
        print(hvd.spark.run(name, (10,), num_proc=2, allow_unencrypted=allowed))
    except ValueError as error:
        print(error)
"""
    found = keys(tmp_path) if settings == "keys" else settings
    with Standalone(tmp_path, found) as cluster:
        refused, results = cluster.run(script)
        assert results == "[(0, [10, 11]), (10, [10, 11])]"
        if reason is None:
            assert refused == results
        else:
            assert refused.startswith(f"hvd.spark.run: {reason}")
            assert refused.endswith("allow_unencrypted=True")
        cluster.await_end()


def test_a_cancelled_group_and_a_stopped_context(cluster: Standalone) -> None:
    script = f"""
{WAIT}
def call(action=None):
    def act():
        while len(list(pathlib.Path().glob("up-*"))) < 2:
            time.sleep(0.1)
        action()
    thread = threading.Thread(target=act, daemon=True)
    if action:
        thread.start()
    try:
        hvd.spark.run(wait, (os.getcwd(),), num_proc=2)
    except (RuntimeError, ValueError) as error:
        print(type(error).__name__, str(error).splitlines()[0])
    if action:
        thread.join()
    for path in pathlib.Path().glob("up-*"):
        path.unlink()

context.setJobGroup("mine", "")
call(lambda: context.cancelJobGroup("mine"))
call(context.stop)
call()
"""
    cancelled, stopped, refused = cluster.run(script)
    assert cancelled == "RuntimeError hvd.spark.run: the Spark job was cancelled"
    assert stopped == "RuntimeError hvd.spark.run: the SparkContext was stopped"
    assert refused.startswith("ValueError hvd.spark.run: no SparkContext is active")
    cluster.await_end()


def test_executors_with_other_software(cluster: Standalone) -> None:
    other = cluster.folder / "other" / "cloudpickle-0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: cloudpickle\nVersion: 0.1\n")
    script = f"""
def call():
    try:
        hvd.spark.run(len, num_proc=2)
    except ValueError as error:
        print(str(error).splitlines()[0])

os.environ["PYSPARK_PYTHON"] = sys._base_executable
context.stop()
session = SparkSession.builder.getOrCreate()
call()
session.stop()
os.environ["PYSPARK_PYTHON"] = sys.executable
SparkSession.builder.config("spark.executorEnv.PYTHONPATH", "{other.parent}").getOrCreate()
call()
"""
    absent, differs = cluster.run(script)
    start = "hvd.spark.run: an executor cannot load the call: ModuleNotFoundError: No module"
    assert absent.startswith(start)
    assert differs.startswith("hvd.spark.run: ")
    assert "(task 0) has cloudpickle 0.1; expected " in differs
    cluster.await_end()
