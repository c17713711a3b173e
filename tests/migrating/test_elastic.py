"""Scripts with hvd.elastic go on from the last commit when hvdrun starts them again."""

import sys

import pytest

from tests.harness.inputs import damage
from tests.harness.launcher import Launcher

LOOP = """
import os
import keras, numpy as np, tensorflow as tf
import horovod.tensorflow as hvd
hvd.init()
keras.utils.set_random_seed(1 + hvd.rank())
x = tf.constant(np.random.default_rng(5).normal(size=(4, 2)).astype("float32"))
y = tf.reduce_sum(x, 1, keepdims=True)
model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.1, momentum=0.9)

@tf.function(autograph=False)  # whose files a killed process leaves behind
def step(is_alone):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)  # the same on any number of ranks
    tape = tape if is_alone else hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

step(True)  # for the optimizer's variables
state = hvd.elastic.TensorFlowKerasState(model, optimizer, step=0, sizes=[])
state.register_reset_callbacks([lambda: print("reset at", state.step)])

@hvd.elastic.run
def train(state, last):
    print("from", state.step, flush=True)  # os._exit loses what is not written
    while state.step < last:
        step(False)
        state.step += 1
        state.sizes = state.sizes + [hvd.size()]
        if state.step % 2 == 0:
            state.commit()
        if state.step == 5 and hvd.rank() == hvd.size() - 1 and not os.path.exists("failed"):
            open("failed", "w").close()
            os._exit(3)
    return state.sizes

sizes = train(state, last=6)
assert hvd.allgather_object(model.get_weights()[0].tobytes()).count(
    model.get_weights()[0].tobytes()) == hvd.size()
print("ended", sizes, *np.concatenate([np.ravel(v) for v in optimizer.variables + model.variables]))
"""


CALLS = """
import os
import horovod.tensorflow as hvd
hvd.init()
class State(hvd.elastic.ObjectState):
    def save(self):
        super().save()

state = State(calls=0, sizes=[])
state.register_reset_callbacks([lambda: print("reset at", state.calls, flush=True)])
os.chdir("elsewhere")  # HVD_COMMITS is relative

@hvd.elastic.run
def train(state):
    state.calls += 1
    state.sizes = [*state.sizes, hvd.size()]
    if state.calls == 2:
        state.commit()
    if state.calls == 4 and hvd.size() == 1:
        with open("../hosts", "w") as file:
            file.write("localhost:2")
        os._exit(3)

for _ in range(6 - state.calls):
    if state.calls < 6:
        train(state)
print("ended", state.calls, state.sizes)
"""


RESTARTING = 1500  # seconds for a job that starts twice


def run(hvdrun: Launcher, text: str, *options: str, size: int = 2, status: int = 0) -> list[str]:
    """The lines of a job, sorted."""
    path = hvdrun.folder / "train.py"
    path.write_text(text)
    job = ("--horovod", "--no-prefix", "-np", str(size), "--oversubscribe", *options)
    done = hvdrun.run(*job, sys.executable, str(path), timeout=RESTARTING, status=status)
    assert "applies gradients of this rank alone" not in done.stderr
    assert "different weights" not in done.stderr
    told = done.stderr.count("hvd_keras: continuing from commit ")
    assert told == ("reset at" in done.stdout), done.stderr
    assert ("a restart loses what State.save keeps" in done.stderr) == ("class State" in text)
    return sorted(done.stdout.splitlines())


def test_a_loop_continues_where_rank_0_is_on_another_host(hvdrun) -> None:
    """Which has no commits: those are on the host where rank 1 is now."""
    hosts = "import os; rank = os.environ['OMPI_COMM_WORLD_RANK']\n"
    hosts += "moved = os.path.exists('failed')\n"
    hosts += "os.environ['HVD_COMMITS'] = 'first' if (rank == '0') != moved else 'second'\n"
    lines = run(hvdrun, hosts + LOOP, "--max-restarts", "2")
    assert lines[2:] == ["from 0", "from 0", "from 4", "from 4", "reset at 4", "reset at 4"]
    assert len(set(lines[:2])) == 1


@pytest.mark.slow
def test_a_loop_continues_with_fewer_ranks(hvdrun) -> None:
    folder = hvdrun.folder / "commits"
    hvdrun.environment["HVD_COMMITS"] = str(folder)
    assert run(hvdrun, LOOP, status=3) == ["from 0", "from 0"]
    newest = sorted(folder.rglob("checkpoint-*"))
    assert len(newest) == 2
    damage(newest[-1])
    ended, *others = run(hvdrun, LOOP, size=1)
    assert ended.startswith("ended [2, 2, 1, 1, 1, 1] ")
    assert others == ["from 2", "reset at 2"]
    # Another training must not take it.
    done = run(hvdrun, LOOP.replace("Dense(1)]", "Dense(1), keras.layers.Dense(1)]"), status=1)
    assert done == []


def test_calls_continue_one_after_the_other_on_added_hosts(hvdrun) -> None:
    (hvdrun.folder / "elsewhere").mkdir()
    (hvdrun.folder / "hosts").write_text("localhost:1")
    hvdrun.environment["HVD_COMMITS"] = "commits"
    hosts = ("--host-discovery-script", "cat hosts", "--max-np", "2", "--max-restarts", "1")
    lines = run(hvdrun, CALLS, *hosts, size=1)
    assert lines == [*["ended 6 [1, 1, 2, 2, 2, 2]"] * 2, *["reset at 2"] * 2]
    assert not list((hvdrun.folder / "elsewhere").iterdir())


@pytest.mark.slow
def test_remaining_commits_are_named_after_a_failure(hvdrun) -> None:
    script = hvdrun.folder / "train.py"
    script.write_text(LOOP.replace('open("failed", "w").close()', "pass"))
    job = ("--horovod", "-np", "1", "--max-restarts", "1", sys.executable, str(script))
    done = hvdrun.run(*job, timeout=RESTARTING, status=3)
    left = list(hvdrun.folder.glob("hvd-commits-*"))
    assert len(left) == 1
    assert f"HVD_COMMITS={left[0]}" in done.stderr
