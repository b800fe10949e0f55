"""Finds the code that a rewrite applies to in a file, and replaces it.

Nothing is guessed: the statement must contain exactly one expression that can be the op that was run, torch
must be imported in the file, and code that moves to another line must have the same meaning there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from ampaudit.audit.advice.interface import LineChange, Proposal
from ampaudit.core.errors import SourceError
from ampaudit.core.text import is_number
from ampaudit.core.untrusted import read_bounded
from ampaudit.linter.diagnostic import Fix
from ampaudit.linter.source_text import (
    MAX_SOURCE_BYTES,
    Unreadable,
    character_column,
    decode,
    diff_lines,
    split_lines,
)
from ampaudit.render.findings import relative_path
from ampaudit.trace.stack import is_library

_FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)  # within a statement
_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)
_FUNCTIONS = ("torch.matmul", "torch.bmm", "torch.mm")
_METHODS = ("matmul", "bmm", "mm")
_PURE = ("size", "sqrt", "rsqrt")  # calls that return a number and have no side effects
_MODULES = ("torch", "torch.nn.functional", "torch.special")


def replacements(text: str, change: LineChange) -> list[Fix]:
    """Return the edits that make a change; none if its place is ambiguous.

    Raises:
        SyntaxError, ValueError, RecursionError: The text cannot be parsed.
    """
    file = SourceFile(text)
    if change.second is not None and change.second.file != change.line.file:
        change = replace(change, second=None)
    if change.pattern == "scale":
        return scale_operand(file, change)
    statement = file.statement(change.line.line)
    if statement is None:
        return []
    find = {"log_softmax": _log_softmax, "log_sigmoid": _log_sigmoid, "number": _number}[change.pattern]
    places = [node for node in file.expressions(statement) if _may_be(file, node, change)]
    return find(file, places[0], change) if len(places) == 1 else []


def _may_be(file: SourceFile, node: ast.expr, change: LineChange) -> bool:
    """Return whether an expression may be the op that was run, in any spelling."""
    if change.pattern == "number":
        return file.number(node) == change.old and not isinstance(file.parent.get(node), ast.UnaryOp)
    if not isinstance(node, ast.Call) or file.dotted(node.func).startswith("math."):
        return False
    function = node.func.attr if isinstance(node.func, ast.Attribute) else file.dotted(node.func)
    return function.rpartition(".")[2] == "log"


def _log_softmax(file: SourceFile, node: ast.expr, change: LineChange) -> list[Fix]:
    """Match ``torch.log(torch.softmax(x, -1))`` in any module or method form."""
    del change
    inner, removal = _resolve(file, _argument(file, node, "log"))
    if not isinstance(inner, ast.Call):
        return []
    arguments = file.text[file.after(inner.func) : file.end(inner)]
    module, _, function = file.dotted(inner.func).rpartition(".")
    if function == "softmax" and module in _MODULES:
        name = file.code(inner.func)
        torch = _joined(file.name_of("torch"), "log_softmax") if "_stacklevel" not in arguments else None
        fresh = f"{name.removesuffix('softmax')}log_softmax" if "." in name else torch
    elif isinstance(inner.func, ast.Attribute) and inner.func.attr == "softmax" and _is_dim(inner):
        fresh = f"{file.code(inner.func.value)}.log_softmax"
    else:
        return []
    return [replacement(file, node, fresh + arguments), *removal] if fresh else []


def _log_sigmoid(file: SourceFile, node: ast.expr, change: LineChange) -> list[Fix]:
    """Match ``torch.log(torch.sigmoid(x))`` and ``torch.log(1 - torch.sigmoid(x))`` in any form."""
    del change
    inner, minus = _argument(file, node, "log"), False
    if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Sub):
        if not (isinstance(inner.left, ast.Constant) and inner.left.value == 1):
            return []
        inner, minus = inner.right, True
    inner, removal = _resolve(file, inner)
    argument = _argument(file, inner, "sigmoid")
    functional = file.name_of("torch.nn.functional") or _joined(file.name_of("torch"), "nn.functional")
    functional = functional or _joined(file.name_of("torch.nn"), "functional")
    if argument is None or functional is None:
        return []
    x = f"-{parenthesized(file, argument)}" if minus else file.code(argument)
    return [replacement(file, node, f"{functional}.logsigmoid({x})"), *removal]


def _resolve(file: SourceFile, node: ast.expr | None) -> tuple[ast.expr | None, list[Fix]]:
    """Resolve a name to its assigned value; remove the assignment if nothing else uses it.

    If the assignment stays, its value is computed twice, so that must be cheap and free of side effects.
    """
    if not isinstance(node, ast.Name):
        return node, []
    assignment = file.definition(node)
    if assignment is None or not isinstance(assignment.value, ast.Call):
        return None, []
    function = file.function(assignment) or file.tree
    uses = [part for part in ast.walk(function) if isinstance(part, ast.Name) and part.id == node.id]
    removal = file.removal(assignment) if len(uses) == 2 else None
    parts = [p for p in ast.walk(assignment.value) if p is not assignment.value]
    plain = not any(isinstance(part, ast.Call | ast.NamedExpr | ast.Await) for part in parts)
    if not plain and (removal is None or not file.follows(node, assignment)):
        return None, []
    return assignment.value, [removal] if removal is not None else []


def _joined(name: str | None, rest: str) -> str | None:
    return f"{name}.{rest}" if name else None


def _number(file: SourceFile, node: ast.expr, change: LineChange) -> list[Fix]:
    """Replace a number literal together with its sign."""
    if change.new:
        return [replacement(file, node, change.new)]
    torch, dtype = file.name_of("torch"), _dtype_of(file, node, change)
    end = "min" if change.old < 0 else "max"
    return [replacement(file, node, f"{torch}.finfo({dtype}).{end}")] if torch and dtype else []


def _dtype_of(file: SourceFile, node: ast.expr, change: LineChange) -> str | None:
    """Return code for the 16-bit dtype: that of the adjacent tensor, or the target of the cast."""
    beside = _operand_beside(file, node)
    if change.held and beside is not None:
        name = _name(file, beside) or _only_name(beside)
        if name is not None:
            return f"{name}.dtype"
    later = file.statement(change.second.line) if change.second is not None else None
    here = file.statement(change.line.line)
    if later is None or here is None or file.function(later) is not file.function(here):
        return None
    dtypes = {
        file.code(e)
        for e in file.expressions(later)
        if isinstance(e, ast.Attribute) and e.attr == "dtype" and _name(file, e.value)
    }
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    return dtype if dtype is not None and file.is_parameter(here, dtype.partition(".")[0]) else None


def _operand_beside(file: SourceFile, node: ast.expr) -> ast.expr | None:
    """Return the tensor operand of an op that takes this number."""
    call = file.parent.get(node)
    call = file.parent.get(call) if isinstance(call, ast.keyword) else call
    if isinstance(call, ast.BinOp):
        return call.left if call.right is node else call.right
    if not isinstance(call, ast.Call):
        return None
    function = file.dotted(call.func)
    if function == "torch.where":
        return next((argument for argument in call.args[1:] if argument is not node), None)
    if function.startswith("torch."):
        return call.args[0] if call.args else None
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def _only_name(node: ast.expr) -> str | None:
    """Return the only name in an arithmetic expression of it and numbers."""
    parts = list(ast.walk(node))
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    arithmetic = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Name, ast.Constant, ast.Load)
    return names.pop() if len(names) == 1 and all(isinstance(p, arithmetic) for p in parts) else None


def _name(file: SourceFile, node: ast.expr) -> str | None:
    """Return the code of a name or attribute chain, which can be evaluated again without side effects."""
    simple = node
    while isinstance(simple, ast.Attribute):
        simple = simple.value
    is_module = node is simple and isinstance(node, ast.Name) and node.id == "self"
    return file.code(node) if isinstance(simple, ast.Name) and not is_module else None


def _argument(file: SourceFile, node: ast.expr | None, function: str) -> ast.expr | None:
    """Return the only argument of a torch function, or the tensor that the method is called on."""
    if not isinstance(node, ast.Call) or node.keywords or any(isinstance(a, ast.Starred) for a in node.args):
        return None
    name = file.dotted(node.func)
    if len(node.args) == 1 and name in {f"{module}.{function}" for module in _MODULES}:
        return node.args[0]
    method = isinstance(node.func, ast.Attribute) and node.func.attr == function and not node.args
    return node.func.value if method and isinstance(node.func, ast.Attribute) else None


def _is_dim(call: ast.Call) -> bool:
    """Return whether a call only passes a dimension, so that it is a tensor method and not a module."""
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    if len(values) != 1 or any(keyword.arg != "dim" for keyword in call.keywords):
        return False
    try:
        return isinstance(ast.literal_eval(values[0]), int)
    except ValueError:
        return False


def scale_operand(file: SourceFile, change: LineChange) -> list[Fix]:
    """Return the edits; none if the product or its scaling is not unique on its line."""
    statement = file.statement(change.line.line)
    later = file.statement(change.second.line) if change.second is not None else None
    if statement is None or later is None:
        return []
    if later is not statement:
        return _on_two_lines(file, statement, later)
    scalings = [s for s in _scalings(file, statement) if _operands(file, s[1]) is not None]
    return [replacement(file, scalings[0][0], _code(file, *scalings[0][1:]))] if len(scalings) == 1 else []


Scaling = tuple[ast.expr, ast.expr, ast.expr, str]  # the whole, the product, the number, the operator


def _scalings(file: SourceFile, statement: ast.stmt) -> Iterator[Scaling]:
    """Find divisions and multiplications; a multiplication in both orders."""
    for node in file.expressions(statement):
        if not isinstance(node, ast.BinOp):
            continue
        if isinstance(node.op, ast.Div):
            yield node, node.left, node.right, "/"
        elif isinstance(node.op, ast.Mult):
            yield node, node.left, node.right, "*"
            yield node, node.right, node.left, "*"


def _operands(file: SourceFile, node: ast.expr) -> tuple[ast.expr, str, str] | None:
    """Return the first operand of a product, and the code before and after it."""
    first: ast.expr | None = None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        first = node.left
    elif isinstance(node, ast.Call) and not node.keywords:
        is_function = file.dotted(node.func) in _FUNCTIONS and len(node.args) == 2
        is_method = isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS
        if is_function and not isinstance(node.args[0], ast.Starred):
            first = node.args[0]
        elif is_method and len(node.args) == 1 and isinstance(node.func, ast.Attribute):
            first = node.func.value if not file.dotted(node.func) else None
    if first is None:
        return None
    # parentheses around the operand stand outside of it, and stay
    return first, file.text[file.start(node) : file.start(first)], file.text[file.end(first) : file.end(node)]


def _code(file: SourceFile, product: ast.expr, number: ast.expr, operator: str) -> str:
    """Return the product with its first operand scaled."""
    operands = _operands(file, product)
    assert operands is not None
    first, before, after = operands
    tight = isinstance(first, ast.BinOp) and isinstance(first.op, ast.Mult | ast.Div | ast.MatMult)
    q = file.code(first) if tight else parenthesized(file, first)
    scaled = f"{q} {operator} {parenthesized(file, number)}"
    if before.endswith("(") and after.startswith(")") and isinstance(product, ast.BinOp):
        before, after = before[:-1], after[1:]
    inside = isinstance(product, ast.Call) and before.rstrip().endswith("(") and product.args[:1] == [first]
    return f"{before}{scaled}{after}" if inside else f"{before}({scaled}){after}"


def _on_two_lines(file: SourceFile, first: ast.stmt, second: ast.stmt) -> list[Fix]:
    """Match ``s = q @ k`` and a single later scaling of ``s`` by a number in the same block."""
    block = file.block(first)
    if second not in block or not isinstance(first, ast.Assign) or len(first.targets) != 1:
        return []
    target, product = first.targets[0], first.value
    between = block[block.index(first) : block.index(second)]
    if not isinstance(target, ast.Name) or _operands(file, product) is None or not between:
        return []
    scaling = _the_scaling(file, second, target.id)
    if scaling is None:
        return []
    whole, number, operator = scaling
    names = {node.id for node in ast.walk(number) if isinstance(node, ast.Name)}
    later = bound_by(between[1:])
    if not _is_pure(number) or names & (later | {target.id}) or target.id in later:
        return []
    # code that did not run may read the name as well; if the scaling rebinds it, only code before that
    scope = between[1:] if whole is None else [file.function(first) or file.tree]
    if len(_reads(scope, target.id)) > (whole is not None):
        return []
    scaled = replacement(file, product, _code(file, product, number, operator))
    if whole is not None:
        return [scaled, replacement(file, whole, target.id)]
    removal = file.removal(second)
    return [scaled, removal] if removal is not None else []


def _reads(scope: Sequence[ast.AST], name: str) -> list[ast.Name]:
    parts = (part for each in scope for part in ast.walk(each) if isinstance(part, ast.Name))
    return [part for part in parts if part.id == name and isinstance(part.ctx, ast.Load)]


def _the_scaling(
    file: SourceFile, statement: ast.stmt, name: str
) -> tuple[ast.expr | None, ast.expr, str] | None:
    """Return the scaling of a name: expression (``None`` for the whole statement), number, operator."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        how = {ast.Div: "/", ast.Mult: "*"}.get(type(statement.op))
        return (None, statement.value, how) if how and statement.target.id == name else None
    scalings = [s for s in _scalings(file, statement) if isinstance(s[1], ast.Name) and s[1].id == name]
    if len(scalings) != 1:
        return None
    whole, _, number, operator = scalings[0]
    is_all = (
        isinstance(statement, ast.Assign)
        and statement.value is whole
        and [t.id for t in statement.targets if isinstance(t, ast.Name)] == [name]
    )
    return (None if is_all else whole), number, operator


