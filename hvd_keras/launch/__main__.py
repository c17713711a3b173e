"""`python -m hvd_keras.launch` is `hvdrun`."""

import sys

from hvd_keras.launch.cli import main

sys.exit(main())
