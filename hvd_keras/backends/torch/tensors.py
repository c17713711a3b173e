"""Requests of torch's tensors, without copies."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hvd_keras.runtime import agree

Tensors = Sequence[torch.Tensor]

# What the core knows, by torch's names.
_DTYPES = {
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
}


@functools.cache
def name_of(dtype: torch.dtype) -> str:
    """Return NumPy's name of a dtype, or ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def checked(kind: str, tensor: Any) -> torch.Tensor:
    """Return what can be sent: a contiguous tensor on the CPU or a CUDA GPU.

    Raises:
        NotImplementedError: it is elsewhere.
        TypeError: the core does not know its dtype.
    """
    tensor = getattr(tensor, "value", tensor)  # of a Keras variable
    tensor = torch.as_tensor(tensor)
    if tensor.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"hvd.{kind}: got a tensor on {tensor.device}, expected one on the CPU or on a CUDA "
            "GPU. Move it there: tensor.cpu()."
        )
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if name_of(tensor.dtype) not in _DTYPES:
        raise TypeError(
            f"hvd.{kind}: got a tensor of dtype {name_of(tensor.dtype)}, expected one of "
            f"{', '.join(sorted(_DTYPES))}. Encode it as one of these first."
        )
    return tensor.contiguous()


def all_checked(kind: str, tensors: Iterable[Any]) -> list[torch.Tensor]:
    """Return tensors as ``checked`` does. ValueError if they are not on one device."""
    found = [checked(kind, tensor) for tensor in tensors]
    if len(places := {str(tensor.device) for tensor in found}) > 1:
        raise ValueError(
            f"hvd.{kind}: got tensors on {', '.join(sorted(places))} in one call. Move them to one "
            "device, or make a call for each."
        )
    return found


class Exchange:
    """A request on its way; ``results`` waits for it.

    On a GPU it follows what torch's current stream has been given, and that stream then follows it.

    Args:
        kind, call: as for ``agree.Request``.
        tensors: as ``all_checked`` returns them, splits on the CPU; unchanged until ``results``
            returns.
        outputs: what the results are written into, of the same shapes; default: new tensors.
    """

    def __init__(self, kind: str, tensors: Tensors, outputs: Tensors = (), **call: Any) -> None:
        self._inputs = [tensor.detach() for tensor in tensors]
        if kind in ("allreduce", "broadcast") and not outputs:
            outputs = list(map(torch.empty_like, self._inputs))
        self._results = dict(enumerate(outputs))
        self._stream: Any = None
        if self._inputs[0].is_cuda:
            self._stream = torch.cuda.current_stream(self._inputs[0].device)
            call |= {"device": self._stream.device_index, "stream": self._stream.cuda_stream}
            for tensor in [t for t in (*self._inputs, *outputs) if t.is_cuda]:
                tensor.record_stream(self._stream)  # may be of another
        inputs = [
            agree.Memory.at(t.data_ptr(), name_of(t.dtype), tuple(t.shape)) for t in self._inputs
        ]
        there = [tensor.data_ptr() for tensor in outputs] or None
        call["allocate"] = agree.Allocate(self._allocate)
        self._request = agree.Request(kind, inputs, there, (self._inputs, outputs), **call)

    def _allocate(self, index: int, dims: int, shape: Any) -> int | None:
        like = self._inputs[index]
        try:
            with torch.cuda.stream(self._stream):
                result = torch.empty(shape[:dims], dtype=like.dtype, device=like.device)
        except RuntimeError:  # the core says that there is no memory
            return None
        self._results[index] = result
        return int(result.data_ptr())

    def results(self) -> list[torch.Tensor]:
        """Return the results. Raises as ``agree.Request.wait``."""
        self._request.wait()
        if self._stream is not None:  # another one may be current now
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._request.release()
        return [self._results[i] for i in range(len(self._inputs))]
