"""``python -m hvd_keras.migrate train.py``: what to change in a script written for Horovod.

Prints one line per place, with what is to be written there. ``--write`` changes what is certain:
imports, arguments whose names or places differ, and what Keras 3 and TensorFlow 2 have in another
form.
"""

from collections.abc import Iterator

from hvd_keras.migrate import horovod_names, older_keras, tensorflow_1
from hvd_keras.migrate.source import Finding, Source


class Script(Source):
    """A script, and ``findings``: what must change in it, in the order of the places."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.findings = sorted(set(self._find()))

    def line(self, finding: Finding) -> int:
        """Return the number of its line, from 1."""
        return self.data[: finding.start].count(b"\n") + 1

    def written(self) -> str:
        """Return the text with all that is certain changed."""
        data, end = b"", 0
        for finding in self.findings:
            if finding.new is not None and finding.start >= end:
                data += self.data[end : finding.start] + finding.new.encode()
                end = finding.end
        return (data + self.data[end:]).decode()

    def _find(self) -> Iterator[Finding]:
        found = [*tensorflow_1.look(self)]
        removed = [finding for finding in found if finding.new == ""]
        yield from found
        for look in (horovod_names.look, older_keras.look):
            for finding in look(self):
                # What is in a line that goes needs no remark.
                if not any(one.start <= finding.start < one.end for one in removed):
                    yield finding
