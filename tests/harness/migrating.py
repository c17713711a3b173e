"""The tables of docs/migrating.md, from those that the package is built from.

``python -m tests.harness.migrating`` writes them into the file.
"""

import pathlib
import re

from hvd_keras.horovod import names
from hvd_keras.launch import horovodrun

FILE = pathlib.Path(__file__).parents[2] / "docs" / "migrating.md"


def table_of_names() -> str:
    lines = [
        "|name|state|`import hvd_keras as hvd`|`import horovod…`|",
        "|---|---|---|---|",
    ]
    for section, rows in names.TABLE.items():
        lines.append(f"|**{section}**||||")
        for row in rows:
            listed = ", ".join(f"`{name}`" for name in row.names.split())
            horovod = row.horovod if row.note or row.horovod != names.LIKEWISE else ""
            if row.home is None and row.state != "same" and row.horovod == names.LIKEWISE:
                horovod = "not there"
            state = "" if row.state == "same" else row.state
            lines.append(f"|{listed}|{state}|{row.note}|{horovod}|")
    return "\n".join(lines)


def table_of_options() -> str:
    flags_of: dict[str, list[str]] = {}
    for option in horovodrun.OPTIONS:
        if option.option:
            meaning = f"`{option.option}`"
        elif option.setting:
            meaning = f"`{option.setting[0]}`, for the ranks"
        else:
            meaning = f"{'refused: ' * option.refused}{option.note}"
        flags_of.setdefault(meaning, []).extend(f"`{flag}`" for flag in option.flags)
    lines = ["|`horovodrun`|`hvdrun`|", "|---|---|"]
    lines += [f"|{', '.join(flags)}|{meaning}|" for meaning, flags in flags_of.items()]
    return "\n".join(lines)


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
