"""The sizes of the gradients of known networks, and the times at which they are ready.

python benchmarks/layers.py   # recreates data/layers.json, with Keras
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

STORED = Path(__file__).parent / "data" / "layers.json"
NAMES = ("ResNet50", "ResNet101", "InceptionV3", "VGG16")


@dataclasses.dataclass(frozen=True)
class Network:
    """Bytes of the trainable variables, in Keras's order, and their layers' multiplications."""

    sizes: Sequence[float]
    work: Sequence[float]

    def ready(self, forward: float, backward: float) -> list[float]:
        """Returns when each gradient is ready, in seconds from the start of the step; last
        variable first."""
        work = np.cumsum(np.asarray(self.work, float)[::-1])
        return (forward + backward * work / work[-1]).tolist()


def network(name: str) -> Network:
    """Returns a network of keras.applications with its default image size."""
    stored = json.loads(STORED.read_text())[name]
    return Network(stored["bytes"], stored["work"])


def layers_of(name: str) -> dict[str, list[int]]:
    """Computes a network's bytes and multiplications per variable, with Keras."""
    import keras

    sizes, work = [], []
    for layer in getattr(keras.applications, name)(weights=None).layers:
        for variable in layer.trainable_variables:
            shape = variable.shape
            # A kernel is used at each position of its layer's output; other variables cost nothing.
            places = math.prod(layer.output.shape[1:-1]) if len(shape) > 1 else 0
            sizes.append(4 * math.prod(shape))
            work.append(math.prod(shape) * places)
    return {"bytes": sizes, "work": work}


def main() -> None:
    stored = (f'"{name}": {json.dumps(layers_of(name), separators=(",", ":"))}' for name in NAMES)
    STORED.write_text("{\n" + ",\n".join(stored) + "\n}\n")


if __name__ == "__main__":
    main()
