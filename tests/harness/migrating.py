"""The table of docs/migrating.md, from the one that the package is built from.

``python -m tests.harness.migrating`` writes it into the file.
"""

import pathlib
import re

from hvd_keras.horovod import names

FILE = pathlib.Path(__file__).parents[2] / "docs" / "migrating.md"


def table_of_names() -> str:
    lines = [
        "|name|state|`import hvd_keras as hvd`|`import horovod…`|",
        "|---|---|---|---|",
    ]
    for section, rows in names.TABLE.items():
        different = [row for row in rows if row.note]
        if different:
            lines.append(f"|**{section}**||||")
        for row in different:
            listed = ", ".join(f"`{name}`" for name in row.names.split())
            horovod = row.horovod
            if row.home is None and row.state != "same" and row.horovod == names.LIKEWISE:
                horovod = "not available"
            state = "" if row.state == "same" else row.state
            lines.append(f"|{listed}|{state}|{row.note}|{horovod}|")
    return "\n".join(lines)


def written(text: str) -> str:
    """The documentation with this table."""
    pattern = r"(<!-- names[^\n]*-->\n).*?(\n<!-- end of names -->)"
    text, found = re.subn(
        pattern, lambda match: match[1] + table_of_names() + match[2], text, flags=re.DOTALL
    )
    assert found == 1, f"{FILE} has {found} places for the table"
    return text


if __name__ == "__main__":
    FILE.write_text(written(FILE.read_text()))
