"""The text of a script: its places, and what its names stand for."""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Finding:
    """A place in a script."""

    start: int  # bytes of the text
    end: int
    text: str  # what is wrong, for people; empty for a part of what another finding says
    new: str | None = None  # what is written there instead; None: this is not certain


class Source:
    """A script, its syntax tree, and what its names stand for. Raises SyntaxError."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.data = text.encode()
        # Where lines begin, by Python's grammar: a form feed, for example, ends none.
        ends = [match.end() for match in re.finditer(rb"\r\n?|\n", self.data)]
        self._lines = [0, *ends, len(self.data)]
        self.tree = ast.parse(text)
        self._modules: dict[str, str] = {}  # what a name of the script stands for
        self.nodes = list(ast.walk(self.tree))
        for node in self.nodes:
            self._note_names(node)

    def at(self, node: ast.AST, text: str, new: str | None = None) -> Finding:
        """Return a finding at a node of the tree."""
        return Finding(*self.place(node), text, new)

    def place(self, node: Any) -> tuple[int, int]:
        """Return the start and the end of a node that has a place."""
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset

    def lines_of(self, node: Any) -> tuple[int, int]:
        """Return the start and the end of the lines of a statement."""
        return self._lines[node.lineno - 1], self._lines[node.end_lineno]

    def source(self, node: ast.AST) -> str:
        """Return the text of a node."""
        start, end = self.place(node)
        return self.data[start:end].decode()

    def meaning(self, node: ast.AST) -> str:
        """The full name of an expression such as ``hvd.callbacks.X``; empty if it has none."""
        if isinstance(node, ast.Name):
            return self._modules.get(node.id, "")
        if isinstance(node, ast.Attribute):
            of = self.meaning(node.value)
            return f"{of}.{node.attr}" if of else ""
        return ""

    def without(
        self, node: ast.Call, keywords: Iterable[ast.keyword], text: str = ""
    ) -> list[Finding]:
        """Return the removal of arguments of a call, each with a comma."""
        arguments = sorted(self.place(part) for part in [*node.args, *node.keywords])
        gone = {self.place(keyword): keyword.arg for keyword in keywords}
        findings, kept = [], False
        for i, place in enumerate(arguments):
            if place not in gone:
                kept = True
                continue
            start, end = place
            if kept:
                start = arguments[i - 1][1]
            elif i + 1 < len(arguments):
                end = arguments[i + 1][0]
            message = text or f"remove {gone[place]}=…: it is not needed"
            findings.append(Finding(start, end, message, ""))
        return findings

    def _note_names(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                self._modules[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                self._modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
