"""What hvdrun runs as its ssh where agents are: `TABLE HOST TEXT`.

The table is a file in JSON, readable by its owner alone: the agents' secret, and the port of the
agent of each host.
"""

import base64
import contextlib
import json
import os
import socket
import sys
import threading
from pathlib import Path

from hvd_keras.agents.link import Link
from hvd_keras.launch.onhost import FAILED
from hvd_keras.launch.onhost.channel import PIECE, ProtocolError
from hvd_keras.launch.onhost.limits import CONNECT_TIMEOUT


def _forward_input(link: Link) -> None:
    with contextlib.suppress(OSError):  # the agent has gone, which the main thread sees
        while data := os.read(0, PIECE):
            link.send(input=base64.b64encode(data).decode())
        link.send(input="")


def main() -> int:
    """Run the text on the host; returns its exit status."""
    table, host, text = sys.argv[1:4]
    agents = json.loads(Path(table).read_text())
    try:
        connection = socket.create_connection((host, agents["ports"][host]), CONNECT_TIMEOUT)
        link = Link(connection, agents["secret"], listens=False)
    except (OSError, ProtocolError, KeyError) as error:
        print(f"no agent answers: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    link.send(run=text)
    threading.Thread(target=_forward_input, args=(link,), daemon=True).start()
    while message := link.receive():
        if "status" in message:
            os._exit(message["status"])  # the other thread may wait for input
        os.write(message["output"], base64.b64decode(message["data"]))
    os.write(2, b"the agent has gone\n")
    os._exit(FAILED)
