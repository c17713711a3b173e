"""Makes `kubectl exec` a program that is called as ssh is: `KUBECTL exec OPTION … HOST TEXT`.

The host is a pod, by its name, or by the name in DNS that begins with it.
"""

import os
import re
import subprocess
import sys

from . import FAILED
from .process import die_with_parent

# What kubectl says when it has run the command, and this has failed.
ENDED = re.compile(rb"command terminated with exit code \d+")


def main() -> int:
    """Run the text in the pod; returns its exit status."""
    *kubectl, host, text = sys.argv[1:]
    pod = host.partition(".")[0]
    owner, ended = os.getpid(), False
    with subprocess.Popen(
        [*kubectl, "--stdin", pod, "--", "/bin/sh", "-c", text],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: die_with_parent(owner),
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if ENDED.fullmatch(line.strip()):
                ended = True
            else:
                os.write(2, line)
    return process.returncode if ended or process.returncode == 0 else FAILED
