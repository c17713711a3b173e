"""``horovod.spark.run``: Horovod's arguments, turned into those of ``hvd.spark.run``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hvd_keras.spark

# There is one transport; lines have no timestamps; the driver prints rank 0's output.
_WITHOUT_EFFECT = {"use_mpi", "use_gloo", "verbose", "prefix_output_with_timestamp"}


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    *,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    nics: Sequence[str] | None = None,
    **others: Any,
) -> list[Any]:
    """``hvd.spark.run`` with the arguments of ``horovod.spark.run``.

    Args:
        fn, args, kwargs, num_proc, start_timeout, env: as in ``hvd.spark.run``.
        extra_mpi_args: arguments for mpirun.
        nics: the interface of the network between the executors' hosts; one.
        others: arguments of Horovod without effect here.

    Returns:
        The results of all ranks, in rank order.

    Raises:
        TypeError: an argument has no counterpart.
        As ``hvd.spark.run`` besides.
    """
    for name, value in others.items():
        if value is not None and name not in _WITHOUT_EFFECT:
            raise TypeError(
                f"horovod.spark.run: hvd.spark.run has nothing for {name}={value!r}. Leave it out."
            )
    options = ["--horovod"]
    if extra_mpi_args:
        options.append(f"--mpi-args={extra_mpi_args}")
    if nics:
        if len(nics) > 1:
            raise TypeError(f"horovod.spark.run: {nics=}, expected one interface")
        options.append(f"--network-interface={next(iter(nics))}")
    return hvd_keras.spark.run(fn, args, kwargs, num_proc, start_timeout, env=env, options=options)
