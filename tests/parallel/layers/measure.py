"""Writes docs/tables/layers.md: hvdrun -np 2 python -m tests.parallel.layers.measure [TEXT]."""

import pathlib
import sys

import keras

import hvd_keras as hvd

PAGE = pathlib.Path("docs/tables/layers.md")
MEANING = {
    "=": "equal to rounding",
    "random": "random, of its own on each rank",
    "told": "compares rows: a warning",
    "differs": "not synchronized",
}


def _shown(names: dict[str, None]) -> str:
    shown = list(names)
    return ", ".join(shown) if len(shown) < 10 else f"{len(shown)} classes, such as {shown[1]}"


def main(only: str = "") -> None:
    hvd.init()
    from tests.parallel.layers import cases, compare

    lines = [
        "# Layers, losses and metrics compared with one process",
        "",
        f"Two ranks and one process train with each class of Keras {keras.__version__}, on rows",
        "that differ by rank, with weights and each reduction. `make layers` writes this page.",
    ]
    wrong = []
    for kind in ("layers", "losses", "metrics"):
        found: dict[str, dict[str, None]] = {}
        for of, text, reduction in cases.cases(kind):
            if only not in text:
                continue
            result = compare.outcome(kind, of, text, reduction)
            if hvd.rank() == 0:
                print(kind, of, text, reduction, result, flush=True)
            if result not in MEANING or (result == "differs" and text not in cases.DIFFERENT):
                wrong.append((kind, text, reduction, result))
            shown = cases.class_of(text) if result in ("=", "random") else text
            found.setdefault(result, {})[f"`{shown}`"] = None
        lines += ["", f"## {kind.capitalize()}", "", "| | |", "|---|---|"]
        lines += [f"|{MEANING[r]}|{_shown(found[r])}|" for r in MEANING if r in found]
    if hvd.rank() == 0 and not only and not wrong:
        PAGE.write_text("\n".join(lines) + "\n")
    sys.exit(str(wrong) if wrong else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
