"""Parses a Python file: statements by line, expressions with their source text, imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cached_property

from ampaudit.linter.diagnostic import Fix
from ampaudit.linter.source_text import character_column, split_lines

__all__ = ["SourceFile", "bound_by", "parenthesized", "replacement"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)


class SourceFile:
    """One Python file.

    Raises:
        SyntaxError, ValueError, RecursionError: The text cannot be parsed.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = split_lines(text)
        self.tree = ast.parse(text)
        self.parent: dict[ast.AST, ast.AST] = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }
        self._starts = [0]
        for line in text.split("\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    def statement(self, line: int) -> ast.stmt | None:
        """Return the innermost statement that covers a line; ``None`` if there is none or several."""
        around = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
        ]
        holders = {self.parent.get(node) for node in around}
        innermost = [node for node in around if node not in holders]
        return innermost[0] if len(innermost) == 1 else None

    def expressions(self, statement: ast.stmt) -> Iterator[ast.expr]:
        """Return the expressions of a statement, without those of nested statements."""
        frontier: list[ast.AST] = [statement]
        while frontier:
            for child in ast.iter_child_nodes(frontier.pop()):
                if isinstance(child, ast.expr):
                    yield child
                if not isinstance(child, ast.stmt):
                    frontier.append(child)

    def function(self, node: ast.AST) -> ast.AST | None:
        """Return the function that contains a node."""
        holder = self.parent.get(node)
        while holder is not None and not isinstance(holder, _FUNCTIONS):
            holder = self.parent.get(holder)
        return holder

    def is_parameter(self, node: ast.AST, name: str) -> bool:
        """Return whether a name is a parameter of the enclosing function and is never rebound in it."""
        function = self.function(node)
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            return False
        signature = function.args
        names = [each.arg for each in (*signature.posonlyargs, *signature.args, *signature.kwonlyargs)]
        inside = (part for part in ast.walk(function) if isinstance(part, ast.Name))
        return name in names and all(p.id != name or isinstance(p.ctx, ast.Load) for p in inside)

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements of the block that contains a statement."""
        holder = self.parent.get(statement)
        fields = (getattr(holder, name, None) for name in ("body", "orelse", "finalbody"))
        return next((f for f in fields if isinstance(f, list) and statement in f), [])

    def definition(self, node: ast.Name) -> ast.Assign | None:
        """Return the assignment that defines a name in the same block, if its operands do not change."""
        statement = self._statement_of(node)
        block = self.block(statement)
        before = block[: block.index(statement)] if block else []
        last = max((i for i, s in enumerate(before) if node.id in bound_by([s])), default=None)
        binding = before[last] if last is not None else None
        if last is None or not isinstance(binding, ast.Assign) or len(binding.targets) != 1:
            return None
        names = {part.id for part in ast.walk(binding.value) if isinstance(part, ast.Name)}
        is_name = isinstance(binding.targets[0], ast.Name)
        return binding if is_name and not names & bound_by(before[last + 1 :]) else None

    def follows(self, node: ast.AST, statement: ast.stmt) -> bool:
        """Return whether a node is in the statement right after another one."""
        block = self.block(statement)
        return block[block.index(statement) + 1 :][:1] == [self._statement_of(node)]

    def removal(self, statement: ast.stmt) -> Fix | None:
        """Return the edit that removes a statement, unless a comment is attached to it."""
        last = statement.end_lineno or statement.lineno
        lines = self.lines[statement.lineno - 1 : last]
        above = self.lines[statement.lineno - 2].lstrip() if statement.lineno > 1 else ""
        if any("#" in line for line in lines) or above.startswith("#"):
            return None
        return Fix("remove statement", statement.lineno, statement.col_offset)

    def _statement_of(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self.parent[node]
        return node

    def indentation(self, node: ast.AST) -> str:
        """Return the indentation of a node's block."""
        line = self.lines[self._statement_of(node).lineno - 1]
        return line[: len(line) - len(line.lstrip())]

    def code(self, node: ast.expr) -> str:
        """Return the source text of an expression, without surrounding parentheses."""
        return self.text[self.start(node) : self.end(node)]

    def start(self, node: ast.expr) -> int:
        """Return the offset at which an expression begins."""
        return self._offset(node.lineno, node.col_offset)

    def end(self, node: ast.expr) -> int:
        """Return the offset at which an expression ends."""
        return self._offset(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def after(self, function: ast.expr) -> int:
        """Return the offset of a call's opening parenthesis."""
        return self.text.index("(", self.end(function))

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + character_column(self.lines[line - 1], column)

    def number(self, node: ast.expr) -> float | None:
        """Return the value of a number literal with its sign."""
        sign = 1.0
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            node, sign = node.operand, -1.0
        value = node.value if isinstance(node, ast.Constant) else None
        return sign * value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def dotted(self, node: ast.expr) -> str:
        """Return the full dotted name of an expression, as imported; empty if there is none."""
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        return self.imports.get(node.id, "") if isinstance(node, ast.Name) else ""

    def name_of(self, module: str) -> str | None:
        """Return the name that the file gives a module."""
        return next((name for name, full in self.imports.items() if full == module), None)

    @cached_property
    def imports(self) -> dict[str, str]:
        """Map names in the file to full names, for top-level imports that are never rebound."""
        full_names: dict[str, str] = {}
        for node in self.tree.body:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    full_names[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                full_names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        names = (node for node in ast.walk(self.tree) if isinstance(node, ast.Name | ast.arg))
        bound = {
            node.arg if isinstance(node, ast.arg) else node.id
            for node in names
            if isinstance(node, ast.arg) or isinstance(node.ctx, ast.Store)
        }
        return {name: full for name, full in full_names.items() if name not in bound}


def bound_by(statements: Sequence[ast.stmt]) -> set[str]:
    """Return the names that statements bind, including those whose attributes or items they assign."""
    names: set[str] = set()
    for node in (part for statement in statements for part in ast.walk(statement)):
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            base: ast.expr = node
            while isinstance(base, ast.Attribute | ast.Subscript):
                base = base.value
            names |= {base.id} if isinstance(base, ast.Name) else set()
    return names


def replacement(file: SourceFile, node: ast.expr, code: str) -> Fix:
    """Return the edit that replaces an expression.

    Raises:
        ValueError: The code spans several lines that do not follow the block's indentation.
    """
    last = node.end_lineno or node.lineno
    column = character_column(file.lines[last - 1], node.end_col_offset or 0)
    code = _outdented(code, file.indentation(node))
    return Fix("replace expression", node.lineno, node.col_offset, (code, str(last), str(column)))


def _outdented(code: str, indentation: str) -> str:
    """Remove the indentation of the surrounding block; the edit adds it again."""
    first, *others = code.split("\n")
    blank = all(line.startswith(indentation) or not line.strip() for line in others)
    if others and (not blank or '"""' in code or "'''" in code):
        raise ValueError("lines that cannot be re-indented")
    return "\n".join([first, *(line.removeprefix(indentation) for line in others)])


def parenthesized(file: SourceFile, node: ast.expr) -> str:
    """Return an expression's code, in parentheses if it needs them as an operand."""
    code = file.code(node)
    return code if isinstance(node, _ATOMS) else f"({code})"
