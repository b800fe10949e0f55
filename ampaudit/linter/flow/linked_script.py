"""A script together with the files that it imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ampaudit.linter.diagnostic import LINES_PER_FILE, Certainty, Diagnostic, file_number
from ampaudit.linter.flow.definitions import ClassInfo
from ampaudit.linter.flow.module_names import imported_names, module_aliases
from ampaudit.linter.flow.script import Script
from ampaudit.linter.source_tree import SourceTree

__all__ = ["LinkedScript"]

_MAX_FILES: Final = 12  # that are followed from one script
_LINE = re.compile(r"\bline (\d+)")  # in the cause of a diagnostic


@dataclass
class LinkedScript:
    """A script with the files that it imports.

    Attributes:
        main: Script itself.
        path: Path of the script.
        tree: Files among which imports are followed.
        imported: Imported files by number, each after the files that it imports.
    """

    main: Script
    path: str = ""
    tree: SourceTree = field(default_factory=SourceTree)
    imported: dict[int, Script] = field(default_factory=dict)
    _mentioned: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._visit(self.main, self.path, {self.tree.number_of(self.path)})

    def _visit(self, script: Script, path: str, visited: set[int]) -> None:
        script.modules = self.tree.imported(script, path)
        for number in script.modules.values():
            if number in visited or len(visited) > _MAX_FILES:
                continue
            visited.add(number)
            target = self.tree.parse(number)
            if target is not None:
                path = str(self.tree.paths[number - 1]) if self.tree.is_linted(number) else ""
                self._visit(target, path, visited)
                self.imported[number] = target
        for info in script.classes.values():
            if info.base is None:
                bases = (self._class_named(script, name) for name in info.bases)
                info.base = next(
                    (base for base in bases if base is not None and info not in base.ancestry), None
                )

    def _class_named(self, script: Script, name: str, depth: int = 0) -> ClassInfo | None:
        """Return the class that a dotted name means, also through files that pass it on."""
        if name in script.classes or depth > _MAX_FILES:
            return script.classes.get(name)
        module, _, name = name.rpartition(".")
        if not module:
            module, name = imported_names(script.tree).get(name, ("", name))
        head, dot, rest = module.partition(".")
        module = module_aliases(script.tree).get(head, head) + dot + rest
        # a package mostly passes on what a module in it defines
        target = self.module(script, module) or self.module(script, module.partition(".")[0])
        return None if target is None else self._class_named(target, name, depth + 1)

    @property
    def scripts(self) -> tuple[Script, ...]:
        """The script and the files that it imports."""
        return (self.main, *self.imported.values())

    def mentions(self, pattern: str) -> bool:
        """Return whether a regular expression matches in the code of the script or of a file it imports."""
        if pattern not in self._mentioned:
            self._mentioned[pattern] = any(re.search(pattern, script.code) for script in self.scripts)
        return self._mentioned[pattern]

    def holds(self, node: ast.AST) -> bool:
        """Return whether a node is in one of the files that are followed."""
        number = file_number(node)
        return number == 0 or number in self.imported

    def in_linted_file(self, node: ast.AST, calls: Sequence[ast.Call]) -> ast.AST:
        """Return a node or, if that is in a known module, the innermost call of it in a linted file."""
        places = (node, *reversed(calls))
        return next((place for place in places if self.tree.is_linted(file_number(place))), node)

    def script_of(self, node: ast.AST) -> Script:
        """Return the script that a node is in."""
        return self.imported.get(file_number(node), self.main)

    def module(self, script: Script, name: str) -> Script | None:
        """Return the file that a module's name means in a script, if it is followed."""
        return self.imported.get(script.modules.get(name, 0))

    def group_by_file(self, diagnostics: list[Diagnostic]) -> dict[int, list[Diagnostic]]:
        """Group diagnostics by file number, at the lines of that file; in imported files, keep known ones."""
        by_file: dict[int, list[Diagnostic]] = {}
        for item in diagnostics:
            number = file_number(item.node)
            if number == 0 or item.certainty == Certainty.KNOWN:
                by_file.setdefault(number, []).append(self._moved(item, number))
        return by_file

    def _moved(self, item: Diagnostic, number: int) -> Diagnostic:
        """Return a diagnostic with the line numbers of its file, and without a fix outside of the script."""

        def located(match: re.Match[str]) -> str:
            other, line = divmod(int(match[1]), LINES_PER_FILE)
            if other == number:
                return f"line {line}"
            if not self.tree.is_linted(other):
                return self.tree.name_of(other)
            return f"line {line} of {self.tree.name_of(other) if other else Path(self.path).name}"

        if not self.imported:
            return item
        cause = _LINE.sub(located, item.cause)
        if number == 0:
            return replace(item, cause=cause)
        place = ast.copy_location(ast.Pass(), item.node)
        place.lineno -= number * LINES_PER_FILE
        place.end_lineno = (place.end_lineno or 0) - number * LINES_PER_FILE
        return Diagnostic(item.code, place, cause, item.advice, None, item.certainty)
