"""Finds the files that a script imports among those that are linted, and parses each once.

Sources: documentation and code of timm 0.4 to 1.0, and of SpeechBrain 0.5 to 1.0, whose ``check_gradients``
clips in 0.5, where it is given the loss.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Final

from ampaudit.core.errors import InputError
from ampaudit.core.untrusted import read_bounded
from ampaudit.linter.diagnostic import LINES_PER_FILE, Certainty, Mistake, file_number
from ampaudit.linter.flow.script import (
    MATTERS_TO_IMPORTERS,
    Script,
    ScriptTooLong,
    is_worth_reading,
    read_script,
)
from ampaudit.linter.flow.syntax import imported_modules
from ampaudit.linter.flow.torch_names import MANAGING_PACKAGES
from ampaudit.linter.source_text import Unreadable, decode

_MAX_FILES: Final = 12  # that are followed from one script
_LINE = re.compile(r"\bline (\d+)")  # in the cause of a diagnostic
_TIMM_SCALERS: Final = """
import torch


class NativeScaler:
    def __init__(self, device="cuda"):
        self._scaler = torch.amp.GradScaler(device)

    def __call__(self, loss, optimizer, clip_grad=None, clip_mode="norm", parameters=None,
                 create_graph=False, need_update=True):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if need_update:
            if clip_grad is not None:
                self._scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
            self._scaler.step(optimizer)
            self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state):
        self._scaler.load_state_dict(state)
"""
_SPEECHBRAIN: Final = """
import torch


