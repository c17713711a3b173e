"""What a task of the barrier stage does. The first one runs hvdrun, the others wait for it.

Each holds a connection to the driver, over which it is granted its start and reports its end, so
that the driver sees which one was lost first, and no task of a stage that Spark repeats starts.
"""

import contextlib
import functools
import json
import socket
import sys
import traceback
from typing import Any

from hvd_keras import agents
from hvd_keras.agents.link import Link
from hvd_keras.launch.onhost.channel import ProtocolError

# Seconds to reach the driver.
CONNECT_TIMEOUT = 10.0

# What hvdrun prints before the lines of rank 0, whose progress the driver shows.
FIRST_RANK = "[0] "


def _show(link: Link, line: str, name: str) -> None:
    """Show the lines of rank 0 to the driver, and all lines in the executor's log."""
    print(line, end="", flush=True, file=sys.stderr)
    if line.startswith(FIRST_RANK):
        with contextlib.suppress(OSError):  # the driver is gone, and Spark ends the task
            link.send(line=line.removeprefix(FIRST_RANK), to=name)


def work(
    call: agents.Call, function: bytes, driver: tuple[str, int]
) -> list[list[bytes] | Exception]:
    """Take part in a call of a function that is pickled with its arguments.

    Returns the ranks' results in the first task, or why the call failed; nothing in the others.
    """
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    number = context.partitionId()
    try:
        connection = socket.create_connection(driver, CONNECT_TIMEOUT)
        link = Link(connection, call.secret, listens=False)
    except (OSError, ProtocolError) as error:
        raise RuntimeError(
            f"{socket.gethostname()} cannot connect to the driver at {driver[0]}: {error}; "
            "check that no firewall blocks its ports and that spark.driver.host is right"
        ) from error
    try:
        link.send(task=number, host=socket.gethostname())
        if link.receive() is None:
            raise RuntimeError("Spark has repeated the stage; its ranks are started once only")
        address = context.getTaskInfos()[number].address.rpartition(":")[0]
        with contextlib.closing(agents.Agent(call, address)) as agent:
            gathered = context.allGather(json.dumps(agent.facts()))
            places = [json.loads(text) for text in gathered]
            found = [] if number else [_lead(call, function, places, link)]
            context.barrier()
        link.send(done=True)
        return found
    except Exception:
        with contextlib.suppress(OSError):
            link.send(error=traceback.format_exc())
        raise
    finally:
        link.close()


def _lead(
    call: agents.Call, function: bytes, places: list[Any], link: Link
) -> list[bytes] | Exception:
    if problem := call.problem(places):
        return ValueError(f"{call.name}: {problem}")
    try:
        return call.start(function, places, show=functools.partial(_show, link))
    except (ValueError, RuntimeError) as error:  # not raised here: Spark would repeat the stage
        return error
