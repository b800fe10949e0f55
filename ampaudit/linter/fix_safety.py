"""Decides which fixes are safe: those of a known mistake that write bound names."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ampaudit.linter.diagnostic import LINES_PER_FILE, Certainty, Diagnostic, Fix
from ampaudit.linter.flow.script import Script
from ampaudit.linter.flow.syntax import dotted_name, nested_blocks

__all__ = ["is_bound", "with_safety"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


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
