"""Python runs this first in all processes of tests, which then start in half the time.

The garbage collector hardly runs while TensorFlow is imported, which creates many objects, and
leaves these alone later: from ``hvd.init()`` on, it treats all others as it does for users. And
Keras does not find what it imports although tests do not need it there: scikit-learn, IPython, and
pandas except in tests/parallel.
"""

import gc
import importlib.util
import os
import sys

_UNNEEDED = {"IPython", "sklearn"}
if "HVD_TEST_PARALLEL" not in os.environ:
    _UNNEEDED.add("pandas")


class _WhileImporting:
    """Finds ``hvd.init``, which ends this, and hides modules from Keras."""

    def find_spec(self, name, path=None, target=None):
        if name == "keras":
            for unneeded in _UNNEEDED:
                sys.modules.setdefault(unneeded, None)
        if name != "hvd_keras.lifecycle":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_end(module):
            sys.meta_path.insert(0, self)
            execute(module)  # which imports TensorFlow, unless the script has
            sys.meta_path.remove(self)
            for unneeded in _UNNEEDED:
                if sys.modules.get(unneeded, self) is None:
                    del sys.modules[unneeded]
            gc.freeze()
            gc.set_threshold(*_usual)

        spec.loader.exec_module = execute_and_end
        return spec


_usual = gc.get_threshold()
gc.set_threshold(1_000_000, 20, 20)
sys.meta_path.insert(0, _WhileImporting())
