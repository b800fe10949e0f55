"""Rule on running averages of weights that are kept in 16 bits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from ampaudit.linter.diagnostic import Certainty, Diagnostic
from ampaudit.linter.flow.script import Script, dotted_name

__all__ = ["check_half_averages"]

_OF_WEIGHTS: Final = re.compile(r"state_dict\(|parameters\(|deepcopy\(")
_HALVED: Final = re.compile(r"\.half\(\)|(?:\.to\(|dtype=)[^()]*torch\.(?P<dtype>half|float16|bfloat16)\b")
_SMALLEST_CHANGE: Final = {"float16": "1/2048", "bfloat16": "1/256"}  # half a unit in the last place


def check_half_averages(script: Script) -> Iterator[Diagnostic]:
    """Report copies of the weights in 16 bits that a later line averages with new ones in place."""
    if "half" not in script.text and "float16" not in script.text:
        return
    made: dict[str, tuple[ast.Assign, str]] = {}
    for node in script.nodes():
        if isinstance(node, ast.Assign):
            text = ast.unparse(node.value)
            halved = _HALVED.search(text) if _OF_WEIGHTS.search(text) else None
            if halved is not None:
                dtype = "bfloat16" if halved["dtype"] == "bfloat16" else "float16"
                made |= {dotted_name(t): (node, dtype) for t in node.targets if dotted_name(t)}
    averaged = _averaged(script) if made else {}
    for name, (node, dtype) in made.items():
        if name in averaged:
            yield Diagnostic(
                "AMP867",
                node,
                f"these copies of the weights are {dtype}, and line {averaged[name]} averages them: changes "
                f"of less than {_SMALLEST_CHANGE[dtype]} of a weight are rounded away, and the average "
                "stands still",
                "keep the average in float32, and cast a copy of it where it is used",
                certainty=Certainty.LIKELY,
            )


def _averaged(script: Script) -> dict[str, int]:
    """Return the lines at which something is averaged in place, by the names that hold it."""
    found: dict[str, int] = {}
    sources = _loop_sources(script)
    for node in script.nodes():
        target = _average(node)
        if target is not None:
            name = dotted_name(target.value if isinstance(target, ast.Subscript) else target)
            name = name.removesuffix(".data")
            line: int = target.lineno
            found |= dict.fromkeys((name, *sources.get(name, ())), line)
    return found


def _average(node: ast.AST) -> ast.expr | None:
    """Return what ``x.mul_(decay).add_(...)``, ``x.lerp_(...)`` or ``x = decay * x + ...`` averages."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
        target, text = node.targets[0], ast.unparse(node.value)
        is_mean = isinstance(node.value.op, ast.Add) and ast.unparse(target) in text and "1 - " in text
        return target if is_mean else None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    if node.func.attr == "lerp_":
        return node.func.value
    inner = node.func.value
    if not isinstance(inner, ast.Call) or not isinstance(inner.func, ast.Attribute):
        return None
    return inner.func.value if (inner.func.attr, node.func.attr) == ("mul_", "add_") else None


def _loop_sources(script: Script) -> dict[str, set[str]]:
    """Return the names whose parameters or items each loop variable is one of."""
    found: dict[str, set[str]] = {}
    for node in script.nodes():
        if not isinstance(node, ast.For):
            continue
        zipped = isinstance(node.iter, ast.Call) and dotted_name(node.iter.func) == "zip"
        sources = node.iter.args if zipped and isinstance(node.iter, ast.Call) else [node.iter]
        targets = node.target.elts if isinstance(node.target, ast.Tuple) and zipped else [node.target]
        for target, source in zip(targets, sources, strict=False):
            called = source.func if isinstance(source, ast.Call) else None
            owner = called.value if isinstance(called, ast.Attribute) else source
            for name in (n.id for n in ast.walk(target) if isinstance(n, ast.Name)):
                found.setdefault(name, set()).add(dotted_name(owner))
    return found
