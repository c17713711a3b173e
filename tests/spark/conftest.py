"""A cluster of Spark on this host for all tests, which are skipped without pyspark or Java."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.standalone import SETTINGS, environment, missing


def session(master: str, **settings: str) -> Any:
    """A session of Spark."""
    from pyspark.sql import SparkSession

    os.environ |= environment()
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
