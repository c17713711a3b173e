"""The time to import and start hvd_keras, compared with importing TensorFlow and Keras.

    python benchmarks/startup.py

Starts new processes itself, one rank and two ranks in turn. Both times are measured in the same
process. Of two ranks, the shorter time counts: that rank came last and did not wait.
"""

import argparse
import json
import os
import subprocess
import sys
import time

import report


def child() -> None:
    """Runs one rank: prints the seconds of the start and of the imports."""
    before = time.perf_counter()
    import keras  # noqa: F401
    import tensorflow as tf

    imported = time.perf_counter()
    import hvd_keras as hvd

    hvd.init()
    mine = [time.perf_counter() - imported, imported - before]
    size = hvd.allreduce(1, op=hvd.Sum, name="size")
    if size != int(os.environ["EXPECTED_SIZE"]):
        raise SystemExit(f"wrong values: {size} ranks")
    start, imports = hvd.allreduce(tf.constant(mine, tf.float64), op=hvd.Min, name="times").numpy()
    if hvd.rank() == 0:
        print(json.dumps([start, imports]), flush=True)


def seconds(ranks: int) -> tuple[float, float]:
    """Measures the start and the imports in new processes."""
    job = [sys.executable, "-m", "hvd_keras.hvdrun", "-np", str(ranks), "--oversubscribe"]
    command = [*job, "--no-prefix", sys.executable, __file__, "--child"]
    environment = os.environ | {"EXPECTED_SIZE": str(ranks), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, help="of each measurement (default 7)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON, no table")
    parser.add_argument("--smoke", action="store_true", help="once, as a quick check")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child()
        return
    sizes = (2,) if options.smoke else (1, 2)
    repeats = options.repeats or (1 if options.smoke else 7)
    if not options.smoke:
        seconds(1)  # fills the disk's cache
    runs = [[seconds(size) for size in sizes] for _ in range(repeats)]
    rows = []
    for size, times in zip(sizes, zip(*runs, strict=True), strict=True):
        start, imports = zip(*times, strict=True)
        against = "importing TensorFlow and Keras"
        rows.append(report.compare("import and init()", size, against, start, imports))
    report.show(rows, options.json)


if __name__ == "__main__":
    main()
