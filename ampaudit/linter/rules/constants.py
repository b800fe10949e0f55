"""Rules on literals that float16 cannot represent: masks outside its range, eps that rounds to zero."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import replace

import re2

from ampaudit.linter.diagnostic import Certainty, Diagnostic, position_of
from ampaudit.linter.flow.dtype_uses import DtypeUses
from ampaudit.linter.flow.relevance import matching_lines
from ampaudit.linter.flow.script import Script
from ampaudit.linter.flow.syntax import dotted_name, nested_blocks
from ampaudit.linter.rules.constant_finder import ConstantFinder, number_of

__all__ = ["check_constants"]


def check_constants(script: Script, uses: DtypeUses) -> Iterator[Diagnostic]:
    """Check masks everywhere, and eps in modules, whose tensors may be 16-bit.

    Ops with a float32 operand are left out; a mask likely meets float16 under float16 autocast.
    """
    if "torch" not in script.text:
        return
    lines = matching_lines(_EXTREME, script.text)
    if not lines:
        return
    known, exempt, bfloat16 = map(uses.positions, ("float16", "float32", "bfloat16"))
    by_dtype = {"float16": known, "bfloat16": bfloat16}
    finder = ConstantFinder(_named_constants(script, lines), bfloat16)
    if finder.named:
        names = "|".join(map(re.escape, finder.named))
        lines = sorted({*lines, *matching_lines(re2.compile(rf"\b(?:{names})\b"), script.text)})
    for statement in _innermost_statements(script.tree.body, lines):
        module = any(_contains_line(node, statement.lineno) for node in _modules(script))
        is_likely = statement.lineno in uses.half_lines or (module and bool(uses.half_lines))
        likely = Certainty.LIKELY if is_likely else Certainty.UNKNOWN
        for found in finder.check(statement, module or bool(known) or bool(bfloat16)):
            by_flow = by_dtype[found.dtype].get(position_of(found.node))
            if position_of(found.node) in exempt and by_flow is None:
                continue
            certainty = (
                min(likely, _likely(found, statement, uses.half_lines)) if by_flow is None else by_flow
            )
            yield replace(found, certainty=certainty)


def _likely(found: Diagnostic, statement: ast.stmt, half_lines: Set[int]) -> Certainty:
    """Return the highest certainty without a known dtype; most eps are in norms, which stay float32."""
    in_log = "log(" in ast.unparse(statement) and statement.lineno in half_lines
    return Certainty.LIKELY if found.code == "AMP860" or in_log else Certainty.UNKNOWN


_BY_DTYPE = re.compile(r"float16|half|dtype|fp16|autocast")
# how numbers that may be too large or too small are written
_EXTREME = re2.compile(r"\d[eE][-+]?\d|\d{6}|\d_\d{3}|\d ?\*\* ?\d|finfo\(")


def _modules(script: Script) -> Iterator[ast.ClassDef]:
    return (c.node for c in script.classes.values() if c.derives("Module", "LightningModule"))


def _contains_line(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or statement.lineno)


def _innermost_statements(body: list[ast.stmt], lines: list[int]) -> Iterator[ast.stmt]:
    """Yield the innermost statements that contain any of some lines."""
    for statement in body:
        at = bisect_left(lines, statement.lineno)
        if at == len(lines) or not _contains_line(statement, lines[at]):
            continue
        blocks = nested_blocks(statement)
        if not blocks:
            yield statement
        if isinstance(statement, ast.If) and _BY_DTYPE.search(ast.unparse(statement.test)):
            continue  # it handles 16 bits explicitly
        for block in blocks:
            yield from _innermost_statements(block, lines)


def _named_constants(script: Script, lines: list[int]) -> dict[str, ast.expr]:
    """Return names that are bound once, to such a number, as in ``LOW = -1e9`` or ``def f(fill=-1e9)``."""
    found: dict[str, ast.expr] = {}
    for statement in _innermost_statements(script.tree.body, lines):
        if isinstance(statement, ast.Assign):
            found |= {name: statement.value for target in statement.targets if (name := dotted_name(target))}
    for info in script.classes.values():
        for statement in info.node.body:
            if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
                places = (f"self.{dotted_name(target)}", f"{info.node.name}.{dotted_name(target)}")
                found |= dict.fromkeys(places, statement.value)
    functions = [n for n in script.nodes() if isinstance(n, ast.FunctionDef)] if lines else []
    for function in functions:
        arguments = function.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        found |= dict(zip(names[::-1], arguments.defaults[::-1], strict=False))
    found = {name: value for name, value in found.items() if number_of(value) is not None}
    if found:
        stored = Counter(a.name for a in script.assignments)
        nodes = script.nodes()
        stored += Counter(n.arg for n in nodes if isinstance(n, ast.arg))
        found = {name: value for name, value in found.items() if stored[name] == (1 if name in stored else 0)}
    return found
