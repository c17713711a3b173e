"""Rules of this repository that a machine can check."""

import collections
import pathlib
import re
import subprocess
import sys

import hvd_keras as hvd

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("hvd_keras", "callbacks", "native", "tests", "examples")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".cc", ".h")
]


def test_files_have_at_most_500_lines() -> None:
    assert SOURCES
    assert [path for path in SOURCES if len(path.read_text().splitlines()) > 500] == []


def test_folders_have_at_most_20_files() -> None:
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    sizes = collections.Counter(pathlib.Path(file).parent for file in files)
    assert {folder: size for folder, size in sizes.items() if size > 20} == {}


def test_only_settings_and_the_launcher_read_the_environment() -> None:
    readers = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if re.search(r"getenv|os\.environ", path.read_text())
        and path.parts[len(ROOT.parts)] in ("hvd_keras", "callbacks", "native")
    ]
    allowed = {"hvd_keras/settings.py", "native/core/base/settings.cc"}
    assert {r for r in readers if not r.startswith("hvd_keras/launch/")} <= allowed


def test_the_core_knows_neither_tensorflow_nor_python() -> None:
    for path in (ROOT / "native" / "core").rglob("*.[ch]*"):
        assert not re.search(r'#include [<"](tensorflow|Python)', path.read_text()), path


def test_the_middle_knows_no_kinds() -> None:
    names = re.compile(r"allreduce|allgather|broadcast", re.IGNORECASE)
    for name in ("engine.cc", "engine.h", "agreement.cc", "agreement.h"):
        assert not names.search((ROOT / "native" / "core" / "engine" / name).read_text()), name


def test_every_public_name_exists_and_is_documented() -> None:
    text = "".join(
        (ROOT / name).read_text() for name in ("README.md", "docs/migrating.md", "docs/design.md")
    )
    for name in hvd.__all__:
        value = getattr(hvd, name)
        as_code = rf"hvd\.{name}\b|`[^`\n]*\b{name}\b[^`\n]*`"
        assert re.search(as_code, text), f"{name} stands in no document"
        if callable(value):
            assert value.__doc__, f"{name} has no docstring"
    for name in hvd.callbacks.__all__:
        assert name in text, f"callbacks.{name} stands in no document"


def test_what_runs_on_other_hosts_imports_the_standard_library_alone() -> None:
    folder = ROOT / "hvd_keras" / "launch" / "onhost"
    found = {
        (path.name, module)
        for path in folder.glob("*.py")
        for module in re.findall(r"^ *(?:from|import) ([\w.]+)", path.read_text(), re.MULTILINE)
    }
    assert found, folder
    assert not {
        (name, module)
        for name, module in found
        if module.partition(".")[0] not in {*sys.stdlib_module_names, "onhost", ""}
        and not module.startswith("hvd_keras.launch.onhost")
    }
