"""Python runs this first in all processes of tests, which then start in two thirds of the time.

It raises the thresholds of the garbage collector while TensorFlow is imported, which creates many
objects, and hides scikit-learn, which Keras imports for a wrapper that no test uses. From
``hvd.init()`` on, the collector works as it does for users.
"""

import gc
import sys


class _AfterImports:
    """Finds no module; detects that ``hvd.init`` is about to be loaded."""

    def find_spec(self, name, path=None, target=None):
        if name == "hvd_keras.lifecycle":
            gc.set_threshold(*_usual)
            sys.meta_path.remove(self)


_usual = gc.get_threshold()
gc.set_threshold(100_000, 20, 20)
sys.meta_path.insert(0, _AfterImports())
sys.modules["sklearn"] = None  # type: ignore[assignment]