def _is_pure(number: ast.expr) -> bool:
    """Return whether an expression is free of side effects, so that it can move within its block."""
    parts = list(ast.walk(number))
    functions = [part.func for part in parts if isinstance(part, ast.Call)]
    effects = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr, ast.Lambda)
    pure = all(isinstance(each, ast.Attribute) and each.attr in _PURE for each in functions)
    return pure and not any(isinstance(part, effects) for part in parts)


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
        statements = (node for node in ast.walk(self.tree) if isinstance(node, ast.stmt))
        around = [node for node in statements if node.lineno <= line <= (node.end_lineno or node.lineno)]
        holders = {self.parent.get(node) for node in around}
        innermost = [node for node in around if node not in holders]
        return innermost[0] if len(innermost) == 1 else None

    def expressions(self, statement: ast.stmt) -> Iterator[ast.expr]:
        """Return the expressions of a statement, without those of nested statements and of f-strings."""
        frontier: list[ast.AST] = [statement]
        while frontier:
            for child in ast.iter_child_nodes(frontier.pop()):
                if isinstance(child, ast.expr):
                    yield child
                if not isinstance(child, ast.stmt | ast.JoinedStr):
                    frontier.append(child)

    def function(self, node: ast.AST) -> ast.AST | None:
        """Return the function that contains a node."""
        holder = self.parent.get(node)
        while holder is not None and not isinstance(holder, _FUNCTION_NODES):
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
        """Return the assignment that defines a name in the same block, if its operands do not change.

        A lambda or a comprehension may give the name another meaning, or read it later.
        """
        if any(isinstance(holder, _SCOPES) for holder in self._holders(node)):
            return None
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
        *_, statement = self._holders(node)
        assert isinstance(statement, ast.stmt)
        return statement

    def _holders(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield a node and what contains it, up to its statement."""
        yield node
        while not isinstance(node, ast.stmt):
            node = self.parent[node]
            yield node

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
        return sign * value if is_number(value) else None

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
        nodes = list(ast.walk(self.tree))
        bound = {node.arg for node in nodes if isinstance(node, ast.arg)}
        bound |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        bound |= {
            n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        full_names = dict(pair for node in self.tree.body for pair in _imported(node))
        inside = (pair for node in nodes for pair in _imported(node))
        bound |= {name for name, full in inside if full_names.get(name) != full}
        return {name: full for name, full in full_names.items() if name not in bound}


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names that an import binds, with what they stand for; relative imports stand for nothing."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            first = alias.name.partition(".")[0]
            yield (alias.asname, alias.name) if alias.asname else (first, first)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name, "" if node.level else f"{node.module}.{alias.name}"


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
        ValueError: The code drops a comment, or has lines that do not follow the block's indentation.
    """
    if file.code(node).count("#") > code.count("#"):
        raise ValueError("a comment would be lost")
    last = node.end_lineno or node.lineno
    column = character_column(file.lines[last - 1], node.end_col_offset or 0)
    indentation = file.indentation(node)  # the edit adds it again
    first, *others = code.split("\n")
    blank = all(line.startswith(indentation) or not line.strip() for line in others)
    if others and (not blank or '"""' in code or "'''" in code):
        raise ValueError("lines that cannot be re-indented")
    code = "\n".join([first, *(line.removeprefix(indentation) for line in others)])
    return Fix("replace expression", node.lineno, node.col_offset, (code, str(last), str(column)))


def parenthesized(file: SourceFile, node: ast.expr) -> str:
    """Return an expression's code, in parentheses if it needs them as an operand."""
    code = file.code(node)
    return code if isinstance(node, _ATOMS) else f"({code})"


def diff_of(proposal: Proposal) -> str:
    """Return the diff; empty if the change does not edit source code or its place is ambiguous."""
    import libcst

    from ampaudit.linter.fixes import apply_fixes

    change = proposal.source
    if change is None or not change.line.code or is_library(change.line.file):
        return ""
    try:
        text, _ = decode(read_bounded(Path(change.line.file), MAX_SOURCE_BYTES, SourceError))
    except (SourceError, Unreadable):
        return ""
    lines = text.split("\n")
    same = change.line.line <= len(lines) and lines[change.line.line - 1].strip() == change.line.code.strip()
    if not same or "\r" in text:  # the file no longer has the line that was run
        return ""
    try:
        fixes = replacements(text, change)
        after, applied = apply_fixes(text, fixes)
        ast.parse(after)
    except (libcst.ParserSyntaxError, SyntaxError, ValueError, RecursionError):
        return ""
    if after == text or applied != set(fixes):
        return ""
    return "\n".join(diff_lines(relative_path(change.line.file), text, after)) + "\n"
