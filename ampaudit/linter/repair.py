"""Repairs scripts: decides which fixes are safe, and applies those that leave fewer mistakes."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ampaudit.linter.diagnostic import LINES_PER_FILE, Certainty, Fix, Mistake
from ampaudit.linter.flow.script import Script, ScriptTooLong
from ampaudit.linter.flow.syntax import covers_line, dotted_name, nested_blocks
from ampaudit.linter.flow.values import Value
from ampaudit.linter.selection import RuleSelection

_MAX_ROUNDS: Final = 10
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Analysis:
    """What is known of a text.

    Attributes:
        text: Text itself.
        diagnostics: Mistakes in it.
        tree: Syntax tree.
        names: Values of the imported names at its end.
        imported: Paths, texts and diagnostics of the files that it imports.
    """

    text: str
    diagnostics: Sequence[Mistake] = ()
    tree: ast.Module = field(default_factory=lambda: ast.Module([], []))
    names: Mapping[str, Value] = field(default_factory=dict)
    imported: Sequence[tuple[Path, str, list[Mistake]]] = ()

    def improves(self, other: Analysis) -> bool:
        """Return whether this text has fewer mistakes than another, and of no rule more."""
        now, before = (Counter(item.code for item in text.diagnostics) for text in (self, other))
        return now < before


def repair(now: Analysis, analyze: Callable[[str], Analysis], selection: RuleSelection) -> Analysis:
    """Apply fixes together or, where that causes a new mistake, each by itself.

    Args:
        now: Text to repair, with its diagnostics.
        analyze: Function that analyzes a text.
        selection: Enabled rules.
    """
    if re.search(r"\r(?!\n)", now.text):
        return now  # libcst does not preserve line ends of classic Mac OS
    rejected: set[Fix] = set()
    while fixes := [fix for fix in selection.fixes(now.text, now.diagnostics) if fix not in rejected]:
        for attempt, rounds in ((fixes, _MAX_ROUNDS), (fixes[:1], 1)):
            after = _apply(now, attempt, analyze, selection, rounds)
            if after.improves(now):
                now, rejected = after, set()
                break
        else:
            rejected.add(fixes[0])
    return now


def _apply(
    now: Analysis,
    fixes: Sequence[Fix],
    analyze: Callable[[str], Analysis],
    selection: RuleSelection,
    rounds: int,
) -> Analysis:
    """Apply fixes and, in further rounds, those of the result; stop where it cannot be read."""
    import libcst

    from ampaudit.linter.fixes import apply_fixes

    for _ in range(rounds):
        try:
            now = analyze(apply_fixes(now.text, fixes)[0])
        except (libcst.ParserSyntaxError, SyntaxError, ValueError, RecursionError, ScriptTooLong):
            break
        fixes = selection.fixes(now.text, now.diagnostics)
        if not fixes:
            break
    return now


def with_safety(script: Script, diagnostic: Mistake) -> Mistake:
    """Return a diagnostic with the safety of its fix in this script."""
    fix = diagnostic.fix
    if fix is None or fix.line >= LINES_PER_FILE:  # that would change an imported file
        return replace(diagnostic, fix=None)
    is_known = fix.is_safe and diagnostic.certainty == Certainty.KNOWN
    safe = is_known and all(is_bound(script, fix.line, name) for name in _written_names(fix))
    return replace(diagnostic, fix=replace(fix, is_safe=safe))


def _written_names(fix: Fix) -> set[str]:
    """Return the names that a fix writes and the statement does not have."""
    if fix.kind in ("scale loss", "step by scaler"):
        return {fix.details[0]}
    if fix.kind in ("insert before", "insert after", "add entry"):
        return names_in(fix.details[-1])
    if fix.kind == "replace" and "torch." in fix.details[0]:
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

    It is if a statement that runs before the line binds or reads it, or if one that runs whenever the line
    does reads it and the function binds it nowhere after the line.
    """
    blocks = blocks_around(script.tree.body, line)
    functions = [depth for depth, (owner, _) in enumerate(blocks) if isinstance(owner, _FUNCTIONS)]
    outermost = functions[-1] if functions else 0  # the outermost block in the function around the line
    if any(name in _bound_by_head(owner) for owner, _ in blocks if owner is not None):
        return True
    root = name.partition(".")[0]
    is_bound_later = any(root in _stored_in(s, from_line=line) for s in blocks[outermost][1])
    for depth, (owner, block) in enumerate(blocks):
        if depth < outermost and (root != name or isinstance(owner, ast.ClassDef)):
            continue
        for statement in block:
            # the function runs later than the code around it
            counts = depth < outermost or statement.lineno < line or not is_bound_later
            if counts and not covers_line(statement, line) and name in _mentioned(statement):
                return True
    return False


def blocks_around(body: list[ast.stmt], line: int) -> list[tuple[ast.stmt | None, list[ast.stmt]]]:
    """Return the blocks around a line, outermost first, each with the statement that it is in.

    The last is that of the statement itself, which has none around the line.
    """
    blocks: list[tuple[ast.stmt | None, list[ast.stmt]]] = [(None, body)]
    while inner := next((s for s in blocks[-1][1] if covers_line(s, line)), None):
        inside = (b for b in nested_blocks(inner) if any(covers_line(s, line) for s in b))
        blocks.append((inner, next(inside, [])))
    return blocks


def _mentioned(statement: ast.stmt) -> set[str]:
    """Return the dotted names that a statement binds or reads on every path through it."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    names: set[str] = set()
    for head in ast.iter_child_nodes(statement):
        if isinstance(head, ast.expr | ast.withitem | ast.keyword):
            # comprehensions bind names of their own, and a loop may bind none
            names |= {dotted_name(node) for node in ast.walk(head)} - _stored_in(head)
    if isinstance(statement, ast.Assign):
        names |= _stored_in(*statement.targets)
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        names |= _stored_in(statement.target)
    elif isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        names.add(statement.name)
    elif isinstance(statement, ast.With | ast.AsyncWith):
        names |= _bound_by_head(statement).union(*map(_mentioned, statement.body))
    return names


def _bound_by_head(owner: ast.stmt) -> set[str]:
    """Return the names that a statement binds before its block runs."""
    if isinstance(owner, _FUNCTIONS):
        return {node.arg for node in ast.iter_child_nodes(owner.args) if isinstance(node, ast.arg)}
    if isinstance(owner, ast.For | ast.AsyncFor):
        return _stored_in(owner.target)
    if isinstance(owner, ast.With | ast.AsyncWith):
        return _stored_in(*(item.optional_vars for item in owner.items if item.optional_vars is not None))
    return set()


def _stored_in(*nodes: ast.AST, from_line: int = 0) -> set[str]:
    names = (name for node in nodes for name in ast.walk(node) if isinstance(name, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store) and name.lineno >= from_line}
