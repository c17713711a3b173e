"""What ``fit`` and ``evaluate`` need of a backend of Keras: a module with these functions.

They are ``patches.fit_on_tensorflow`` and ``torch.fitting``.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from hvd_keras.data.sources import Passes
from hvd_keras.runtime.process_sets import ProcessSet

if TYPE_CHECKING:
    from hvd_keras.training.fit_state import Fit


class Backend(Protocol):
    """The functions of such a module; ``source`` is what ``fit`` reads."""

    COUNTS_ROWS: bool  # losses can be weighed by the rows of the ranks' batches

    def check(self, model: Any) -> None:
        """Raise ValueError if several ranks cannot train a model."""

    def prepare(self, own: "Fit", source: Any) -> None:
        """Create the variables of a model, and find the passes over its data."""

    def build_metrics(self, own: "Fit") -> None:
        """Create the variables of metrics, as the first step would."""

    def weighed(
        self, model: Any, process_set: ProcessSet, averages: bool, method: str
    ) -> AbstractContextManager[None]:
        """Weigh the losses of a model's steps: of ``method``, train_step or test_step."""

    def weigh_classes(self, arguments: dict[str, Any]) -> None:
        """Let ``class_weight`` of ``fit`` multiply the weights of ``uneven="pad"``."""

    def passes_of(self, source: Any) -> list[Passes]:
        """Return the passes over all sharded sources that data are made of."""

    def repeats(self, source: Any) -> bool:
        """Whether a pass over data may have several over a sharded source."""

    def repeated(self, source: Any) -> Passes | None:
        """Return the passes over a sharded source that is repeated, if it is the only one."""

    def rows_in_steps(self, source: Any) -> Any:
        """Describe how many rows each step has; None: that is unknown."""

    def can_look_at(self, source: Any) -> bool:
        """Whether ``pass_first_batch`` can pass the batches of data."""

    def pass_first_batch(self, model: Any, look: Callable[[Any], None]) -> None:
        """Let a function see the first batch that the next step gets; None: there is none."""

    def validate_together(self, everywhere: bool) -> None:
        """Set whether all ranks take the next steps of validation."""

    def gpu_bytes(self) -> int | None:
        """Return how much memory of its GPU is in use; None without a GPU."""
