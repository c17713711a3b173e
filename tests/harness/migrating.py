"""The tables of docs/migrating.md, from those that the package is built from.

``python -m tests.harness.migrating`` writes them into the file.
"""

import pathlib
import re
from collections.abc import Iterable

from hvd_keras.horovod import horovodrun, names

FILE = pathlib.Path(__file__).parents[2] / "docs" / "migrating.md"


def table_of_names() -> str:
    lines = [
        "|name|state|`import hvd_keras as hvd`|`import horovod…`|",
        "|---|---|---|---|",
    ]
    for section, rows in names.TABLE.items():
        lines.append(f"|**{section}**||||")
        for row in rows:
            if not row.note:  # no difference
                continue
            listed = ", ".join(f"`{name}`" for name in row.names.split())
            horovod = row.horovod
            if row.home is None and row.state != "same" and row.horovod == names.LIKEWISE:
                horovod = "not available"
            state = "" if row.state == "same" else row.state
            lines.append(f"|{listed}|{state}|{row.note}|{horovod}|")
    return "\n".join(lines)


def table_of_options() -> str:
    def flags(names: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in names)

    settings = [(flag, name) for flag, (name, _) in horovodrun.SETTING_OPTIONS.items()]
    flag, (name, _) = horovodrun.NO_STALL_CHECK
    rows = [(flags(names), f"`{option}`") for option, names in horovodrun.ALIASES.items()]
    rows += [(f"`{flag}`", f"`{name}`, for the ranks") for flag, name in [*settings, (flag, name)]]
    rows += [(f"`{flag}`", f"refused: {note}") for flag, note in horovodrun.REFUSED.items()]
    lines = ["|`horovodrun`|`hvdrun`|", "|---|---|"]
    return "\n".join([*lines, *(f"|{theirs}|{ours}|" for theirs, ours in rows)])


def written(text: str) -> str:
    """The documentation with these tables."""
    for name, table in (("names", table_of_names()), ("options", table_of_options())):
        pattern = rf"(<!-- {name}[^\n]*-->\n).*?(\n<!-- end of {name} -->)"
        text, found = re.subn(
            pattern, lambda match, t=table: match[1] + t + match[2], text, flags=re.DOTALL
        )
        assert found == 1, f"{FILE} has {found} places for the table of {name}"
    return text


if __name__ == "__main__":
    FILE.write_text(written(FILE.read_text()))
