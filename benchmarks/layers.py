"""What the gradients of known networks weigh, and when they are ready.

python benchmarks/layers.py   # makes layers.json again, with Keras
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

STORED = Path(__file__).with_name("layers.json")
NAMES = ("ResNet50", "ResNet101", "InceptionV3", "VGG16")


@dataclasses.dataclass(frozen=True)
class Network:
    """Bytes of the trainable variables, in Keras's order, and their layers' multiplications."""

    sizes: Sequence[float]
    work: Sequence[float]

    def ready(self, forward: float, backward: float) -> list[float]:
        """Seconds from the start of the step at which each gradient is there, last variable
        first."""
        work = np.cumsum(np.asarray(self.work, float)[::-1])
        return (forward + backward * work / work[-1]).tolist()


def network(name: str) -> Network:
    """Of keras.applications, for its usual images."""
    stored = json.loads(STORED.read_text())[name]
    return Network(stored["bytes"], stored["work"])


def layers_of(name: str) -> dict[str, list[int]]:
    """A network's bytes and multiplications by variable, from Keras."""
    import keras

    sizes, work = [], []
    for layer in getattr(keras.applications, name)(weights=None).layers:
        for variable in layer.trainable_variables:
            shape = variable.shape
            # A kernel is used at each place of its layer's output; other variables cost nothing.
            places = math.prod(layer.output.shape[1:-1]) if len(shape) > 1 else 0
            sizes.append(4 * math.prod(shape))
            work.append(math.prod(shape) * places)
    return {"bytes": sizes, "work": work}


def main() -> None:
    stored = (f'"{name}": {json.dumps(layers_of(name), separators=(",", ":"))}' for name in NAMES)
    STORED.write_text("{\n" + ",\n".join(stored) + "\n}\n")


if __name__ == "__main__":
    main()
