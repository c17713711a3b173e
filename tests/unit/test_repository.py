"""Rules of this repository that can be checked automatically."""

import collections
import pathlib
import re
import subprocess
import sys
import tokenize

import hvd_keras as hvd
from hvd_keras.hvdrun import EXTENSIONS
from hvd_keras.launch import options

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


def test_one_line_of_python_in_20_has_a_comment() -> None:
    """Nobody sees from code alone why it is so, what it costs, and which shape an array has."""
    lines = comments = 0
    for path in SOURCES:
        if path.suffix == ".py" and path.parts[len(ROOT.parts)] in ("hvd_keras", "callbacks"):
            with tokenize.open(path) as file:
                tokens = list(tokenize.generate_tokens(file.readline))
            lines += tokens[-1].start[0] - 1
            comments += sum(token.type == tokenize.COMMENT for token in tokens)
    assert comments >= 0.05 * lines, f"{comments} of {lines} lines"


def test_folders_have_at_most_20_files() -> None:
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    sizes = collections.Counter(pathlib.Path(file).parent for file in files)
    assert {folder: size for folder, size in sizes.items() if size > 20} == {}
    known = {"hvd_keras", "native", "callbacks", "tests", "examples", "benchmarks", "docs"}
    found = {file.split("/")[0] for file in files if "/" in file}
    assert found == known | {"deploy", ".ci"}  # and none that a script has left


def test_no_folders_import_each_other() -> None:
    """In a contract of import-linter a colon would let them; a bar does not."""
    text = (ROOT / "pyproject.toml").read_text()
    layers = re.findall(r"^layers = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert len(layers) == 3
    assert not [row for rows in layers for row in re.findall('"(.*)"', rows) if ":" in row]
    rooms = [*(ROOT / "hvd_keras").glob("[a-z]*.py"), *(ROOT / "hvd_keras").glob("*/__init__.py")]
    names = {path.parent.name if path.stem == "__init__" else path.stem for path in rooms}
    assert names == set(re.findall(r"\w+", layers[1]))


def test_only_settings_and_the_launcher_read_the_environment() -> None:
    readers = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if re.search(r"\b(secure_)?getenv|os\.environ", path.read_text())
        and path.parts[len(ROOT.parts)] in ("hvd_keras", "callbacks", "native")
    ]
    allowed = {"hvd_keras/runtime/settings.py", "native/core/base/settings.cc"}
    # What starts programs, with an environment.
    allowed |= {"hvd_keras/horovod/__main__.py"}
    starters = ("hvd_keras/launch/", "hvd_keras/agents/")
    assert {r for r in readers if not r.startswith(starters)} <= allowed


def test_the_launcher_does_not_know_what_uses_it() -> None:
    for path in (ROOT / "hvd_keras" / "launch").rglob("*.py"):
        assert not re.search(r"horovod|spark|\bray\b|\bagents\b", path.read_text(), re.I), path


def test_what_depends_on_the_backend_is_in_one_room() -> None:
    room = list((ROOT / "hvd_keras" / "torch").rglob("*.py"))
    assert sum(len(path.read_text().splitlines()) for path in room) <= 1890
    asks = re.compile(r"keras_backend\(\)|backend\.backend\(\)|KERAS_BACKEND")
    asking = {
        str(path.relative_to(ROOT / "hvd_keras"))
        for path in SOURCES
        if path.parts[len(ROOT.parts)] in ("hvd_keras", "callbacks") and path not in room
        if asks.search(path.read_text())
    }
    # What loads the room, what refuses another backend, and the names of both frameworks.
    assert asking <= {
        *("__init__.py", "data/__init__.py", "ops/__init__.py"),
        *("runtime/keras.py", "runtime/settings.py"),
    }


def test_the_core_knows_neither_tensorflow_nor_python() -> None:
    for path in (ROOT / "native" / "core").rglob("*.[ch]*"):
        assert not re.search(r'#include [<"](tensorflow|Python)', path.read_text()), path


def test_no_number_depends_on_the_locale() -> None:
    """Other libraries may choose one in which decimals have a comma."""
    formats = r"strto[dfl]+|sto[dfl]+|atof|[sf]?scanf|setlocale|locale\(\"\"\)"
    wrong = re.compile(rf"\b({formats})\s*\(|printf[^;]*%[-+ #0-9.*]*l?[aefgAEFG]|ostringstream")
    right = {"base/numbers.cc": ["strtod_l("], "request/collectives.cc": ["locale::classic()"]}
    for folder in ("core", "tensorflow", "xla"):
        for path in (ROOT / "native" / folder).rglob("*.*"):
            text = path.read_text()
            if found := wrong.search(text):
                parts = right.get(str(path.relative_to(ROOT / "native" / "core")))
                assert parts, (path, found[0])
                assert all(part in text for part in parts), path


def test_the_middle_knows_no_kinds() -> None:
    table = (ROOT / "native" / "core" / "request" / "collectives.cc").read_text()
    kinds = re.findall(r"\{Kind::(\w+), ", table)
    assert "allreduce" in kinds
    for also in ("join", "reduce"):  # a thread's, and what ranks do with texts
        kinds.remove(also)
    names = re.compile("|".join(kinds), re.IGNORECASE)
    middle = [
        *(ROOT / "native" / "core" / "engine").glob("*"),
        ROOT / "native/tensorflow/kernels.cc",
    ]
    for path in middle:
        assert not names.search(path.read_text()), path


