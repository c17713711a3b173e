"""What a task of the barrier stage does. The first one runs hvdrun, the others wait for it.

Each holds a connection to the driver, over which it is granted its start and reports its end, so
that the driver sees which one was lost first, and no task of a stage that Spark repeats starts.
"""

import contextlib
import json
import socket
import sys
import traceback
from dataclasses import dataclass
from typing import Any

from hvd_keras.launch import agents
from hvd_keras.launch.onhost.channel import Link, ProtocolError

# Seconds to reach the driver.
CONNECT_TIMEOUT = 10.0

# What hvdrun prints before the lines of rank 0, whose progress the driver shows.
FIRST_RANK = "[0] "


@dataclass(frozen=True)
class Call:
    """What the driver tells each task; it reaches them as Spark's own closures do.

    Attributes:
        function: the pickle of the function and its arguments.
        secret: with which the tasks and the driver prove to each other who they are.
        run: the name of the call and of its restarts.
        driver: the host and port on which the driver listens.
        versions: those of the driver, see ``agents.versions``.
        directory: that of the driver.
        cores: cores of each task.
        environment: variables for the ranks.
        options: of hvdrun.
    """

    function: bytes
    secret: str
    run: str
    driver: tuple[str, int]
    versions: dict[str, str]
    directory: str
    cores: int
    environment: dict[str, str]
    options: list[str]


class _Shown:
    """A file that shows the lines of rank 0 to the driver and all lines in the executor's log."""

    def __init__(self, link: Link, name: str) -> None:
        self._link, self._name = link, name

    def write(self, line: str) -> None:
        """Take a line."""
        sys.stderr.write(line)
        if line.startswith(FIRST_RANK):
            with contextlib.suppress(OSError):  # the driver is gone, and Spark ends the task
                self._link.send(line=line.removeprefix(FIRST_RANK), to=self._name)

    def flush(self) -> None:
        """Flush the executor's log."""
        sys.stderr.flush()


def work(call: Call) -> list[tuple[str, Any]]:
    """Take part in a call.

    Returns:
        In the first task what came of it: ("results", the ranks' pickles), ("refused", why) or
        ("failed", why). In the others nothing.

    Raises:
        RuntimeError: the driver cannot be reached, or does not grant the start.
        OSError: no agent can listen on the address that Spark has for this executor.
    """
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    number = context.partitionId()
    try:
        connection = socket.create_connection(call.driver, CONNECT_TIMEOUT)
        link = Link(connection, call.secret, listens=False)
    except (OSError, ProtocolError) as error:
        raise RuntimeError(
            f"{socket.gethostname()} cannot connect to the driver at {call.driver[0]}: {error}; "
            "check that no firewall blocks its ports and that spark.driver.host is right"
        ) from error
    try:
        link.send(task=number, host=socket.gethostname())
        if link.receive() is None:
            raise RuntimeError("Spark has repeated the stage; its ranks are started once only")
        address = context.getTaskInfos()[number].address.rpartition(":")[0]
        with agents.Agent(call.secret, call.run, address) as agent:
            facts = context.allGather(json.dumps(agent.facts(call.directory)))
            found = _lead(call, [json.loads(text) for text in facts], link) if not number else []
            context.barrier()
        link.send(done=True)
        return found
    except Exception:
        with contextlib.suppress(OSError):
            link.send(error=traceback.format_exc())
        raise
    finally:
        link.close()


def _lead(call: Call, places: list[dict[str, Any]], link: Link) -> list[tuple[str, Any]]:
    if problem := agents.difference(places, call.versions):
        return [("refused", problem)]
    try:
        results = agents.call(
            call.function,
            places,
            call.secret,
            call.run,
            name="hvd.spark.run",
            directory=call.directory,
            cores=call.cores,
            environment=call.environment,
            options=call.options,
            out=_Shown(link, "stdout"),
            err=_Shown(link, "stderr"),
        )
    except ValueError as error:
        return [("refused", str(error).removeprefix("hvd.spark.run: "))]
    except RuntimeError as error:
        return [("failed", str(error).removeprefix("hvd.spark.run: "))]
    return [("results", results)]
