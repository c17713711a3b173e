"""Loops of scripts on PyTorch."""

import pytest


def test_losses_of_own_loops_that_are_not_weighed_are_told(hvdrun) -> None:
    script = """
        import torch
        x = torch.ones(4, 3) * (1 + hvd.rank())
        for reduction in ("sum_over_batch_size", "sum"):
            layer = keras.layers.Dense(1, kernel_initializer="ones")
            layer.build([4, 3])
            loss = keras.losses.MeanSquaredError(reduction, name=f"loss_of_{reduction}")
            loss(x[:, :1], layer(x)).backward()
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
            optimizer.apply([v.value.grad for v in layer.trainable_variables], layer.variables)
    """
    job = hvdrun.python(2, script, status=0)
    assert "the loss loss_of_sum is summed, not averaged" in job.stderr
    assert "loss_of_sum_over_batch_size" not in job.stderr
    hvdrun.environment["HVD_STRICT"] = "1"
    job = hvdrun.python(2, script)
    assert job.returncode != 0
    assert "ValueError: hvd_keras: the loss loss_of_sum is summed" in job.stderr


@pytest.mark.parametrize("second", ["keras", "torch", "by hand"])
def test_a_loop_that_exchanges_the_gradients_of_one_of_two_optimizers(hvdrun, second) -> None:
    script = f"""
        second = {second!r}
        import torch
        x = torch.tensor(np.random.default_rng(hvd.rank()).normal(size=(8, 4)), dtype=torch.float32)
        nets = [keras.Sequential([keras.Input([4]), keras.layers.Dense(3)]) for _ in range(2)]
        hvd.broadcast_variables([v for net in nets for v in net.variables], 0)
        own = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1))
        delta = torch.zeros(4, requires_grad=True)  # an example of this rank alone
        torch.sum(delta * hvd.rank()).backward()
        torch.optim.SGD([delta], lr=0.1).step()
        weights = nets[1].trainable_variables
        other = keras.optimizers.Adam(0.1)
        if second == "torch":
            other = torch.optim.Adam([v.value for v in weights], lr=0.1)
        for _ in range(3):
            for net in nets:
                net.zero_grad()
                torch.mean((net(x) - x[:, :3]) ** 2).backward()
            own.apply([v.value.grad for v in nets[0].weights], nets[0].weights)
            gradients = [v.value.grad for v in weights]
            if second == "by hand":
                gradients = [hvd.allreduce(gradient) for gradient in gradients]
            other.step() if second == "torch" else other.apply(gradients, weights)
        print("went on")
    """
    job = hvdrun.python(2, script)
    alone = "optimizer Adam applies gradients of this rank alone"
    assert (alone in job.stderr) == (second != "by hand"), job.stderr
    assert job.stdout.count("went on") == 2 * (second == "by hand")


@pytest.mark.parametrize("ranks", [1, 2])
def test_loops_of_torch_optimizers_without_a_broadcast(hvdrun, ranks) -> None:
    script = """
        import contextlib, pathlib, torch
        rng = np.random.default_rng(hvd.rank())
        x = torch.tensor(rng.normal(size=(8, 4)), dtype=torch.float32)

        def train(kind):
            if kind == "of torch" or kind == "DistributedDataParallel":
                net = torch.nn.Linear(4, 3)
            else:
                net = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
            if kind == "DistributedDataParallel":
                store = pathlib.Path("store").absolute().as_uri()
                how = {"rank": hvd.rank(), "world_size": hvd.size(), "init_method": store}
                torch.distributed.init_process_group("gloo", **how)
                net = torch.nn.parallel.DistributedDataParallel(net)
            parameters = list(net.parameters())
            optimizer = torch.optim.Adam(parameters, 0.1)
            for _ in range(3):
                optimizer.zero_grad()
                loss = torch.mean((net(x) - x[:, :3]) ** 2)
                loss.backward()
                hvd.allreduce(loss.detach())
                for one in parameters if kind == "averaged" else []:
                    one.grad = hvd.allreduce(one.grad)
                for one in parameters if kind == "in place" else []:
                    one.grad.copy_(hvd.allreduce(one.grad))
                if kind == "in place":
                    torch.nn.utils.clip_grad_norm_(parameters, 0.1)
                optimizer.step()

        for kind in KINDS:
            try:
                with hvd.local_fit() if kind == "alone" else contextlib.nullcontext():
                    train(kind)
            except RuntimeError as error:
                assert "optimizer Adam applies gradients of this rank alone" in str(error), error
                print("told of", kind)
    """
    told = ["of Keras", "of torch"]
    kinds = [*told, "averaged", "in place", "alone", "DistributedDataParallel"]
    lines = hvdrun.python(ranks, script.replace("KINDS", str(kinds)), status=0).stdout.splitlines()
    for rank in range(ranks):
        of_rank = [line[4:] for line in lines if line.startswith(f"[{rank}] ")]
        assert of_rank == [f"told of {kind}" for kind in told if ranks > 1]
