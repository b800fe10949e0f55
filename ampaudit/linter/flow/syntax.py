"""Answers questions about the syntax of expressions and statements, whatever their names stand for."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Final


def condition_of(test: ast.expr) -> tuple[str, bool] | None:
    """Return a condition as a name and its truth, as in ``scaler``, False for ``scaler is None``."""
    positive = True
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, positive = test.operand, not positive
    text = dotted_name(test)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], _EQUALITIES):
        text, other = dotted_name(test.left), test.comparators[0]
        is_unequal = isinstance(test.ops[0], ast.IsNot | ast.NotEq)
        if isinstance(other, ast.Constant) and isinstance(other.value, str):
            text, positive = f"{text} == {other.value!r}" if text else "", positive ^ is_unequal
        elif isinstance(other, ast.Constant) and (other.value is None or isinstance(other.value, bool)):
            positive ^= is_unequal == bool(other.value)
        else:
            return None
    return (text, positive) if text else None


_EQUALITIES: Final = (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)


def dotted_name(node: ast.AST) -> str:
    """Return a dotted name such as ``self.optimizer``; empty for other expressions."""
    attributes = ""
    while isinstance(node, ast.Attribute):
        attributes = f".{node.attr}{attributes}"
        node = node.value
    if isinstance(node, ast.Name):
        return node.id + attributes
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        base = dotted_name(node.value)
        return f"{base}[{node.slice.value!r}]{attributes}" if base else ""
    return ""


def last_component(name: str) -> str:
    """Return the last component of a dotted name."""
    return name.rpartition(".")[2]


def simple_name(node: ast.AST) -> str:
    """Return a name, or the name of an attribute without its object; empty for other nodes."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def receiver_name(node: ast.AST) -> str:
    """Return the dotted name ``x`` of a call ``x.method(...)``; empty for other nodes."""
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return dotted_name(node.func.value) if is_method else ""  # type: ignore[attr-defined]


def keyword_value(call: ast.Call, name: str) -> ast.expr | None:
    """Return the expression of a keyword argument."""
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def covers_line(node: ast.stmt | ast.expr, line: int) -> bool:
    """Return whether a line is among those of a node."""
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def names_in(node: ast.AST) -> set[str]:
    """Return the names and attributes in an expression but for methods, in lower case."""
    nodes = walk(node)
    methods = {part.func for part in nodes if isinstance(part, ast.Call)}
    return {
        simple_name(part).lower()
        for part in nodes
        if isinstance(part, ast.Name) or (isinstance(part, ast.Attribute) and part not in methods)
    }


def words_of(nodes: Iterable[ast.AST]) -> str:
    """Return the names, attributes and strings among nodes, in lower case and on a line each."""
    words = {getattr(node, _WORDS[type(node)]) for node in nodes if type(node) in _WORDS}
    return "\n".join([word for word in words if isinstance(word, str)]).lower()


_WORDS: Final[dict[type[ast.AST], str]] = {ast.Name: "id", ast.Attribute: "attr", ast.Constant: "value"}


def mentions(node: ast.AST, *texts: str) -> bool:
    """Return whether a name, an attribute or a string in a node contains one of some texts, in any case."""
    words = words_of(walk(node))
    return any(text in words for text in texts)


def calls(node: ast.AST, *names: str) -> bool:
    """Return whether a node contains a call of a function or method with one of some names."""
    return any(isinstance(part, ast.Call) and simple_name(part.func) in names for part in walk(node))


def tests_remainder(test: ast.AST) -> bool:
    """Return whether an expression has a remainder in it, as in ``(i + 1) % accumulate == 0``."""
    return any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) for node in walk(test))


def resets_count(node: ast.If) -> bool:
    """Return whether a condition is on a count that its body sets to zero, as in ``if count == 4:``."""
    if not isinstance(node.test, ast.Compare) or not isinstance(node.test.ops[0], ast.Eq | ast.Gt | ast.GtE):
        return False
    count = dotted_name(node.test.left)
    resets = (s for s in node.body if isinstance(s, ast.Assign) and count in map(dotted_name, s.targets))
    return count != "" and any(isinstance(s.value, ast.Constant) and s.value.value == 0 for s in resets)


def enters_autocast(node: ast.With) -> bool:
    """Return whether a ``with`` statement names autocast."""
    return any(mentions(item.context_expr, "autocast") for item in node.items)


def walk(node: ast.AST) -> list[ast.AST]:
    """Return a node and those inside it, outer ones first, except aliases, contexts and operators."""
    nodes = [node]
    for node in nodes:
        for name in _FIELDS[type(node)]:
            part = getattr(node, name, None)
            if type(part) is list:
                nodes += filter(None, part) if name in _WITH_GAPS else part
            elif part is not None:
                nodes.append(part)
    return nodes


_WITHOUT_NODES: Final = frozenset(
    "arg asname attr conversion ctx id is_async kind kwd_attrs level lineno module name names op ops rest"
    " simple str tag type_comment".split()
)
_WITH_GAPS: Final = frozenset({"keys", "kw_defaults"})  # lists that have ``None`` where there is no node
_FIELDS: Final = {  # that hold nodes, by kind of node
    kind: [name for name in kind._fields if name not in _WITHOUT_NODES]
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
} | {ast.Constant: [], ast.MatchSingleton: []}


def nested_blocks(statement: ast.AST) -> list[list[ast.stmt]]:
    """Return the blocks directly inside a statement."""
    if type(statement) not in _WITH_BLOCKS:
        return []
    blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    blocks += [part.body for part in (*getattr(statement, "handlers", []), *getattr(statement, "cases", []))]
    return [block for block in blocks if block]


_WITH_BLOCKS: Final = frozenset(
    kind
    for kind in _FIELDS
    if {"body", "cases"} & {*kind._fields} and not issubclass(kind, ast.expr | ast.Expression)
)


def parameter_defaults(arguments: ast.arguments) -> dict[str, ast.expr]:
    """Return the defaults of parameters, by name."""
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    defaults = dict(zip(positional[::-1], arguments.defaults[::-1], strict=False))
    by_keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return defaults | {argument.arg: default for argument, default in by_keyword if default is not None}


def imported_modules(tree: ast.Module) -> list[str]:
    """Return the dotted names of the modules that a script may import at module level, as in ``.utils``."""
    modules: dict[str, None] = {}
    pending: list[ast.stmt] = list(tree.body)
    for node in pending:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = module_of(node) if isinstance(node, ast.ImportFrom) else ""
            names = (join_names(module, alias.name) for alias in node.names)
            modules |= dict.fromkeys(filter(None, (module, *names)))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            pending += [inner for block in nested_blocks(node) for inner in block]
    return list(modules)


def module_of(node: ast.ImportFrom) -> str:
    """Return the dotted name of the module from which names are imported, as in ``..utils``."""
    return "." * node.level + (node.module or "")


def join_names(module: str, name: str) -> str:
    """Return the dotted name of a member of a module, whose own name may be empty, or only dots."""
    return f"{module}{name}" if not module or module.endswith(".") else f"{module}.{name}"
