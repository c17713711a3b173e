"""Calls `kubectl exec` as ssh is called: `KUBECTL exec OPTION … HOST TEXT`.

The host is a pod, by its name, or by the name in DNS that begins with it.
"""

import os
import sys


def main() -> None:
    """Run the text in the pod."""
    *kubectl, host, text = sys.argv[1:]
    pod = host.partition(".")[0]
    os.execvp(kubectl[0], [*kubectl, "--stdin", pod, "--", "/bin/sh", "-c", text])
