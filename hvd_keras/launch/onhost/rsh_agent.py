"""What mpirun runs as its ssh: `rsh_agent.py MODE JOB SSH … -- [OPTION …] HOST COMMAND …`.

On the other host the command gets the job's number, by which it and all that it starts can be
found, and a folder for temporary files that goes with the job.
"""

import os
import shlex
import sys
from collections.abc import Sequence

# The options of ssh that take a value, which may be the next word.
WITH_VALUE = {f"-{letter}" for letter in "BbcDEeFIiJLlmOoPpQRSWw"}


def ssh_command(mode: str, job: str, ssh: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return the command of ssh; the mode "cleans" removes the job's files when it has ended."""
    # mpirun takes us for ssh and adds -x, which `ssh` has already, and the user's own options for
    # ssh, which hvdrun takes by --ssh-port and --ssh-identity-file.
    start = 0
    while arguments[start].startswith("-"):
        start += 1 + (arguments[start] in WITH_VALUE)
    host, *words = arguments[start:]
    # mpirun has quoted its words for the user's shell on the other host, which is $SHELL there.
    prepare = f't=${{TMPDIR:-/tmp}}; d=$t/hvdrun-{job}; mkdir -p "$t"; '
    # What another user has made there first is refused.
    prepare += 'mkdir -m 700 "$d" || { [ -O "$d" ] && [ ! -L "$d" ]; } || exit; '
    run = f'env HVDRUN_JOB={job} TMPDIR="$d" "${{SHELL:-/bin/sh}}" -c "$0"'
    if mode == "cleans":
        prepare += f'{run}; status=$?; rm -rf "$d" /dev/shm/hvdrun-{job}; exit $status'
    else:
        prepare += f"exec {run}"
    text = f"exec sh -c {shlex.quote(prepare)} {shlex.quote(' '.join(words))}"
    return [*ssh, host, text]


if __name__ == "__main__":
    own, theirs = sys.argv[1:], sys.argv[sys.argv.index("--") + 1 :]
    command = ssh_command(own[0], own[1], own[2 : own.index("--")], theirs)
    os.execvp(command[0], command)
