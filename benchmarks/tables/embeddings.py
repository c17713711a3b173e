"""What ranks divide, compared with the whole on each rank: memory, bytes moved, step time.

    hvdrun -np 2 python benchmarks/tables/embeddings.py            # a table
    hvdrun -np 2 python benchmarks/tables/embeddings.py --many     # a table for each id of a sample
    hvdrun -np 2 python benchmarks/tables/embeddings.py --state    # an optimizer's state

A step looks up BATCH x IDS ids of each rank, whose frequencies follow a power law, and updates the
table with Adagrad. Compared are ``hvd.layers.Embedding``, divided by rows; Keras's layer, whose
sparse gradients all ranks exchange; and the bound: three ``hvd.alltoall`` in a ``tf.function`` that
move as many bytes as the divided table's ids, rows and gradients, and compute nothing. Steps are
measured in turn, from the time when all ranks are ready to the end of the slowest.

With --state, a step updates the variables of a small transformer with Adam, by gradients that are
there already, with ``shard_state=True`` and without. The weights are compared bit for bit.
"""

import json
import time

import keras
import numpy as np
import problem
import tensorflow as tf
from problem import IDS

import hvd_keras as hvd


def make(layer, ids):
    """Returns a step, and the variables that it updates."""
    layer(ids)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adagrad(0.01))
    optimizer.build(layer.trainable_variables)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            found = keras.tree.flatten(layer(ids))
            loss = tf.add_n([tf.reduce_mean(tf.square(rows - 1.0)) for rows in found])
        gradients = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply(gradients, layer.trainable_variables)

    tables = [v for v in optimizer.variables if len(v.shape) == 2]
    return step, [*layer.trainable_variables, *tables]


def make_dense(shard_state):
    """Returns a step that updates the variables of a transformer, these, and the slots."""
    width, blocks, words = 384, 6, 8000
    shapes = [(words, width)]
    for _ in range(blocks):
        square = [(width, width), (width,)]
        shapes += [*square * 4, (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    random = np.random.default_rng(hvd.rank())
    variables = [keras.Variable(np.full(shape, 0.1, "float32")) for shape in shapes]
    gradients = [tf.constant(random.normal(size=shape), tf.float32) for shape in shapes]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001), shard_state=shard_state)
    optimizer.build(variables)
    slots = [v for v in optimizer.variables if len(v.shape)]
    return tf.function(lambda: optimizer.apply(gradients, variables)), variables, slots


def sent(before, after):
    """The bytes that a rank has sent, by the collectives' own bounds."""
    n = hvd.size()
    # The statistics count what a rank gives to a collective.
    factors = {"allreduce": 2 * (n - 1) / n, "reducescatter": (n - 1) / n, "allgather": n - 1}
    return sum(
        factors.get(kind, 1) * (numbers["bytes"] - before.get(kind, {"bytes": 0})["bytes"])
        for kind, numbers in after.items()
    )


def state(repeats):
    """Returns the rows about an optimizer's state."""
    made = {"in shares": make_dense(True), "whole on each rank": make_dense(False)}
    moved_by = {}
    for name, (step, _, _) in made.items():
        step()
        before = hvd.stats()["collectives"]
        step()
        moved_by[name] = sent(before, hvd.stats()["collectives"])
    times = [[seconds(step) for step, _, _ in made.values()] for _ in range(repeats)]
    times = np.median(hvd.allreduce(np.array(times), op=hvd.Max, name="times").numpy(), axis=0)
    weights = [[np.asarray(v) for v in variables] for _, variables, _ in made.values()]
    for one, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, other)
    nbytes = {name: [4 * int(np.prod(v.shape)) for v in made[name][2]] for name in made}
    slots = {name: int(hvd.allreduce(sum(of), op=hvd.Max)) for name, of in nbytes.items()}
    whole = nbytes["whole on each rank"]
    return [
        {
            "what": name,
            "ranks": hvd.size(),
            "ms": float(ms * 1e3),
            "sent": moved_by[name],
            "memory": slots[name],
            "limit": sum(whole) / hvd.size() + 2 * max(whole),  # Adam has two slots of each
            "variables": sum(whole) // 2,
        }
        for name, ms in zip(made, times, strict=True)
    ]


