"""The examples and first scripts of documents and docstrings, run by the launcher on two ranks."""

import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest

from tests.harness import docstrings

ROOT = Path(__file__).parents[2]


def run(script, *options):
    """Run a script on two ranks; return its standard output."""
    program = [sys.executable, script, *options]
    command = [sys.executable, "-m", "hvd_keras.launch", "-np", "2", "--oversubscribe", *program]
    result = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def run_example(name, *options):
    """Run an example on two ranks; return its test accuracy, printed once, and its output."""
    output = run(ROOT / "examples" / name, *options)
    accuracies = re.findall(r"Test accuracy: ([0-9.]+)", output)
    assert len(accuracies) == 1, output
    return float(accuracies[0]), output


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


def test_the_first_script_of_the_readme(tmp_path):
    losses = losses_of(scripts("README.md")[0], tmp_path)
    assert len(losses) == 5  # rank 0's
    assert losses[-1] < losses[0] / 10


def test_the_script_of_the_tutorial(tmp_path):
    losses = losses_of(scripts("docs/tutorial.md")[1], tmp_path)
    assert len(losses) == 2 * 5  # and as many of the validation
    assert losses[-1] < losses[1] / 2


def scripts(page):
    """Return the Python code on a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def losses_of(script, folder):
    """Run a script on two ranks; return the losses that it prints."""
    path = folder / "train.py"
    path.write_text(script)
    return [float(loss) for loss in re.findall(r"loss: ([0-9.]+)", run(path))]


def test_the_examples_of_the_docstrings():
    output = run(docstrings.__file__)
    ran = sorted(re.findall(r"\[\d\] ran the example of (\S+)", output))
    assert ran == sorted(2 * list(docstrings.examples()))
    assert len(ran) > 2 * 15
