"""``python -m hvd_keras.auto train.py ...``: a script of one process on this rank."""

import gc
import sys

from hvd_keras.auto.launching import SCALE_BATCH, SESSION
from hvd_keras.launch.onhost import script
from hvd_keras.runtime import settings

if __name__ == "__main__":
    words = sys.argv[1:]
    flags = [words.pop(0) for flag in (SCALE_BATCH, SESSION) if words[0] == flag]
    if SESSION in flags and settings.launched_rank() == 0:
        from hvd_keras.agents.stand_in import stand_in

        try:
            stand_in(words[0])
        except (FileNotFoundError, ConnectionRefusedError):
            sys.exit("hvd.auto: the first of the hosts must be that of the session")
        sys.exit()
    # TensorFlow's import makes hardly any garbage, which is not worth the collector's time.
    gc.disable()
    from hvd_keras.auto.start import auto

    gc.freeze()
    gc.enable()
    auto(SCALE_BATCH in flags)
    sys.path[0] = script.folder_of(words)
    script.run(words)
