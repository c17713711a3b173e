"""The command line of ``python -m hvd_keras.migrate``."""

import argparse
import pathlib
import shutil
import sys
from collections.abc import Sequence

from hvd_keras.migrate import Script


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; return its exit status: 1 if something is left to do by hand."""
    parser = argparse.ArgumentParser(
        prog="python -m hvd_keras.migrate",
        description="Says what to change in scripts written for Horovod.",
    )
    parser.add_argument("scripts", nargs="+", type=pathlib.Path, metavar="SCRIPT")
    parser.add_argument("--write", action="store_true", help="change what is certain")
    given = parser.parse_args(arguments)
    left = 0
    for path in given.scripts:
        try:
            script = Script(path.read_bytes().decode())  # with its line ends
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
        for finding in script.findings:
            is_certain = finding.new is not None
            left += not (is_certain and given.write)
            done = " (changed)" if is_certain and given.write else " (--write does it)"
            if finding.text:
                print(f"{path}:{script.line(finding)}: {finding.text}{done * is_certain}")
        if given.write:
            _replace(path.resolve(), script.written().encode())
    return int(left > 0)


def _replace(path: pathlib.Path, data: bytes) -> None:
    """Replace a file's contents at once, so that a failure leaves the old ones."""
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(data)
    shutil.copymode(path, new)
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
