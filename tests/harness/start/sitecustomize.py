"""Python runs this first in all processes of tests: they start in two thirds of the time.

Importing TensorFlow makes more objects than Python's collector expects, and Keras imports
scikit-learn, if it is there, for a wrapper that no test uses.
"""

import gc
import sys

gc.set_threshold(100_000, 20, 20)
sys.modules["sklearn"] = None  # type: ignore[assignment]
