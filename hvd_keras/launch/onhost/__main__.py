"""Runs `main` of a module of hvd_keras: `python -I -S FOLDER MODULE ARGUMENT …`.

That starts sooner than `python -m` would, which imports hvd_keras and looks for all installed
packages; what runs here needs none of them.
"""

import importlib
import sys
from types import ModuleType

package = ModuleType("hvd_keras")
package.__path__ = [sys.path.pop(0).removesuffix("/launch/onhost")]
sys.modules["hvd_keras"] = package
sys.exit(importlib.import_module(f"hvd_keras.{sys.argv.pop(1)}").main())
