"""Runs `main` of a module of this package: `python -I -S FOLDER MODULE ARGUMENT …`.

That starts sooner than `python -m` would, which imports hvd_keras and looks for all installed
packages; what runs here needs none of them.
"""

import importlib
import sys

sys.path.append(sys.path.pop(0).rpartition("/")[0])
module = importlib.import_module(f"onhost.{sys.argv.pop(1)}")
sys.exit(module.main())
