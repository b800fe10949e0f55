"""Decides which fixes are safe: of a known mistake, with bound names, for every torch that is allowed."""

from __future__ import annotations

import ast
import configparser
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ampaudit.core.errors import InputError
from ampaudit.core.untrusted import read_bounded
from ampaudit.linter.diagnostic import LINES_PER_FILE, Applicability, Certainty, Diagnostic, Fix
from ampaudit.linter.flow.script import Script
from ampaudit.linter.flow.syntax import dotted_name, nested_blocks

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

__all__ = [
    "UNDECLARED",
    "DeclaredTorch",
    "applicability",
    "declared_torch",
    "is_bound",
    "needed_torch",
    "with_safety",
]

_MAX_BYTES: Final = 1_000_000
# the first torch with wheels for a Python, and the last one, from the files of its releases
_FIRST_TORCH: Final = {"3.11": "1.13", "3.12": "2.2", "3.13": "2.5", "3.14": "2.9"}
_LAST_TORCH: Final = {"3.6": "1.10", "3.7": "1.13", "3.8": "2.4"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
# the first versions of torch that have a name of torch.amp, with its argument for the device
_OLD: Final = "1.10"  # which a project that declares nothing is taken to have
_SINCE: Final = {"autocast": _OLD, "GradScaler": "2.3", "custom_fwd": "2.4", "custom_bwd": "2.4"}


def with_safety(script: Script, diagnostic: Diagnostic) -> Diagnostic:
    """Return a diagnostic with the safety of its fix in this script."""
    fix = diagnostic.fix
    if fix is None or fix.line >= LINES_PER_FILE:  # that would change an imported file
        return replace(diagnostic, fix=None)
    is_known = diagnostic.certainty == Certainty.KNOWN
    safe = is_known and all(is_bound(script, fix.line, name) for name in _written_names(fix))
    return replace(diagnostic, fix=replace(fix, is_safe=safe))


def applicability(fix: Fix | None, torch: DeclaredTorch) -> Applicability:
    """Return how a fix may be applied in a project with these versions of torch."""
    if fix is None:
        return Applicability.NONE
    needed = needed_torch(fix)
    allowed = torch.is_at_least(needed) if needed else True
    if allowed is False:
        return Applicability.NONE
    is_likely = allowed or needed == _OLD
    return Applicability.SAFE if fix.is_safe and is_likely else Applicability.UNSAFE


def needed_torch(fix: Fix) -> str:
    """Return the first version of torch that has the names that a fix writes; empty if it writes none."""
    names: list[str] = []
    if fix.kind == "rename import":
        names = [detail.partition("=")[0].rpartition(".")[2] for detail in fix.details[1:]]
    elif fix.kind == "rename use":
        names = [fix.details[1]]
    elif fix.kind == "decorate":
        names = ["custom_fwd"]
    return max((_SINCE[name] for name in names), key=lambda v: tuple(map(int, v.split("."))), default="")


def _written_names(fix: Fix) -> set[str]:
    """Return the names that a fix writes and the statement does not have."""
    if fix.kind in ("scale loss", "step by scaler"):
        return {fix.details[0]}
    if fix.kind in ("insert before", "insert after", "add entry"):
        return names_in(fix.details[-1])
    if fix.kind in ("decorate", "rename use") or (fix.kind == "replace" and "torch." in fix.details[0]):
        return {"torch"}
    return set()


def names_in(code: str) -> set[str]:
    """Return the dotted names that an expression reads, without the methods that it calls."""
    names: set[str] = set()
    pending: list[ast.AST] = [ast.parse(code, mode="eval").body]
    for node in pending:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            pending += [node.func.value, *node.args, *(k.value for k in node.keywords)]
        elif text := dotted_name(node):
            names.add(text)
        else:
            pending += ast.iter_child_nodes(node)
    return names


def is_bound(script: Script, line: int, name: str) -> bool:
    """Return whether a dotted name is certainly bound at a line.

    A plain name is if a parameter, an import or an assignment on every path binds it. What stands in an
    attribute is not followed: it has to be used in a statement that runs whenever the line does.
    """
    root, _, attribute = name.partition(".")
    blocks = _blocks_around(script.tree.body, line)
    is_known = any(_binds_before(blocks, depth, line, root) for depth in range(len(blocks)))
    if is_known and not attribute:
        return True
    return (is_known or not _binds_after(blocks, line, root)) and _is_used_beside(blocks, line, name)


Blocks = list[tuple[ast.stmt | None, list[ast.stmt]]]  # each with the statement that it is in


def _blocks_around(body: list[ast.stmt], line: int) -> Blocks:
    """Return the blocks around a line, outermost first."""
    blocks: Blocks = [(None, body)]
    while True:
        inner = next(
            (
                (statement, block)
                for statement in blocks[-1][1]
                for block in nested_blocks(statement)
                if block[0].lineno <= line <= (block[-1].end_lineno or line)
            ),
            None,
        )
        if inner is None:
            return blocks
        blocks.append(inner)


def _binds_before(blocks: Blocks, depth: int, line: int, name: str) -> bool:
    """Return whether one block, or the head of its statement, binds a name before the line is reached."""
    owner, block = blocks[depth]
    if owner is not None and name in _bound_by_head(owner):
        return True
    inner = [around for around, _ in blocks[depth + 1 :]]
    if any(isinstance(around, _FUNCTIONS) for around in inner):
        # the function runs later, when the whole block has run; a class's names are not seen in it
        return not isinstance(owner, ast.ClassDef) and any(_binds(statement, name, {}) for statement in block)
    conditions = {
        ast.unparse(around.test): _is_in(around.body, line)
        for around, _ in blocks
        if isinstance(around, ast.If) and _is_constant(around.test, blocks)
    }
    return any(_binds(s, name, conditions) for s in block if (s.end_lineno or s.lineno) < line)


def _is_constant(test: ast.expr, blocks: Blocks) -> bool:
    """Return whether a condition has one value wherever it is tested: a setting, bound at most once."""
    if any(isinstance(node, ast.Call | ast.Await | ast.NamedExpr) for node in ast.walk(test)):
        return False
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    _, outermost = blocks[0]
    stored = [
        node.id
        for statement in outermost
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in names
    ]
    return len(stored) == len(set(stored))


def _bound_by_head(owner: ast.stmt) -> set[str]:
    """Return the names that a statement binds before its block runs."""
    if isinstance(owner, _FUNCTIONS):
        parameters = owner.args
        every = (
            *parameters.posonlyargs,
            *parameters.args,
            *parameters.kwonlyargs,
            parameters.vararg,
            parameters.kwarg,
        )
        return {argument.arg for argument in every if argument is not None}
    if isinstance(owner, ast.For | ast.AsyncFor):
        return _names_of([owner.target])
    if isinstance(owner, ast.With | ast.AsyncWith):
        return _names_of([item.optional_vars for item in owner.items if item.optional_vars is not None])
    return set()


def _names_of(targets: Sequence[ast.expr]) -> set[str]:
    nodes = (node for target in targets for node in ast.walk(target))
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _binds(statement: ast.stmt, name: str, conditions: dict[str, bool]) -> bool:
    """Return whether a statement binds a name on every path that continues after it."""
    if isinstance(statement, ast.Assign):
        return name in _names_of(statement.targets)
    if isinstance(statement, ast.AnnAssign):
        return statement.value is not None and name in _names_of([statement.target])
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return any((a.asname or a.name.partition(".")[0]) == name for a in statement.names)
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        return statement.name == name

    def block_binds(block: list[ast.stmt]) -> bool:
        leaves = bool(block) and isinstance(block[-1], _LEAVES)
        return leaves or any(_binds(inner, name, conditions) for inner in block)

    if isinstance(statement, ast.With | ast.AsyncWith):
        return name in _bound_by_head(statement) or block_binds(statement.body)
    if isinstance(statement, ast.If):
        branch_is_taken = conditions.get(ast.unparse(statement.test))
        if branch_is_taken is not None:
            return block_binds(statement.body if branch_is_taken else statement.orelse)
        return block_binds(statement.body) and block_binds(statement.orelse)
    if isinstance(statement, ast.Try):
        handled = all(block_binds(handler.body) for handler in statement.handlers)
        return block_binds(statement.finalbody) or (block_binds(statement.body) and handled)
    return False


def _binds_after(blocks: Blocks, line: int, name: str) -> bool:
    """Return whether the function around a line binds a name at this line or later."""
    functions = [owner for owner, _ in blocks if isinstance(owner, _FUNCTIONS)]
    body = functions[-1].body if functions else blocks[0][1]
    nodes = (node for statement in body for node in ast.walk(statement))
    return any(
        n.id == name and n.lineno >= line
        for n in nodes
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    )


def _is_used_beside(blocks: Blocks, line: int, name: str) -> bool:
    """Return whether a name is used by a statement that runs whenever the line runs."""
    for owner, block in reversed(blocks):
        for statement in block:
            if not _is_in([statement], line) and any(name == used for used in _used(statement)):
                return True
        if isinstance(owner, (*_FUNCTIONS, ast.ClassDef)):
            return False
    return False


def _used(statement: ast.stmt) -> Iterator[str]:
    """Yield the dotted names that a statement reads on every path through it."""
    inside = [inner for block in nested_blocks(statement) for inner in block]
    heads = [node for node in ast.iter_child_nodes(statement) if node not in inside]
    if isinstance(statement, ast.With | ast.AsyncWith):
        heads += statement.body
    for head in heads:
        if isinstance(head, ast.stmt):
            yield from _used(head)
        elif isinstance(head, ast.expr | ast.withitem | ast.keyword):
            yield from (dotted_name(node) for node in ast.walk(head))


def _is_in(block: list[ast.stmt], line: int) -> bool:
    return block[0].lineno <= line <= (block[-1].end_lineno or line)


@dataclass(frozen=True, slots=True)
class DeclaredTorch:
    """The versions of torch that a project allows.

    Attributes:
        oldest: Lowest allowed version; empty without a lower bound.
        newest: Upper bound, inclusive or exclusive; empty without one.
        file: File that declares the bounds.
    """

    oldest: str = ""
    newest: str = ""
    file: str = ""

    def __str__(self) -> str:
        return f"torch {self.oldest}" if self.oldest else f"torch before {self.newest}"

    def is_at_least(self, version: str) -> bool | None:
        """Return whether all allowed versions are at least this one; ``None`` if nothing says so."""
        if self.oldest:
            return _parts(self.oldest) >= _parts(version)
        return False if self.newest and _parts(self.newest) <= _parts(version) else None


UNDECLARED: Final = DeclaredTorch()


@lru_cache(maxsize=4096)
def declared_torch(directory: Path) -> DeclaredTorch:
    """Return the versions of torch that the project around a directory allows.

    Files that cannot be read or parsed declare nothing. The search ends where a repository begins.
    """
    for name, requirements in _READERS.items():
        declared = _declared(list(requirements(directory / name)), name)
        if declared != UNDECLARED:
            return declared
    if (directory / ".git").exists() or directory.parent == directory:
        return UNDECLARED
    return declared_torch(directory.parent)


def _declared(requirements: list[str], file: str) -> DeclaredTorch:
    """Return the versions of torch that requirements such as ``torch>=2.1`` or ``python>=3.8`` allow."""
    from packaging.requirements import InvalidRequirement, Requirement

    by_torch = by_python = UNDECLARED
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        low, high = _bounds(requirement.specifier)
        if requirement.name.lower() == "torch" and (low or high):
            by_torch = DeclaredTorch(low, high, file)
        elif requirement.name == "python" and low:
            last = [torch for python, torch in _LAST_TORCH.items() if _parts(python) >= _parts(low)[:2]]
            first = [torch for python, torch in _FIRST_TORCH.items() if _parts(python) == _parts(low)[:2]]
            by_python = DeclaredTorch(next(iter(last + first), ""), "", file) if last + first else UNDECLARED
    return by_python if by_torch == UNDECLARED else by_torch


def _bounds(specifiers: SpecifierSet) -> tuple[str, str]:
    """Return the least and the greatest version that specifiers name; empty without."""
    low = [s.version for s in specifiers if s.operator in (">=", ">", "==", "===", "~=")]
    high = [s.version for s in specifiers if s.operator in ("<", "<=")]
    return max(low, key=_parts, default=""), min(high, key=_parts, default="")


def _parts(version: str) -> tuple[int, ...]:
    """Return the first numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _text(path: Path) -> str:
    try:
        return read_bounded(path, _MAX_BYTES, InputError).decode("utf-8")
    except (InputError, UnicodeDecodeError):
        return ""


def _pyproject(path: Path) -> Iterator[str]:
    try:
        project: Any = tomllib.loads(_text(path)).get("project", {})
    except (tomllib.TOMLDecodeError, RecursionError):
        return
    if not isinstance(project, dict):
        return
    if isinstance(python := project.get("requires-python"), str):
        yield f"python{python}"
    extras = project.get("optional-dependencies", {})
    groups = [project.get("dependencies", []), *(extras.values() if isinstance(extras, dict) else ())]
    for group in groups:
        yield from (item for item in group if isinstance(item, str)) if isinstance(group, list) else ()


def _setup(path: Path) -> Iterator[str]:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(_text(path))
    except configparser.Error:
        return
    if python := parser.get("options", "python_requires", fallback=""):
        yield f"python{python}"
    yield from parser.get("options", "install_requires", fallback="").splitlines()


def _requirements(path: Path) -> Iterator[str]:
    yield from (line.partition("#")[0].strip() for line in _text(path).splitlines())


_READERS: Final = {
    "pyproject.toml": _pyproject,
    "setup.cfg": _setup,
    "requirements.txt": _requirements,
}
