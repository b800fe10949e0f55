"""Decides which fixes are safe: those of a known mistake that write bound names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from ampaudit.linter.diagnostic import LINES_PER_FILE, Certainty, Diagnostic, Fix
from ampaudit.linter.flow.script import Script
from ampaudit.linter.flow.syntax import dotted_name, nested_blocks

__all__ = ["is_bound", "with_safety"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def with_safety(script: Script, diagnostic: Diagnostic) -> Diagnostic:
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

    A plain name is if a parameter, or a statement that runs before the line, binds it. Any name is if a
    statement reads it that runs whenever the line does, unless it is bound in between.
    """
    root, _, attribute = name.partition(".")
    blocks = _blocks_around(script.tree.body, line)
    is_known = any(_binds_before(blocks, depth, line, root) for depth in range(len(blocks)))
    if is_known and not attribute:
        return True
    return (is_known or not _binds_after(blocks, line, root)) and _is_read_beside(blocks, line, name)


Blocks = list[tuple[ast.stmt | None, list[ast.stmt]]]  # each with the statement that it is in


def _blocks_around(body: list[ast.stmt], line: int) -> Blocks:
    """Return the blocks around a line, outermost first."""
    blocks: Blocks = [(None, body)]
    while inner := next((s for s in blocks[-1][1] if _covers(s, line)), None):
        block = next((b for b in nested_blocks(inner) if any(_covers(s, line) for s in b)), None)
        if block is None:
            break
        blocks.append((inner, block))
    return blocks


def _covers(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or line)


def _binds_before(blocks: Blocks, depth: int, line: int, name: str) -> bool:
    """Return whether one block, or the head of its statement, binds a name before the line is reached."""
    owner, block = blocks[depth]
    if owner is not None and name in _bound_by_head(owner):
        return True
    if any(isinstance(around, _FUNCTIONS) for around, _ in blocks[depth + 1 :]):
        # the function runs later, when the whole block has run; a class's names are not seen in it
        return not isinstance(owner, ast.ClassDef) and any(_binds(statement, name) for statement in block)
    return any(_binds(s, name) for s in block if (s.end_lineno or s.lineno) < line)


def _bound_by_head(owner: ast.stmt) -> set[str]:
    """Return the names that a statement binds before its block runs."""
    if isinstance(owner, _FUNCTIONS):
        return {node.arg for node in ast.iter_child_nodes(owner.args) if isinstance(node, ast.arg)}
    if isinstance(owner, ast.For | ast.AsyncFor):
        return _stored_in(owner.target)
    if isinstance(owner, ast.With | ast.AsyncWith):
        return _stored_in(*(item.optional_vars for item in owner.items if item.optional_vars is not None))
    return set()


def _stored_in(*targets: ast.AST) -> set[str]:
    nodes = (node for target in targets for node in ast.walk(target))
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _binds(statement: ast.stmt, name: str) -> bool:
    """Return whether a statement binds a name on every path that continues after it."""
    if isinstance(statement, ast.Assign):
        return name in _stored_in(*statement.targets)
    if isinstance(statement, ast.AnnAssign):
        return statement.value is not None and name in _stored_in(statement.target)
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return any((a.asname or a.name.partition(".")[0]) == name for a in statement.names)
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        return statement.name == name
    if isinstance(statement, ast.With | ast.AsyncWith):
        return name in _bound_by_head(statement) or any(_binds(inner, name) for inner in statement.body)
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


def _is_read_beside(blocks: Blocks, line: int, name: str) -> bool:
    """Return whether a name is read by a statement that runs whenever the line runs."""
    for owner, block in reversed(blocks):
        if any(name in _read(statement) for statement in block if not _covers(statement, line)):
            return True
        if isinstance(owner, (*_FUNCTIONS, ast.ClassDef)):
            return False
    return False


def _read(statement: ast.stmt) -> Iterator[str]:
    """Yield the dotted names that a statement reads on every path through it."""
    inside = [inner for block in nested_blocks(statement) for inner in block]
    for head in ast.iter_child_nodes(statement):
        if head not in inside:
            yield from {dotted_name(node) for node in ast.walk(head)} - _stored_in(head)
    if isinstance(statement, ast.With | ast.AsyncWith):
        for inner in statement.body:
            yield from _read(inner)
