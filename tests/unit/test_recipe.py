"""The recipe "Adding a collective": its places exist. `make recipe-test` carries it out."""

import pathlib
import re

from tests.recipe.steps import STEPS

ROOT = pathlib.Path(__file__).parents[2]


def test_the_document_names_the_files_of_the_steps() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    recipe = text[text.index("## Adding a collective") :]
    table = recipe[: recipe.index("\n\n", recipe.index("| file |"))]
    named = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    stepped = {step.path.replace("shift.py", "") for step in STEPS}
    assert set(named) == stepped
    assert len(named) <= 9


def test_every_place_exists_once() -> None:
    for step in STEPS:
        path = ROOT / step.path
        assert path.exists() == bool(step.anchor), path
        if step.anchor:
            assert path.read_text().splitlines().count(step.anchor) == 1, step
