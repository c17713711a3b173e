"""Requests of torch's tensors, without copies."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hvd_keras.runtime import agree

# What the core knows, by torch's names.
_DTYPES = {
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
}


def name_of(dtype: torch.dtype) -> str:
    """Return NumPy's name of a dtype, or ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def checked(kind: str, tensor: Any) -> torch.Tensor:
    """Return what can be sent: a contiguous tensor in the host's memory.

    Raises:
        NotImplementedError: it is on a GPU.
        TypeError: the core does not know its dtype.
    """
    tensor = getattr(tensor, "value", tensor)  # of a Keras variable
    tensor = torch.as_tensor(tensor)
    if tensor.device.type != "cpu":
        raise NotImplementedError(
            f"hvd.{kind}: got a tensor on {tensor.device}. On PyTorch, hvd_keras trains on CPUs "
            "only: set CUDA_VISIBLE_DEVICES=-1, or use Keras on TensorFlow for GPUs."
        )
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if name_of(tensor.dtype) not in _DTYPES:
        raise TypeError(
            f"hvd.{kind}: got a tensor of dtype {name_of(tensor.dtype)}, expected one of "
            f"{', '.join(sorted(_DTYPES))}. Encode it as one of these first."
        )
    return tensor.contiguous()


class Exchange:
    """A request on its way; ``results`` waits for it.

    Args:
        kind, call: as for ``agree.Request``.
        tensors: as ``checked`` returns them; unchanged until ``results`` returns.
        outputs: what the results are written into, of the same shapes; default: new tensors.
    """

    def __init__(
        self,
        kind: str,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor] = (),
        **call: Any,
    ) -> None:
        self._inputs, self._outputs = [tensor.detach() for tensor in tensors], list(outputs)
        if kind in ("allreduce", "broadcast") and not outputs:
            self._outputs = list(map(torch.empty_like, self._inputs))
        inputs = [
            agree.Memory.at(t.data_ptr(), name_of(t.dtype), tuple(t.shape)) for t in self._inputs
        ]
        there = [tensor.data_ptr() for tensor in self._outputs] or None
        self._request = agree.Request(kind, inputs, there, (self._inputs, self._outputs), **call)

    def results(self) -> list[torch.Tensor]:
        """Return the results. Raises as ``agree.Request.wait``."""
        self._request.wait()
        if not self._outputs:
            self._outputs = [self._result(i, t.dtype) for i, t in enumerate(self._inputs)]
        self._request.release()
        return self._outputs

    def _result(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        # As integers of that size, because NumPy does not know all of torch's dtypes.
        array = self._request.result(index, np.dtype(f"i{dtype.itemsize}"))
        return torch.from_numpy(array).view(dtype)
