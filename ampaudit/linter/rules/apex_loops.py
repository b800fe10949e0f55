"""Rule on clipping in loops that scale the loss with ``apex.amp``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampaudit.linter.diagnostic import Certainty, Diagnostic
from ampaudit.linter.flow.script import Script
from ampaudit.linter.flow.syntax import calls_method, dotted_name, has_name, keyword_value, last_component

__all__ = ["check_apex_loops"]

_MASTERS = re.compile(r"O2|O3")
_OPTIMIZER_STATE = re.compile(r"\bopt(?:im\w*|_\w+)?\.state_dict\(\)")
_OPTIMIZER_RESTORED = re.compile(r"^(?:self\.)?opt(?:im\w*|_\w+)?\.load_state_dict\(")


def check_apex_loops(script: Script) -> Iterator[Diagnostic]:
    """Check that clipping is behind the block of ``scale_loss``, and on the gradients that the step uses."""
    if "scale_loss" not in script.text:
        return
    certainty = _keeps_masters(script)
    for function in script.nodes():
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _check_function(function, certainty)
    yield from _check_states(script)


def _check_states(script: Script) -> Iterator[Diagnostic]:
    """Check that the state of apex is saved and restored beside that of the optimizer."""
    if "amp.initialize" not in script.code or "state_dict" not in script.code:
        return
    for node in script.nodes():
        text = ast.unparse(node) if isinstance(node, ast.Dict | ast.Expr) else ""
        saves = isinstance(node, ast.Dict) and _OPTIMIZER_STATE.search(text) is not None
        if saves and "amp.state_dict" not in script.code:
            yield Diagnostic(
                "AMP820",
                node,
                "the checkpoint contains the optimizer's state but not apex's: a resumed run starts at a "
                "scale that overflows",
                "save amp.state_dict() as well",
            )
        restores = isinstance(node, ast.Expr) and _OPTIMIZER_RESTORED.search(text) is not None
        if restores and "amp.load_state_dict" not in script.code:
            yield Diagnostic(
                "AMP821",
                node,
                "the optimizer resumes from a checkpoint, but apex's loss scale starts over, at one that "
                "overflows",
                "restore it as well: amp.load_state_dict(checkpoint[...])",
            )


def _keeps_masters(script: Script) -> Certainty:
    """Return how certain it is that apex keeps float32 copies of float16 parameters, as O2 does."""
    for node in script.nodes():
        if isinstance(node, ast.Call) and dotted_name(node.func).endswith("amp.initialize"):
            level = keyword_value(node, "opt_level")
            if isinstance(level, ast.Constant):
                return Certainty.KNOWN if _MASTERS.search(str(level.value)) else Certainty.UNKNOWN
            mentions_level = level is not None and re.search(r"['\"]O2['\"]", script.text)
            return Certainty.LIKELY if mentions_level else Certainty.UNKNOWN
    return Certainty.UNKNOWN


def _check_function(
    function: ast.FunctionDef | ast.AsyncFunctionDef, certainty: Certainty
) -> Iterator[Diagnostic]:
    blocks = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.With)
        and any(has_name(item.context_expr, "scale_loss") for item in node.items)
    ]
    inside = {id(node) for block in blocks for statement in block.body for node in ast.walk(statement)}
    uses_masters = bool(blocks) and has_name(function, "master_params")
    for node in ast.walk(function) if blocks else ():
        name = last_component(dotted_name(node.func)) if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or not name.startswith("clip_grad"):
            continue
        if id(node) in inside:
            yield Diagnostic(
                "AMP807",
                node,
                "the gradients are clipped inside scale_loss, at whose end apex takes the loss scale out "
                "of them",
                "clip after the block",
            )
        elif certainty and not uses_masters and node.args and calls_method(node.args[0], "parameters"):
            yield Diagnostic(
                "AMP807",
                node,
                "with O2, the optimizer steps with apex's float32 copies of the parameters: this clips "
                "the others, whose gradients are not used",
                "clip amp.master_params(optimizer)",
                certainty=certainty,
            )
