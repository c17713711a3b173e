"""``hvdrun --auto``: weights that a function only reads are sent again once they have changed."""

import re
import sys

from tests.harness.launcher import Launcher
from tests.jobs.test_auto import launcher as launcher

# Prints how many of 4 matrices each call has sent, and what it has computed.
KEEPS = """
import gc, keras, numpy as np, tensorflow as tf
import hvd_keras as hvd
keras.utils.set_random_seed(1)
hvd.auto()
x = np.random.default_rng(0).normal(size=(64, 100)).astype("float32")
make = lambda: keras.Sequential([keras.Input((100,)), *map(keras.layers.Dense, [100] * 4)])
net, stats = make(), lambda: hvd.stats()["collectives"].get("broadcast", {"bytes": 0})["bytes"]
net.compile(keras.optimizers.SGD(1e-3), "mse")
def call(name, *args, **options):
    before = stats()
    result = getattr(net, name)(x, *args, batch_size=32, verbose=0, **options)
    result = result.history["loss"][-1] if name == "fit" else np.mean(np.square(result))
    alone = np.mean(np.square(net(x) if name == "predict" else net(x) - x))
    wanted = alone**2 if name == "evaluate" else alone
    assert name == "fit" or np.isclose(result, wanted, rtol=1e-4), (name, result, wanted)
    print(name, round((stats() - before) / 40_000), flush=True)
kernel = net.layers[0].kernel
call("evaluate", x); call("evaluate", x); call("predict"); call("predict")
kernel.assign(kernel * 1.5); call("predict")
weights = net.get_weights(); weights[0][0, 0] = 9; net.set_weights(weights); call("evaluate", x)
net.set_weights(weights); call("evaluate", x)
kernel.value.scatter_update(tf.IndexedSlices(tf.ones((1, 100)), [2]))
call("predict"); call("predict")
call("fit", x); call("predict")
for layer in net.layers[:2]:
    layer.trainable = False
net.compile(keras.optimizers.SGD(1e-3), "mse")
call("fit", x); kernel.assign_add(tf.ones_like(kernel)); call("fit", x)
del kernel; net = make(); gc.collect(); net.compile("sgd", "mse"); call("evaluate", x)
"""


def test_weights_are_sent_when_they_have_changed(launcher: Launcher) -> None:
    environment = launcher.environment | {"HVD_AUTO": "divided"}
    job = ("-np", "2", "--no-prefix", "--oversubscribe", sys.executable, launcher.script(KEEPS))
    ended = launcher.run(*job, env=environment)
    assert ended.returncode == 0, ended.stderr
    calls = re.findall(r"(\w+) (\d+)", ended.stdout)
    # Two steps of fit train four matrices, or two.
    sent = [4, 0, 0, 0, 4, 4, 0, 4, 0, 8, 4, 4, 6, 4]
    assert [int(number) for _, number in calls] == sent, ended.stdout
