"""`kubectl exec` into hosts of tests.harness.hosts.

There is no cluster here. A program `kubectl` hands its standard streams to `Api`, which stands in
for the way through Kubernetes: it runs the command in the host's namespaces, as a container's
runtime does, and the program ends as the real one does. Like it, nothing ends the command if the
program is killed. A pod that `Api.deleted` names is not found.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import sys
import threading

from tests.harness.hosts import Hosts

# kubectl exec [-n NAMESPACE] --stdin POD -- COMMAND
_PROGRAM = f"""\
#!{sys.executable} -IS
import json, socket, sys
arguments = sys.argv[1:]
options, command = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
verb, flag, namespace, stdin, pod = options
assert (verb, flag, namespace, stdin) == ("exec", "-n", "train", "--stdin"), options
with socket.socket(socket.AF_UNIX) as api:
    api.connect(__file__ + ".socket")
    socket.send_fds(api, [json.dumps([pod, *command]).encode()], [0, 1, 2])
    status = api.makefile().readline()
if status.strip() == "NotFound":
    sys.exit(f'Error from server (NotFound): pods "{{pod}}" not found')
if not status.strip():
    sys.exit("error: stream error: internal error")
if int(status):
    print("command terminated with exit code", int(status), file=sys.stderr)
sys.exit(int(status))
"""


class Api:
    """What runs commands in pods; `path` is the folder with the program."""

    def __init__(self, hosts: Hosts, folder: pathlib.Path) -> None:
        self._hosts = {host.name: host for host in hosts}
        self.path = folder
        self.deleted: set[str] = set()
        program = folder / "kubectl"
        program.write_text(_PROGRAM)
        program.chmod(0o755)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{program}.socket")
        self._listener.listen(100)

    def __enter__(self) -> Api:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            data, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
            pod, *command = json.loads(data)
            if pod not in self._hosts or pod in self.deleted:
                answer = "NotFound"
            else:
                environment = {"PATH": os.environ["PATH"], "HOME": "/root"}  # as runtimes set it
                files = dict(zip(("stdin", "stdout", "stderr"), streams, strict=True))
                process = self._hosts[pod].start(command, environment, cwd="/", **files)
                status = process.wait()
                answer = str(status if status >= 0 else 128 - status)
            for stream in streams:
                os.close(stream)
            with contextlib.suppress(OSError):  # the program was killed
                connection.sendall(f"{answer}\n".encode())
