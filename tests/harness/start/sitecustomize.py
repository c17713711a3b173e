"""Python runs this first in all processes of tests, which then start in half the time.

The garbage collector hardly runs while TensorFlow is imported, which creates many objects, and
leaves these alone later: from ``hvd.init()`` on, it treats all others as it does for users. And
Keras does not find what it imports although tests do not need it there: scikit-learn, IPython, and
pandas except in tests/parallel. Files are not forced onto the disk, which others may use: tests
kill processes, not machines. Datasets do not tune themselves: every fourth iterator that does so
sleeps, when it is destroyed, for as long as it has existed (up to a minute; TensorFlow 2.21).
"""

import functools
import gc
import importlib.util
import os
import sys

_UNNEEDED = {"IPython", "sklearn"}
if "HVD_TEST_PARALLEL" not in os.environ:
    _UNNEEDED.add("pandas")


def _hide(execute, module):
    hidden = _UNNEEDED - sys.modules.keys()
    sys.modules.update(dict.fromkeys(hidden))
    try:
        execute(module)
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


def _collect_again(execute, module):
    execute(module)  # which imports TensorFlow, unless the script has
    gc.freeze()
    gc.set_threshold(*_usual)


def _do_not_tune(execute, module):
    execute(module)
    create = module.OwnedIterator._create_iterator

    def create_untuned(self, dataset):
        options = module.options_lib.Options()
        options.autotune.enabled = False
        create(self, dataset.with_options(options))

    module.OwnedIterator._create_iterator = create_untuned


_AROUND = {
    "keras": _hide,
    "hvd_keras.lifecycle": _collect_again,
    "tensorflow.python.data.ops.iterator_ops": _do_not_tune,
}


class _Finder:
    """Finds modules whose execution is wrapped."""

    def find_spec(self, name, path=None, target=None):
        if name not in _AROUND:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        if spec is not None:
            spec.loader.exec_module = functools.partial(_AROUND[name], spec.loader.exec_module)
        return spec


os.fsync = lambda descriptor: None
_usual = gc.get_threshold()
gc.set_threshold(1_000_000, 20, 20)
sys.meta_path.insert(0, _Finder())
