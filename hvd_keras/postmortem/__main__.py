"""``python -m hvd_keras.postmortem``."""

import sys

from hvd_keras.postmortem import main

sys.exit(main())