def test_the_path_of_a_gradient_is_short_and_documented() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    path = text[text.index("## One gradient") :]
    shown = {name: int(lines) for lines, name in re.findall(r"^ +(\d+)  (\S+)", path, re.MULTILINE)}
    actual = {name: len((ROOT / name).read_text().splitlines()) for name in shown}
    # Small edits need no new number.
    wrong = {name: n for name, n in actual.items() if abs(n - shown[name]) > shown[name] // 10}
    assert wrong == {}, "write these numbers into docs/architecture.md"
    native = [lines for name, lines in actual.items() if name.startswith("native/")]
    assert len(native) <= 7
    assert sum(native) <= 1500


def test_the_pages_have_at_most_15000_words() -> None:
    """As ``cat docs/**/*.md README.md | wc -w`` counts them."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert sum(len(path.read_text().split()) for path in pages) <= 15_000


def test_what_runs_pytest_installs_it() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([\w-]+):(.*)\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    running = {name: needs for name, needs, recipe in targets if "-m pytest" in recipe}
    assert "test-all" in running
    assert [name for name, needs in running.items() if "setup" not in needs.split("##")[0]] == []


def test_every_public_name_is_documented() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    for name in hvd.__all__:
        assert re.search(rf":: (hvd_keras\.)?{name}(\.|$)|hvd\.{name}\b", text, re.MULTILINE), name
        if callable(getattr(hvd, name)):
            assert getattr(hvd, name).__doc__, f"{name} has no docstring"
    for name in hvd.callbacks.__all__:
        assert f":: hvd_keras.callbacks.{name}\n" in text


def test_the_errors_that_are_explained_exist() -> None:
    explained = re.findall(
        r"^(`[^`]+`.*)\n: ", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE
    )
    folders = (ROOT / "hvd_keras", ROOT / "native" / "core")
    paths = [path for folder in folders for path in folder.rglob("*.*")]
    sources = "".join(path.read_text() for path in paths if path.suffix in (".py", ".cc"))
    sources = re.sub(r'"\s*\+?\s*f?"|\{[^{}"]*\}|" \+ [^"]* \+ "', "", sources)
    assert len(explained) > 10
    for text in re.findall("`([^`]+)`", "\n".join(explained)):
        parts = [part.strip(" ,;") for part in text.split("…")]
        assert all(part in sources for part in parts), (text, parts)


def test_python_knows_the_ways_to_leave_a_job_as_the_core_does() -> None:
    text = (ROOT / "hvd_keras" / "lifecycle.py").read_text()
    names = re.findall(r"^    [A-Z_]+ = (\d)  # (\w+): ", text, re.MULTILINE)
    header = (ROOT / "native/core/engine/engine.h").read_text()
    in_cpp = re.search(r"enum class LeaveResult \{ ([\w, ]+) \}", header)
    assert in_cpp
    assert names == [(str(number), name) for number, name in enumerate(in_cpp[1].split(", "))]


def settings() -> set[str]:
    names = ("hvd_keras/runtime/settings.py", "hvd_keras/launch/onhost/fork_server.py")
    sources = [ROOT / name for name in (*names, "native/core/base/settings.cc")]
    return {n for path in sources for n in re.findall(r'"(HVD_[A-Z_]+)"', path.read_text())}


def test_every_setting_is_documented() -> None:
    table = (ROOT / "docs" / "guide.md").read_text().partition("## Settings\n")[2]
    assert settings() == set(re.findall(r"`(HVD_[A-Z_]+)`", table))


def test_what_runs_on_other_hosts_imports_the_standard_library_alone() -> None:
    folder = ROOT / "hvd_keras" / "launch" / "onhost"
    found = {
        (path.name, module)
        for path in [*folder.glob("*.py"), ROOT / "hvd_keras" / "runtime" / "linux.py"]
        for module in re.findall(r"^ *(?:from|import) ([\w.]+)", path.read_text(), re.MULTILINE)
    }
    assert found, folder
    assert not {
        (name, module)
        for name, module in found
        if module.partition(".")[0] not in {*sys.stdlib_module_names, "onhost", ""}
        and not module.startswith(("hvd_keras.launch.onhost", "hvd_keras.runtime.linux"))
    }


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "native/core/README.md"]
    texts = {page: page.read_text() for page in pages}
    # As the forge makes them.
    anchors = {
        page: {
            re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
            for title in re.findall(r"^#+ (.*)", text, re.MULTILINE)
        }
        for page, text in texts.items()
    }
    found = 0
    for page, text in texts.items():
        text = re.sub(r"^( {4}|```).*?(```|$)", "", text, flags=re.MULTILINE)
        for file, _, anchor in (
            link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text)
        ):
            if "://" in file:
                continue
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), (page, file)
            assert not anchor or target not in anchors or anchor in anchors[target], (page, anchor)
            found += 1
    assert found > 100


def test_names_options_and_settings_are_those_that_users_know() -> None:
    """What is renamed or removed breaks scripts: change interface.txt on purpose only."""
    parser = options._parser(EXTENSIONS)
    found = {
        *settings(),
        *(f"hvd.{name}" for name in hvd.__all__),
        *(f"hvd.callbacks.{name}" for name in hvd.callbacks.__all__),
        *(f"hvdrun {name}" for name in parser._option_string_actions),
    }
    known = (pathlib.Path(__file__).parent / "interface.txt").read_text().splitlines()
    assert sorted(found) == known
