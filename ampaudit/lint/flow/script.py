"""A parsed script: its functions, classes and imports, and which of its lines matter."""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import re2

from ampaudit.lint.flow.ducks import Ducks
from ampaudit.lint.flow.values import ClassInfo, FunctionInfo
from ampaudit.lint.source_text import split_lines

__all__ = [
    "Script",
    "dotted",
    "enters_autocast",
    "flag_of",
    "has_own_context",
    "may_matter",
    "parse",
    "read_script",
]

# a line without any of these has no part in a training loop's precision
_MATTERS = re2.compile(
    r"autocast|[Ss]caler|\bscale|backward|\bhalf\b|float16|\.float\(|\.step\b|zero_grad|\bgrad\b|clip_grad|\.update\("
    r"|masked_fill|\d[eE]-?\d|BCELoss|binary_cross|\bamp\b|no_sync|DataParallel|state_dict|autograd|\bitem\("
    r"|Function|optim|retain_graph|no_grad|inference_mode|\beval\(|\btrain\(|-\d{5,}|inf\b"
)
# a file without any of these has nothing to be found
_MENTIONS = re2.compile(
    r"autocast|GradScaler|unscale_|\bapex\b|half\(|float16|\.amp\b|import amp\b|masked_fill"
    r"|\.scale\(|scaler|-\d+(?:\.\d*)?[eE]\d|-\d{5,}|\d[eE]-|retain_graph|no_sync|autograd\.Function"
)


@dataclass(slots=True)
class Script:
    """One module.

    Attributes:
        tree: its syntax tree.
        text: its text.
        functions: those of the module itself, by name.
        classes: all, by name.
        ducks: what is done with names.
        imports: dotted names of all that is imported.
    """

    tree: ast.Module
    text: str
    functions: dict[str, FunctionInfo] = field(default_factory=dict)
    classes: dict[str, ClassInfo] = field(default_factory=dict)
    ducks: Ducks = field(default_factory=Ducks)
    imports: set[str] = field(default_factory=set)
    busy_lines: list[int] = field(default_factory=list)

    def is_busy(self, node: ast.stmt) -> bool:
        """Whether any line of a statement matters."""
        decorators = getattr(node, "decorator_list", ())
        at = bisect_left(self.busy_lines, min((d.lineno for d in decorators), default=node.lineno))
        return at < len(self.busy_lines) and self.busy_lines[at] <= (node.end_lineno or node.lineno)


def parse(text: str) -> ast.Module:
    """The syntax tree.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it cannot be parsed.
    """
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in somebody's strings
        return ast.parse(text)


def enters_autocast(node: ast.With) -> bool:
    """Whether a ``with`` names autocast."""
    return any("autocast" in ast.unparse(item.context_expr) for item in node.items)


def lines_with(pattern: Any, text: str) -> list[int]:
    """Numbers of the lines in which a pattern of re2 matches, in order."""
    if "\r" in text:
        return [number for number, line in enumerate(split_lines(text), 1) if pattern.search(line)]
    found: list[int] = []
    line, last = 1, 0
    for match in pattern.finditer(text):
        line += text.count("\n", last, match.start())
        last = match.start()
        if not found or found[-1] != line:
            found.append(line)
    return found


def may_matter(text: str) -> bool:
    """Whether a script has any word that a finding could be about; most files of a project have none."""
    return _MENTIONS.search(text) is not None


def read_script(text: str) -> Script:
    """Parse and survey a module.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it cannot be parsed.
    """
    script = Script(parse(text), text)
    script.busy_lines = lines_with(_MATTERS, text)
    _survey(script, script.tree.body, None)
    return script


def _survey(script: Script, body: list[ast.stmt], owner: ClassInfo | None) -> None:
    """Note functions, classes, imports; look into statements whose lines matter."""
    for node in body:
        if isinstance(node, ast.Import):
            script.imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            script.imports.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ClassDef):
            _survey_class(script, node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            info = FunctionInfo(node, owner, script.is_busy(node))
            if owner is not None:
                owner.methods[node.name] = info
            else:
                script.functions.setdefault(node.name, info)
            if info.busy:
                _survey_uses(script, node.body)
        elif script.is_busy(node):
            _survey_uses(script, [node])


def _survey_class(script: Script, node: ast.ClassDef) -> None:
    bases = tuple(text for base in node.bases if (text := dotted(base)))
    mother = next((script.classes[base] for base in bases if base in script.classes), None)
    info = ClassInfo(node, bases, {}, mother)
    script.classes[node.name] = info
    _survey(script, node.body, info)


def _survey_uses(script: Script, body: list[ast.stmt]) -> None:
    for node in _walk(body):
        if isinstance(node, ast.Call):
            _note_call(script.ducks, node)
        elif isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef):
            _survey(script, [node], None)


def _walk(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """All nodes, without contexts, operators and constants."""
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        yield node
        for name in node._fields:
            child = getattr(node, name, None)
            if isinstance(child, list):
                pending += [item for item in child if isinstance(item, ast.AST)]
            elif isinstance(child, ast.expr) and not isinstance(child, ast.Name | ast.Constant):
                pending.append(child)


def _note_call(ducks: Ducks, node: ast.Call) -> None:
    if not isinstance(node.func, ast.Attribute):
        text = dotted(node.func)
        if text:
            ducks.methods.setdefault(text, set()).add("(call)")
        return
    text = dotted(node.func.value)
    whole = f"{text}.{node.func.attr}" if text else ""
    if whole:
        ducks.methods.setdefault(whole, set()).add("(call)")
        ducks.methods.setdefault(text, set()).add(node.func.attr)
        if node.func.attr in ("step", "unscale_") and node.args and (given := dotted(node.args[0])):
            ducks.stepped.setdefault(text, set()).add(given)


def has_own_context(node: ast.AST) -> bool:
    """Whether a function goes through data or enters autocast itself: then it is called outside of it."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.For | ast.AsyncFor | ast.While):
            return True
        if isinstance(inner, ast.With) and enters_autocast(inner):
            return True
    return False


def dotted(node: ast.AST) -> str:
    """``self.optimizer`` of such an expression; empty for others."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        base = dotted(node.value)
        head = f"{base}[{node.slice.value!r}]" if base else ""
    else:
        head = node.id if isinstance(node, ast.Name) else ""
    return ".".join([head, *reversed(parts)]) if head else ""


def flag_of(test: ast.expr) -> tuple[str, bool] | None:
    """A condition as a name and what it must be: ``scaler is None`` is ``scaler``, False; else ``None``."""
    positive = True
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, positive = test.operand, not positive
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        other = test.comparators[0]
        if isinstance(other, ast.Constant):
            if other.value is None and isinstance(test.ops[0], ast.Is | ast.IsNot):
                positive ^= isinstance(test.ops[0], ast.Is)
                test = test.left
            elif isinstance(other.value, str | bool) and isinstance(test.ops[0], ast.Eq | ast.NotEq):
                text = dotted(test.left)
                return (
                    (f"{text} == {other.value!r}", positive ^ isinstance(test.ops[0], ast.NotEq))
                    if text
                    else None
                )
    text = dotted(test)
    return (text, positive) if text else None
