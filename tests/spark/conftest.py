"""A cluster of Spark on this host for all tests, which are skipped without pyspark or Java."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest

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


def missing() -> str | None:
    """Why no Spark can be started here, or None."""
    for package in ("pyspark", "pyarrow"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return None if shutil.which("java") else "there is no java on PATH"


def session(master: str, **settings: str) -> Any:
    """A session of Spark; its processes have the name "localhost" only."""
    from pyspark.sql import SparkSession

    os.environ |= {
        "JAVA_TOOL_OPTIONS": JAVA_OPTIONS,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    builder = SparkSession.builder.master(master)
    for name, value in (SETTINGS | settings).items():
        builder = builder.config(name, value)
    made = builder.getOrCreate()
    made.sparkContext.setLogLevel("OFF")
    return made


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """A cluster of two executors with one core each."""
    if reason := missing():
        pytest.skip(reason)
    made = session("local-cluster[2,1,1024]")
    yield made
    made.stop()
