"""``python -m hvd_keras.postmortem FOLDER``."""

import argparse
import sys
from pathlib import Path

from hvd_keras.postmortem import report


def main() -> int:
    """Run the program; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hvd_keras.postmortem",
        description="Says which rank of a failed job did something else first, and where.",
    )
    parser.add_argument("folder", type=Path, help="the folder of hvdrun --postmortem")
    parser.add_argument(
        "--requests", type=int, default=5, help="how many of each rank to show (default: 5)"
    )
    given = parser.parse_args()
    try:
        print(report(given.folder, given.requests))
    except (OSError, ValueError) as error:
        print(f"postmortem: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
