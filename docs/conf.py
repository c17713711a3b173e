"""Settings of Sphinx for `make docs`."""

import operator
import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

import hvd_keras

logger = logging.getLogger(__name__)

project = "hvd_keras"
copyright = "the authors of hvd_keras"
version = release = hvd_keras.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
html_theme = "furo"
pygments_style = "friendly"
html_title = f"hvd_keras {version}"
html_theme_options = {"top_of_page_buttons": []}
exclude_patterns = ["build"]

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]

# The notebooks run in every build, and a cell that fails fails it.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

# As users write the names.
add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True


def adapt(_app: Any, _what: str, _name: str, _of: Any, _options: Any, lines: list[str]) -> None:
    """Makes a docstring fit for Napoleon.

    The section "Example" becomes code, a list of arguments that share a text becomes one line, and
    the name of a page becomes a link.
    """
    text = "\n".join(lines)
    text = re.sub(r"^( *)Example:$", r"\1**Example**::\n", text, flags=re.MULTILINE)
    text = re.sub(r"^( +(?:\w+, )*\w+,)\n +(?=(?:\w+, )*\w+: )", r"\1 ", text, flags=re.MULTILINE)
    text = re.sub(r"\bdocs/(\w+)\.md\b", r":doc:`\1`", text)
    lines[:] = text.split("\n")


def list_names(_app: Sphinx, document: str, source: list[str]) -> None:
    """Puts a list of all names, with the first lines of their docstrings, at the top of the API."""
    if document != "api":
        return
    rows = ["| name | |", "|---|---|"]
    for section in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
        rows.append(f"| **{section.partition(chr(10))[0]}** | |")
        for kind, name in re.findall(r"^\.\. auto(function|class):: (\S+)$", section, re.MULTILINE):
            path = name.removeprefix("hvd_keras.")
            text = (operator.attrgetter(path)(hvd_keras).__doc__ or "").strip().partition("\n")[0]
            role = f"{{py:{'func' if kind == 'function' else 'class'}}}"
            rows.append(f"| {role}`hvd.{path} <hvd_keras.{path}>` | {text.replace('``', '`')} |")
    source[0] = source[0].replace("<!-- names -->", "\n".join(rows))


def link_to_files(app: Sphinx, document: str, source: list[str]) -> None:
    """Replaces links that lead out of this folder, which work on the forge but not in the site.

    (MyST checks the others, with their headings.)
    """

    def replace(link: re.Match[str]) -> str:
        if not (app.srcdir.parent / link[2]).exists():
            logger.warning("link to ../%s, which does not exist", link[2], location=document)
        return f"`{link[2]}` ({link[1]})"

    out = re.escape("../" * (document.count("/") + 1))
    source[0] = re.sub(rf"\[([^\]]+)\]\({out}([^)#]+)(#[^)]*)?\)", replace, source[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", adapt, priority=400)
    app.connect("source-read", link_to_files)
    app.connect("source-read", list_names)
