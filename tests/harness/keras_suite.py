"""Runs Keras's own tests after ``hvd.init()``: what is patched does to them what it did before.

In a process alone, and on 2 ranks that each run all of them in ``hvd.local_fit``. The tests are
those of Keras's source distribution. Also the plugin of pytest that does so.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile

import keras

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "build" / "keras_suite"
# What training consists of; layers that nothing patches are left out.
PARTS = ["trainers", "callbacks", "optimizers", "losses", "models", "saving", "metrics"]
PARTS += ["layers/normalization", "layers/core", "layers/preprocessing", "layers/rnn", "random"]
# MirroredStrategy trains in other threads, in which hvd.local_fit does not hold.
EXPECTED = {"test_swap_ema_weights_with_tf_distribute"}
# A file that could not be written as a whole does not appear.
EXPECTED |= {f"test_save_model_exception_raised_{m}_memory_config" for m in ("high", "low")}
NAME = "tests.harness.keras_suite"  # as a plugin
_FAILED = "HVD_KERAS_SUITE_FAILED"  # the file of the names of what has failed


def pytest_configure(config) -> None:
    if "HVD_KERAS_SUITE_PLAIN" in os.environ:
        return
    import hvd_keras as hvd

    hvd.init()
    if hvd.size() > 1:
        config.hvd_local_fit = hvd.local_fit()  # which ends when nothing refers to it
        config.hvd_local_fit.__enter__()


def pytest_runtest_logreport(report) -> None:
    if report.failed:
        with open(os.environ[_FAILED], "a") as file:
            file.write(f"{report.nodeid}\n")


def source() -> pathlib.Path:
    """The sources of the installed Keras, with its tests."""
    name = f"keras-{keras.__version__}"
    if not (FOLDER / name).exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            ":all:",
        ]
        subprocess.run([*command, f"keras=={keras.__version__}", "-d", str(FOLDER)], check=True)
        with tarfile.open(FOLDER / f"{name}.tar.gz") as archive:
            archive.extractall(FOLDER, filter="data")
    return FOLDER / name


def failed(name: str, size: int, tests: list[str], *options: str, **environment: str) -> set[str]:
    """Runs tests of Keras on so many ranks, and returns the names of those that fail."""
    path, found = source(), FOLDER / f"{name}.failed"
    found.write_text("")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", NAME]
    command += ["--continue-on-collection-errors", *options, *tests]  # some need other packages
    if size > 1:
        # A rank whose tests fail must not end the other.
        command = ["sh", "-c", '"$@"; true', "-", *command]
        command = [
            shutil.which("hvdrun") or "hvdrun",
            "-np",
            f"{size}",
            "--oversubscribe",
            *command,
        ]
    with (FOLDER / f"{name}.log").open("wb") as log:
        subprocess.run(
            command,
            cwd=path,
            env={
                **os.environ,
                **environment,
                _FAILED: str(found),
                "KERAS_BACKEND": "tensorflow",
                "PYTHONPATH": f"{path}:{ROOT}",
            },
            stdout=log,
            stderr=log,
        )
    # A process that ends without a summary has told of no failure.
    lines = (FOLDER / f"{name}.log").read_text(errors="replace").splitlines()
    summaries = [
        line for line in lines if re.search(r"=+ .*\d+ (passed|failed).* in [\d.]+s", line)
    ]
    if len(summaries) != size:
        sys.exit(f"{name}: {len(summaries)} of {size} ranks came to their end, see {FOLDER}")
    print(f"{name}:", *summaries, sep="\n")
    return set(found.read_text().split("\n")) - {""}


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    tests = [f"keras/src/{part}" for part in PARTS]
    found = failed("one rank", 1, tests, "-n", "2")
    found |= failed("two ranks", 2, tests)
    wrong = {one for one in found if one.rpartition("::")[2] not in EXPECTED}
    if wrong:
        wrong -= failed("plain Keras", 1, sorted(wrong), HVD_KERAS_SUITE_PLAIN="1")
    print("\n".join(sorted(wrong)) or "None fails that passes in plain Keras.")
    return int(bool(wrong))


if __name__ == "__main__":
    from tests import conftest  # noqa: F401 (one thread, and no GPU)

    sys.exit(main())
