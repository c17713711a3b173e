"""ssh in batch mode, with keep-alives."""

from __future__ import annotations

from hvd_keras.launch.onhost.limits import ALIVE_COUNT, ALIVE_INTERVAL, CONNECT_TIMEOUT
from hvd_keras.launch.start.remote_shell import RemoteShell


def ssh(port: int | None, identity: str | None) -> RemoteShell:
    """ssh with the user's options; None leaves the choice to ssh's configuration."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(CONNECT_TIMEOUT),
        "ServerAliveInterval": str(ALIVE_INTERVAL),
        "ServerAliveCountMax": str(ALIVE_COUNT),
        # An existing master is used, but none of ours: another shell would end with the job.
        "ControlMaster": "no",
    }
    words = ["ssh", "-x"]
    for name, value in options.items():
        words += ["-o", f"{name}={value}"]
    if port is not None:
        words += ["-p", str(port)]
    if identity is not None:
        words += ["-i", identity]
    advice = " without a prompt (a key without a passphrase or in an agent, a known host)"
    return RemoteShell(words, advice)
