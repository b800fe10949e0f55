"""The dotted names of the modules that a script imports, and of their members."""

from __future__ import annotations

import ast

from ampaudit.linter.flow.syntax import nested_blocks

__all__ = ["imported_modules", "imported_names", "join_names", "module_aliases", "module_of"]


def imported_names(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Return module and name there of each name that a script imports from a module."""
    return {
        alias.asname or alias.name: (module_of(node), alias.name)
        for node in _import_statements(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def module_aliases(tree: ast.Module) -> dict[str, str]:
    """Return the dotted names of the modules that a script imports under another name."""
    return {
        alias.asname: alias.name
        for node in _import_statements(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname
    }


def imported_modules(tree: ast.Module) -> list[str]:
    """Return the dotted names of what a script imports that may be modules, as in ``.utils``."""
    modules: dict[str, None] = {}
    for node in _import_statements(tree):
        module = module_of(node) if isinstance(node, ast.ImportFrom) else ""
        modules |= {module: None} if module else {}
        modules |= {join_names(module, alias.name) if module else alias.name: None for alias in node.names}
    return list(modules)


def _import_statements(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    """Return the imports at module level, also those in its branches."""
    pending: list[ast.stmt] = list(tree.body)
    for node in pending:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            pending += [inner for block in nested_blocks(node) for inner in block]
    return [node for node in pending if isinstance(node, ast.Import | ast.ImportFrom)]


def module_of(node: ast.ImportFrom) -> str:
    """Return the dotted name of the module from which names are imported, as in ``..utils``."""
    return "." * node.level + (node.module or "")


def join_names(module: str, name: str) -> str:
    """Return the dotted name of a member of a module, whose own name may be only dots."""
    return f"{module}{name}" if module.endswith(".") else f"{module}.{name}"
