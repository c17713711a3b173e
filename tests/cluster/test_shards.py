"""Optimizer state in shares, on hosts with different numbers of ranks."""

import re
import sys
from pathlib import Path

import pytest

from tests.harness import cluster
from tests.harness.hosts import Hosts

# Compares the weights with those of a training without shares, bit for bit. The bytes are those
# that this host's network has sent.
SCRIPT = """
import keras, numpy as np, tensorflow as tf
import hvd_keras as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()

def sent():
    lines = open("/proc/net/dev").read().splitlines()[2:]
    return sum(int(line.split()[9]) for line in lines if not line.strip().startswith("lo:"))

def trained(shard_state):
    random = np.random.default_rng(0)
    shapes = [*[(200, 500)] * 9, (700,), (3,), ()]
    variables = [keras.Variable(random.normal(size=shape), dtype="float32") for shape in shapes]
    adam = keras.optimizers.Adam(0.01, global_clipnorm=1.0)
    optimizer = hvd.DistributedOptimizer(adam, shard_state=shard_state)
    optimizer.build(variables)
    for step in range(4):
        if step == 3:
            hvd.barrier()
            before = sent()
        gradients = [tf.sin(v * 3 + step) * (i + 0.7 * rank + 0.1)
                     for i, v in enumerate(variables)]
        optimizer.apply(gradients, variables)
    hvd.barrier()
    total = sum(4 * int(np.prod(shape)) for shape in shapes)
    slots = sum(4 * int(np.prod(v.shape)) for v in optimizer.variables if len(v.shape))
    return [np.asarray(v).tobytes() for v in variables], (sent() - before) / total, slots / total

plain, its_bytes, _ = trained(False)
shared, bytes_moved, slots = trained(True)
assert shared == plain, "the weights differ"
assert len(set(hvd.allgather_object(shared[0]))) == 1
print(f"moved {its_bytes:.3f} and {bytes_moved:.3f} of the variables, has {slots:.3f}", flush=True)

"""


@pytest.mark.slow
def test_shares_on_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """A host sends each byte of the variables once, as in an allreduce: 2(H-1)/H for 2 hosts."""
    (tmp_path / "script.py").write_text(SCRIPT)
    job = [*("-H", "server1:2,server2:1"), sys.executable, "script.py"]
    done = cluster.run(hosts[0], *job, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    numbers = re.findall(r"moved (\S+) and (\S+) of the variables, has (\S+)", done.stdout)
    assert len(numbers) == 3
    for plain, shared, slots in numbers:
        # Headers and acknowledgements add some percent.
        assert 0.95 < float(plain) < 1.2
        assert 0.95 < float(shared) < 1.2
        assert float(slots) < 2 * (1 / 3 + 1 / 9)
