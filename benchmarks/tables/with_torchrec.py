"""The 26 tables of ``embeddings.py --many`` in TorchRec, over gloo on CPUs.

    torchrun --nproc-per-node 2 benchmarks/tables/with_torchrec.py

Needs an environment with torch, fbgemm-gpu-cpu and torchrec of fitting versions. Each table is
whole on one rank: TorchRec divides none by rows on CPUs. Ids, loss and optimizer are those of
``embeddings.py``; TorchRec's Adagrad runs in the backward pass.
"""

import time

import problem
import torch
import torch.distributed as dist
import torchrec
from problem import IDS
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward


def main():
    options = problem.parser(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ids = problem.ids(dist.get_rank(), options)
    names = [str(i) for i in range(IDS)]
    tables = [
        torchrec.EmbeddingBagConfig(
            name=f"t{name}",
            embedding_dim=options.width,
            num_embeddings=options.rows,
            feature_names=[name],
        )
        for name in names
    ]
    cpu = torch.device("cpu")
    layer = torchrec.EmbeddingBagCollection(device=cpu, tables=tables)
    apply_optimizer_in_backward(torch.optim.Adagrad, layer.parameters(), {"lr": 0.01})
    whole = ParameterConstraints(sharding_types=["table_wise"])
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        constraints={table.name: whole for table in tables},
    )
    sharders = [EmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(layer, sharders, dist.GroupMember.WORLD)
    model = DistributedModelParallel(layer, device=cpu, plan=plan, sharders=sharders)
    given = torchrec.KeyedJaggedTensor(
        keys=names,
        values=torch.tensor(ids.T.reshape(-1)),
        lengths=torch.ones(ids.size, dtype=torch.int32),
    )

    def step():
        rows = model(given).values().reshape(options.batch, IDS, options.width)
        ((rows - 1.0) ** 2).mean((0, 2)).sum().backward()

    times = []
    for _ in range(3 + options.repeats):
        dist.barrier()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times[3:])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, ms a step: {1e3 * slowest.median().item():.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