class Brain:
    def __init__(self, modules=None, opt_class=None, hparams=None, run_opts=None, checkpointer=None):
        self.scaler = torch.amp.GradScaler("cuda", enabled=run_opts["precision"] == "fp16")

    def check_gradients(self, loss=None):
        if loss is not None:
            torch.nn.utils.clip_grad_norm_(self.modules.parameters(), self.max_grad_norm)
        return True

    def optimizers_step(self):
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.modules.parameters(), self.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
"""
KNOWN_MODULES: Final = {
    "timm.utils": _TIMM_SCALERS,
    "timm.utils.cuda": _TIMM_SCALERS,
    "speechbrain": _SPEECHBRAIN,
    "speechbrain.core": _SPEECHBRAIN,
}
_MAX_KEPT = 64  # parsed files
_MAX_BYTES = 300_000  # of a file that is followed
_UNREADABLE = (InputError, Unreadable, ScriptTooLong, SyntaxError, ValueError, RecursionError, MemoryError)
# what these mean is known, also where they are among the files
_KNOWN_PACKAGES: Final = frozenset({"torch", "apex", *MANAGING_PACKAGES})


class SourceTree:
    """The linted Python files, and stubs of some modules of other projects.

    Args:
        files: Paths of the linted files.
    """

    def __init__(self, files: Iterable[Path] = ()) -> None:
        self.paths = [path for path in files if path.suffix == ".py"]
        self._numbers = {os.path.abspath(path): number for number, path in enumerate(self.paths, 1)}
        # a file may be imported under its own name, or those of its directories
        parts = (path.removesuffix(".py").split(os.sep)[-6:] for path in self._numbers)
        self._modules = set(chain.from_iterable(parts))
        self._known = dict(enumerate(KNOWN_MODULES, len(self.paths) + 1))
        self.parse = lru_cache(_MAX_KEPT)(self._read)

    def is_linted(self, number: int) -> bool:
        """Return whether a number stands for a linted file rather than for a known module."""
        return number <= len(self.paths)

    def name_of(self, number: int) -> str:
        """Return the name of a file, or of a known module."""
        return self._known[number] if number in self._known else self.paths[number - 1].name

    def _read(self, number: int) -> Script | None:
        """Return a parsed file; ``None`` if it cannot be read, or has nothing that is worth following."""
        if number in self._known:
            return read_script(KNOWN_MODULES[self._known[number]], number)
        path = self.paths[number - 1]
        try:
            text, _ = decode(read_bounded(path, _MAX_BYTES, InputError))
            matters = MATTERS_TO_IMPORTERS.search(text) is not None or is_worth_reading(text)
            return read_script(text, number) if matters or path.name == "__init__.py" else None
        except _UNREADABLE:
            return None

    def number_of(self, path: str) -> int:
        """Return the number of a file; zero for one that is not linted."""
        return self._numbers.get(os.path.abspath(path), 0)

    def drives_training(self, tree: ast.Module, text: str, path: str) -> bool:
        """Return whether a script has an optimizer and imports a linted file that is worth reading."""
        numbers = self.imported(tree, path).values() if "optim" in text else ()
        scripts = (self.parse(number) for number in numbers if self.is_linted(number))
        return any(script is not None and is_worth_reading(script.text) for script in scripts)

    def imported(self, tree: ast.Module, path: str) -> dict[str, int]:
        """Return the numbers of the files that a script imports, by the dotted names of their modules."""
        importer = os.path.abspath(path)
        numbers = ((name, self._find(name, importer)) for name in imported_modules(tree))
        return {name: number for name, number in numbers if number is not None}

    def _find(self, name: str, importer: str) -> int | None:
        level = len(name) - len(name.lstrip("."))
        parts = name[level:].split(".") if name[level:] else []
        if level:
            directory = importer
            for _ in range(level):
                directory = os.path.dirname(directory)
            return self._module(directory, parts)
        if name in KNOWN_MODULES:
            return next(number for number, module in self._known.items() if module == name)
        if parts[0] not in self._modules or parts[0] in _KNOWN_PACKAGES:
            return None
        places = (self._module(directory, parts) for directory in self._search_path(importer))
        return next((number for number in places if number is not None), None)

    def _module(self, directory: str, parts: list[str]) -> int | None:
        base = os.path.join(directory, *parts)
        file = self._numbers.get(f"{base}.py") if parts else None
        return file or self._numbers.get(os.path.join(base, "__init__.py"))

    def _search_path(self, importer: str) -> Iterator[str]:
        """Yield where Python may look for modules: the directory around the packages, then those above."""
        directory = os.path.dirname(importer)
        while os.path.join(directory, "__init__.py") in self._numbers:
            directory = os.path.dirname(directory)
        above = None
        while directory != above:
            yield directory
            yield os.path.join(directory, "src")
            directory, above = os.path.dirname(directory), directory


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

    def __post_init__(self) -> None:
        self._visit(self.main, self.path, {self.tree.number_of(self.path)})

    def _visit(self, script: Script, path: str, visited: set[int]) -> None:
        script.modules = self.tree.imported(script.tree, path)
        for number in script.modules.values():
            if number in visited or len(visited) > _MAX_FILES:
                continue
            visited.add(number)
            target = self.tree.parse(number)
            if target is not None:
                path = str(self.tree.paths[number - 1]) if self.tree.is_linted(number) else ""
                self._visit(target, path, visited)
                self.imported[number] = target

    @property
    def scripts(self) -> tuple[Script, ...]:
        """The script and the files that it imports."""
        return (self.main, *self.imported.values())

    def mentions(self, *texts: str) -> bool:
        """Return whether a name or string in the script, or in a file it imports, has one of some texts."""
        return any(text in script.words for script in self.scripts for text in texts)

    def uses_name(self, name: str) -> bool:
        """Return whether the script or a file it imports has a variable or attribute of a name."""
        return any(name in script.names for script in self.scripts)

    def holds(self, node: ast.AST) -> bool:
        """Return whether a node is in one of the files that are followed."""
        number = file_number(node)
        return number == 0 or number in self.imported

    def script_of(self, node: ast.AST) -> Script:
        """Return the script that a node is in."""
        return self.imported.get(file_number(node), self.main)

    def module(self, script: Script, name: str) -> Script | None:
        """Return the file that a module's name means in a script, if it is followed."""
        return self.imported.get(script.modules.get(name, 0))

    def group_by_file(self, diagnostics: list[Mistake]) -> dict[int, list[Mistake]]:
        """Group diagnostics by file number, at the lines of that file; in imported files, keep known ones."""
        by_file: dict[int, list[Mistake]] = {}
        for item in diagnostics:
            number = file_number(item.node)
            if number == 0 or item.certainty == Certainty.KNOWN:
                by_file.setdefault(number, []).append(self._moved(item, number))
        return by_file

    def _moved(self, item: Mistake, number: int) -> Mistake:
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
        return replace(item, node=place, cause=cause, fix=None)
