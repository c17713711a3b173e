"""The examples, and the code of pages and docstrings, run by the launcher on two ranks."""

import re
import sys
from pathlib import Path

import keras
import pytest

from tests.harness import documents, ranks

ROOT = Path(__file__).parents[2]


def run(script, *options):
    """Run a script on two ranks; return its standard output."""
    launcher = ["-m", "hvd_keras.hvdrun", "-np", 2, "--oversubscribe", sys.executable]
    return ranks.python(*launcher, script, *options, status=0).stdout


def run_example(name, *options):
    """Run an example on two ranks; return its test accuracy, printed once, and its output."""
    output = run(ROOT / "examples" / name, *options)
    accuracies = re.findall(r"Test accuracy: ([0-9.]+)", output)
    assert len(accuracies) == 1, output
    return float(accuracies[0]), output


@pytest.mark.slow
def test_mnist(tmp_path):
    checkpoint = tmp_path / "new folder" / "mnist.keras"
    accuracy, output = run_example("keras_mnist.py", "--epochs", "8", "--checkpoint", checkpoint)
    assert accuracy >= 0.93  # 40 epochs, the default, give 0.98 and more
    assert "Ranks: 2 " in output
    assert re.search(r"Rate: [0-9]+ samples/s", output)
    # The script left one file, which plain Keras reads, and no temporary files.
    assert list(checkpoint.parent.iterdir()) == [checkpoint]
    assert keras.models.load_model(checkpoint).count_params() > 0


@pytest.mark.slow
def test_dlrm(tmp_path):
    sizes = ["--samples", "20000", "--largest", "40000", "--batch-size", "256"]
    output = run(ROOT / "examples" / "dlrm.py", *sizes, "--save", tmp_path / "dlrm.keras")
    assert "by rows" in output
    assert float(re.search(r"Test AUC: ([0-9.]+)", output)[1]) > 0.6  # 0.5 by guessing
    assert (tmp_path / "dlrm.keras").exists()


@pytest.mark.slow
def test_text_embedding(tmp_path):
    checkpoint = tmp_path / "text.keras"
    accuracy, output = run_example(
        "keras_text_embedding.py", "--epochs", "3", "--checkpoint", checkpoint
    )
    baseline = float(re.search(r"Always answering the largest class: ([0-9.]+)", output)[1])
    assert accuracy > baseline + 0.25  # 0.79 against 0.35
    assert "Ranks: 2 " in output
    assert re.search(r"Rate: [0-9]+ samples/s", output)
    assert list(tmp_path.iterdir()) == [checkpoint]
    assert keras.models.load_model(checkpoint).count_params() > 0


def test_the_code_of_pages_and_docstrings():
    output = run(documents.__file__)
    ran = sorted(re.findall(r"\[\d\] ran the example of (\S+)", output))
    assert ran == sorted(2 * list(documents.examples()))
    assert len(ran) > 2 * 15
    pages = sorted(re.findall(r"\[\d\] ran the code of (\S+)", output))
    assert pages == sorted(2 * documents.PAGES)


@pytest.mark.slow
def test_the_short_examples():
    output = run(documents.__file__, *documents.SCRIPTS)
    scripts = sorted(re.findall(r"\[\d\] ran the script (\S+)", output))
    assert scripts == sorted(2 * documents.SCRIPTS)


def test_every_example_is_listed_and_runs_in_a_test():
    text = (ROOT / "examples" / "README.md").read_text()
    listed = re.findall(r"^\| `(\w+).py`", text, re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    tested = {*documents.SCRIPTS, "keras_mnist", "keras_text_embedding", "dlrm"}
    assert tested == set(listed)


def test_the_first_script_is_the_same_everywhere():
    first, *_ = documents.blocks("README.md")
    assert first == documents.blocks("docs/tutorial.md")[1]
    marks = [line.rpartition("# ")[2] for line in first.splitlines() if "hvd" in line]
    assert marks == ["1", "1", "2", "3", "4", "5", "6"]
    assert re.findall("^.*# changed$", first, re.MULTILINE) == first.splitlines()[-1:]
