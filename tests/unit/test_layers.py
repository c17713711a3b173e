"""Which folder of native/ may include which, and no import of Python's goes in a circle."""

import ast
import graphlib
import pathlib
import re

NATIVE = pathlib.Path(__file__).parents[2] / "native"
SOURCES = sorted(path for path in NATIVE.rglob("*") if path.suffix in (".h", ".cc"))

LOWEST = {"core/base"}
MATH = LOWEST | {"core/request", "core/math"}
TESTS = MATH | {"core", "core/cpu", "core/gpu", "core/engine"}
# For each folder, the other folders whose files it may include.
MAY_INCLUDE = {
    "core/base": set(),
    "core/request": LOWEST,
    "core/math": MATH,
    "core/cpu": MATH,
    "core/gpu": MATH,
    "core/engine": MATH,
    "core": TESTS,
    "tensorflow": {"core", "core/base", "core/request"},
    "xla": {"core", "core/base", "core/request", "tensorflow"},
    "tests": TESTS | {"tests/support"},
    "tests/gpu": TESTS | {"tests/support"},
    "tests/prove": TESTS | {"tests/support"},
    "tests/simulate": TESTS,
    "tests/simulate/model/core/base": {"tests/simulate"},
    "tests/support": TESTS,
}
# The files of core that code outside of it may include.
KERNEL_API = {"core/kernel_api.h"}


def includes(path: pathlib.Path) -> list[str]:
    """Returns the project's files that a file includes, as paths from native/."""
    named = re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
    return [name for name in named if (NATIVE / name).exists()]


def test_includes_go_down_only() -> None:
    wrong = []
    for path in SOURCES:
        folder = str(path.parent.relative_to(NATIVE))
        for name in includes(path):
            below = str(pathlib.PurePath(name).parent)
            outside = below == "core" and folder in ("tensorflow", "xla")
            if below != folder and below not in MAY_INCLUDE[folder]:
                wrong.append(f"{path.relative_to(NATIVE)} includes {name}")
            if outside and name not in KERNEL_API:
                wrong.append(
                    f"{path.relative_to(NATIVE)} includes {name}, which is not for kernels"
                )
    assert wrong == []


def test_includes_show_the_folder() -> None:
    for path in SOURCES:
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE):
            libraries = re.match(r"(absl|tensorflow|xla)/", name)
            assert (NATIVE / name).exists() or libraries, f"{path} includes {name}"


def test_units_do_not_include_each_other_in_circles() -> None:
    # A unit is a header and its source: a.cc may include b.h, but then b.cc must not include a.h.
    below: dict[str, set[str]] = {}
    for path in SOURCES:
        unit = str(path.relative_to(NATIVE).with_suffix(""))
        units = {str(pathlib.PurePath(name).with_suffix("")) for name in includes(path)}
        below.setdefault(unit, set()).update(units - {unit})
    while leaves := [unit for unit, units in below.items() if not units & below.keys()]:
        for unit in leaves:
            del below[unit]
    assert below == {}


def test_every_folder_says_what_it_is_for() -> None:
    text = (NATIVE / "core" / "README.md").read_text()
    for folder in MAY_INCLUDE:
        name = folder.removeprefix("core/")
        if folder.startswith("core/"):
            assert f"| `{name}/` |" in text, folder


def imports(path: pathlib.Path, modules: set[str]) -> set[str]:
    """Returns the modules of the package that a file imports anywhere, also for types alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else str(node.module) for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules


def test_no_module_imports_what_imports_it() -> None:
    root = NATIVE.parent
    modules = {}
    for folder, package in (("hvd_keras", "hvd_keras"), ("callbacks", "hvd_keras.callbacks")):
        for path in (root / folder).rglob("*.py"):
            parts = path.relative_to(root / folder).with_suffix("").parts
            modules[".".join([package, *parts]).removesuffix(".__init__")] = path
    graph = {name: imports(path, set(modules)) for name, path in modules.items()}
    assert any(graph.values())
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError shows the circle