def make_bound(counts):
    """Returns a step that moves a number of bytes by each alltoall."""
    size = hvd.size()
    buffers = [tf.zeros([count // size * size], tf.uint8) for count in counts]

    @tf.function
    def step():
        for i, buffer in enumerate(buffers):
            hvd.alltoall(buffer, name=f"bound {i}")

    return step


def moved():
    kinds = hvd.stats()["collectives"]
    return sum(kinds[k]["bytes"] for k in ("alltoall", "allgather", "allreduce") if k in kinds)


def seconds(step):
    hvd.allreduce(0.0, name="ready")
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def show_state(rows, as_json):
    """Prints the rows on one rank."""
    if hvd.rank() > 0:
        return
    if as_json:
        print(json.dumps(rows))
        return
    n, variables = rows[0]["ranks"], rows[0]["variables"]
    print(
        f"{n} ranks, variables of {variables / 1e6:.1f} MB, Adam; 2(N-1)/N of them are "
        f"{2 * (n - 1) / n * variables / 1e6:.1f} MB; total/N and the largest are "
        f"{rows[0]['limit'] / 1e6:.1f} MB\n\n"
        "| state | MB of slots on the fullest rank | MB sent by a rank in a step | ms a step |\n"
        "|---|---|---|---|"
    )
    for row in rows:
        cells = f"{row['memory'] / 1e6:.1f} | {row['sent'] / 1e6:.1f} | {row['ms']:.1f}"
        print(f"| {row['what']} | {cells} |")


def main():
    parser = problem.parser(__doc__.splitlines()[0])
    parser.add_argument("--many", action="store_true", help="26 tables of so many rows")
    parser.add_argument("--state", action="store_true", help="an optimizer's state, no table")
    parser.add_argument("--json", action="store_true", help="print one line of JSON, no table")
    options = parser.parse_args()
    hvd.init()
    if options.state:
        show_state(state(options.repeats), options.json)
        return
    ids = problem.ids(hvd.rank(), options)
    shape = options.rows, options.width
    item = 4 * options.width
    if options.many:
        given = {str(i): tf.constant(ids[:, i]) for i in range(IDS)}
        unique = sum(len(np.unique(of_table)) for of_table in ids.T)
        tables = {name: hvd.layers.Embedding(*shape) for name in given}
        divided, its = make(hvd.layers.Embeddings(tables), given)
        steps = {f"{IDS} tables": divided}
        memories = [its]
    else:
        unique = len(np.unique(ids))
        divided, its = make(hvd.layers.Embedding(*shape, shard="rows"), tf.constant(ids))
        whole, all_of_it = make(keras.layers.Embedding(*shape), tf.constant(ids))
        hvd.broadcast_variables(all_of_it, 0)
        steps = {"divided by rows": divided, "whole on each rank": whole}
        memories = [its, all_of_it]
    steps["bound"] = make_bound([8 * ids.size, item * unique, item * ids.size])
    bytes_moved = {}
    for name, step in steps.items():  # the first call traces
        step()
        before = moved()
        step()
        bytes_moved[name] = moved() - before
    times = np.array([[seconds(step) for step in steps.values()] for _ in range(options.repeats)])
    times = np.median(hvd.allreduce(times, op=hvd.Max, name="times").numpy(), axis=0)
    memory = [sum(int(np.prod(v.shape)) * 4 for v in found) for found in memories]
    rows = [
        {
            "what": name,
            "ranks": hvd.size(),
            "ms": float(ms * 1e3),
            "sent": bytes_moved[name],
            "memory": m,
        }
        for name, ms, m in zip(steps, times, [*memory, 0], strict=True)
    ]
    if hvd.rank() > 0:
        return
    if options.json:
        print(json.dumps(rows))
        return
    print(
        f"{hvd.size()} ranks, {shape[0]} x {shape[1]} float32, {ids.size} ids a step and rank, "
        f"{unique} of them different, {hvd.size() * ids.size / times[0]:,.0f} lookups a second; "
        f"medians of {options.repeats}\n\n"
        "| table | MB of table and slots on a rank | MB sent in a step | ms a step |\n"
        "|---|---|---|---|"
    )
    for row in rows:
        memory_text = f"{row['memory'] / 1e6:.1f}" if row["memory"] else "-"
        print(f"| {row['what']} | {memory_text} | {row['sent'] / 1e6:.2f} | {row['ms']:.1f} |")


if __name__ == "__main__":
    main()
