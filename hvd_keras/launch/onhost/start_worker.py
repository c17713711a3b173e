"""Starts a rank's worker, by the path of this file.

`python -I -S start_worker.py` starts sooner than `python -m` would, which imports hvd_keras and
looks for all installed packages; the worker needs none of them.
"""

import sys

sys.path.append(__file__.rpartition("/onhost/")[0])
from onhost import worker  # type: ignore[import-not-found]

sys.exit(worker.main())
