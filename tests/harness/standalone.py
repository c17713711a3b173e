"""A standalone cluster of Spark on this host: a master, and two workers with one core each.

Drivers run in processes of their own, because a process has one JVM with one configuration.

    with Standalone(folder, {"spark.authenticate": "true"}) as cluster:
        driver = cluster.start("print(context.master)")
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

from hvd_keras.launch.onhost.process import die_with_parent
from tests.harness.launcher import LIMIT, having, wait_until

# The compiler and the collector that start fastest.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"

SETTINGS = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}

# In the environment of all processes of a cluster and its drivers.
NAME = "HVD_TEST_STANDALONE"

_START = """\
import os, pathlib, signal, sys, threading, time
from pyspark.sql import SparkSession
import hvd_keras as hvd
context = SparkSession.builder.getOrCreate().sparkContext
context.setLogLevel("OFF")
"""


def missing() -> str | None:
    """Why no Spark can be started here, or None."""
    for package in ("pyspark", "pyarrow"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return None if shutil.which("java") else "there is no java on PATH"


def environment() -> dict[str, str]:
    """Variables for Spark: its processes have the name "localhost" only."""
    return {
        "JAVA_TOOL_OPTIONS": JAVA_OPTIONS,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


class Standalone:
    """The cluster; its files are in the folder. Whatever it has started ends with the context."""

    def __init__(self, folder: pathlib.Path, settings: Mapping[str, str]) -> None:
        self.folder = folder
        self._services: list[subprocess.Popen[bytes]] = []
        with socket.create_server(("127.0.0.1", 0)) as opened:
            port = str(opened.getsockname()[1])
        self._master = f"spark://127.0.0.1:{port}"
        self._port = port
        configuration = folder / "conf"
        configuration.mkdir()
        lines = {"spark.master": self._master, **SETTINGS, **settings}
        text = "".join(f"{name} {value}\n" for name, value in lines.items())
        (configuration / "spark-defaults.conf").write_text(text)
        self.environment = os.environ | environment()
        self.environment |= {NAME: str(folder), "SPARK_CONF_DIR": str(configuration)}

    def __enter__(self) -> Standalone:
        try:
            self._serve("Master", "--host", "127.0.0.1", "--port", self._port)
            wait_until(self._listens, "the master")  # otherwise workers try again in 20 s
            for number in range(2):
                options = ["--host", "127.0.0.1", "--cores", "1", "--memory", "1g"]
                options += ["--work-dir", str(self.folder / f"work-{number}"), self._master]
                self._serve("Worker", *options)
            wait_until(self._is_complete, "both workers")  # a driver waits for a minute only
        except BaseException:
            self.__exit__()
            raise
        return self

    def _is_complete(self) -> bool:
        text = (self.folder / "services").read_text(errors="replace")
        return text.count("Successfully registered with master") == 2

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(self._port))) == 0

    def _serve(self, name: str, *options: str) -> None:
        import pyspark

        starter = pathlib.Path(pyspark.__file__).parent / "bin" / "spark-class"
        words = [str(starter), f"org.apache.spark.deploy.{name.lower()}.{name}"]
        maker = os.getpid()
        with (self.folder / "services").open("a") as log:
            self._services.append(
                subprocess.Popen(
                    [*words, "--webui-port", "0", *options],
                    env=self.environment | {"SPARK_DAEMON_MEMORY": "256m"},
                    stdout=log,
                    stderr=log,
                    preexec_fn=lambda: die_with_parent(maker),
                )
            )

    def __exit__(self, *_: object) -> None:
        for service in self._services:
            service.kill()
            service.wait()
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def start(self, script: str) -> subprocess.Popen[str]:
        """Start a driver with this script, in which `context` is the SparkContext."""
        path = self.folder / "driver.py"
        path.write_text(_START + script)
        with (self.folder / "errors").open("a") as errors:
            return subprocess.Popen(
                [sys.executable, str(path)],
                env=self.environment,
                cwd=self.folder,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def run(self, script: str) -> list[str]:
        """Run a driver to its end; returns its lines."""
        with self.start(script) as driver:
            try:
                out, _ = driver.communicate(timeout=LIMIT)
            except BaseException:
                os.killpg(driver.pid, signal.SIGKILL)
                raise
        assert driver.returncode == 0, (out, (self.folder / "errors").read_text()[-5000:])
        return out.splitlines()

    def processes(self) -> dict[int, str]:
        """Command lines of all processes of the cluster, except those of its services."""
        services = {service.pid for service in self._services}
        found = having(f"{NAME}={self.folder}\0")
        return {pid: line for pid, line in found.items() if pid not in services}

    def await_end(self) -> None:
        """Wait until nothing runs but the services."""
        wait_until(lambda: not self.processes(), "the end of all processes")
