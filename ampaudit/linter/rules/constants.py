"""Rules on literals that float16 cannot represent: masks outside its range, eps that rounds to zero."""

from __future__ import annotations

import ast
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from ampaudit.core.text import is_number
from ampaudit.linter.diagnostic import Certainty, Fix, Mistake, line_of, position_of
from ampaudit.linter.flow.events import HalfLayer, ScalerStep, ScalerUnscale, ScriptFollowed, of_type
from ampaudit.linter.flow.interpreter import Interpreter
from ampaudit.linter.flow.script import Script
from ampaudit.linter.flow.syntax import (
    covers_line,
    dotted_name,
    keyword_value,
    last_component,
    mentions,
    nested_blocks,
    simple_name,
)
from ampaudit.linter.flow.torch_names import (
    BFLOAT16_ROUNDS_TO_ONE,
    DTYPES,
    FLOAT16_ROUNDS_TO_ONE,
    FLOAT16_ROUNDS_TO_ZERO,
    MAKES_TENSORS,
    canonical_name,
)
from ampaudit.linter.rules.rule import rule

_FLOAT16_MAX: Final = 65504.0
_SMALL: Final = 2.0**-8
# autocast computes these in float32, and so what is added to them
_FLOAT32_FUNCTIONS: Final = frozenset(
    "norm sum exp softmax log_softmax pow prod cumsum dist logsumexp float double item".split()
)
# from where a number rounds to 1, the largest below that, and one that is surely not rounded to it
_BELOW_ONE: Final = {
    "float16": (FLOAT16_ROUNDS_TO_ONE, "0.9995", "0.999"),
    "bfloat16": (BFLOAT16_ROUNDS_TO_ONE, "0.996", "0.99"),
}
_FILLS: Final = frozenset({"masked_fill", "masked_fill_"})
_OTHER_FILLS: Final = frozenset("fill_ fill_diagonal_ index_fill index_fill_ full_like new_full".split())
_LOGARITHMS: Final = frozenset("log log1p log2 log10 logit atanh".split())  # infinite at 0 or 1


@rule("AMP860", ScriptFollowed, of_dtypes=True)
def _unfit_masks(flow: Interpreter, _: ScriptFollowed) -> Iterator[Mistake]:
    yield from (item for item in _unfit_numbers(flow) if item.code == "AMP860")


@rule("AMP861", ScriptFollowed, of_dtypes=True)
def _rounded_numbers(flow: Interpreter, _: ScriptFollowed) -> Iterator[Mistake]:
    yield from (item for item in _unfit_numbers(flow) if item.code == "AMP861")


@lru_cache(maxsize=1)
def _unfit_numbers(flow: Interpreter) -> list[Mistake]:
    """Return the masks everywhere, and the eps in modules, whose tensors may be 16-bit, for both rules.

    Ops with a float32 operand are left out; a mask likely meets float16 under float16 autocast.
    """
    script, uses = flow.linked.main, flow.dtype_uses
    if "torch" not in script.text:
        return []
    nodes: list[ast.expr] = [c for c in script.of_type(ast.Constant) if type(c.value) in (int, float)]
    nodes += [limit for limit in script.of_type(ast.Attribute) if limit.attr in ("min", "max")]
    numbers = ((n, number_of(n)) for n in (*nodes, *script.of_type(ast.BinOp)))
    lines = sorted({n.lineno for n, number in numbers if number is not None and _is_extreme(number)})
    if not lines:
        return []
    diagnostics: list[Mistake] = []
    float16, exempt, bfloat16 = map(uses.positions, ("float16", "float32", "bfloat16"))
    by_dtype = {"float16": float16, "bfloat16": bfloat16}
    finder = ConstantFinder(_named_constants(script, lines), uses.numbers, float16, bfloat16)
    lines = sorted({*lines, *(line_of(node) for node, n in uses.numbers.items() if _is_extreme(n))})
    if finder.named:
        last = set(map(last_component, finder.named))
        names = (node for node in script.of_type(ast.Name, ast.Attribute) if simple_name(node) in last)
        lines = sorted({*lines, *(line_of(node) for node in names if dotted_name(node) in finder.named)})
    modules = [c.node for c in script.classes.values() if c.is_module]
    for statement in _innermost_statements(script.tree.body, lines):
        module = any(covers_line(node, statement.lineno) for node in modules)
        is_likely = statement.lineno in uses.half_lines or (module and bool(uses.half_lines))
        likely = Certainty.LIKELY if is_likely else Certainty.UNKNOWN
        for diagnostic in finder.check(statement, module or bool(float16) or bool(bfloat16)):
            by_flow = by_dtype[diagnostic.dtype].get(position_of(diagnostic.node))
            if position_of(diagnostic.node) in exempt and by_flow is None:
                continue
            # without a known dtype, a fill value is likely wrong; most eps are in norms, which stay float32
            guess = likely if diagnostic.code == "AMP860" else Certainty.UNKNOWN
            certainty = guess if by_flow is None else by_flow
            diagnostics.append(replace(diagnostic, certainty=certainty))
    return diagnostics


def _is_extreme(value: float) -> bool:
    """Return whether a number may be too large for float16, too small, or too close to 1."""
    return abs(value) > _FLOAT16_MAX or 0 < abs(value) < _SMALL or 1 - _SMALL < value < 1


def _innermost_statements(body: list[ast.stmt], lines: list[int]) -> Iterator[ast.stmt]:
    """Yield the innermost statements that contain any of some lines."""
    for statement in body:
        at = bisect_left(lines, statement.lineno)
        if at == len(lines) or not covers_line(statement, lines[at]):
            continue
        blocks = nested_blocks(statement)
        if not blocks:
            yield statement
        if isinstance(statement, ast.If) and mentions(
            statement.test, "float16", "half", "dtype", "fp16", "autocast"
        ):
            continue  # it handles 16 bits explicitly
        for block in blocks:
            yield from _innermost_statements(block, lines)


def _named_constants(script: Script, lines: list[int]) -> dict[str, ast.expr]:
    """Return names that are bound once, to such a number, as in ``LOW = -1e9`` or ``def f(fill=-1e9)``."""
    constants: dict[str, ast.expr] = {}
    for statement in _innermost_statements(script.tree.body, lines):
        if isinstance(statement, ast.Assign):
            constants |= {
                name: statement.value for target in statement.targets if (name := dotted_name(target))
            }
    for info in script.classes.values():
        for statement in info.node.body:
            if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
                places = (f"self.{dotted_name(target)}", f"{info.node.name}.{dotted_name(target)}")
                constants |= dict.fromkeys(places, statement.value)
    for function in script.of_type(ast.FunctionDef) if lines else ():
        arguments = function.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        constants |= dict(zip(names[::-1], arguments.defaults[::-1], strict=False))
    constants = {name: value for name, value in constants.items() if number_of(value) is not None}
    if constants:
        stored = Counter(a.name for a in script.assignments)
        stored += Counter(parameter.arg for parameter in script.of_type(ast.arg))
        constants = {
            name: value for name, value in constants.items() if stored[name] == (1 if name in stored else 0)
        }
    return constants


def number_of(node: ast.AST) -> float | None:
    """Return the value of an expression of literal numbers, or of the limits of float32."""
    if isinstance(node, ast.Constant):
        value = node.value
        return _as_float(value) if is_number(value) else None
    if isinstance(node, ast.Attribute):
        call = node.value
        if node.attr not in ("min", "max") or not isinstance(call, ast.Call) or len(call.args) != 1:
            return None
        is_float32 = last_component(dotted_name(call.args[0])) in ("float", "float32")
        limit = -_FLOAT32_MAX if node.attr == "min" else _FLOAT32_MAX
        return limit if is_float32 and dotted_name(call.func) in _FINFO else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        operand = number_of(node.operand)
        return None if operand is None else -operand
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = number_of(node.left), number_of(node.right)
        if left is None or right is None or abs(right) > _MAX_OPERAND or abs(left) > _MAX_OPERAND:
            return None
        return _OPERATORS[type(node.op)](left, right)
    return None


def _as_float(value: float) -> float:
    """Return a literal as a float, which is infinite if it is a larger integer."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _power(base: float, exponent: float) -> float:
    """Return a power; 0 stands for one that no script writes, or that is complex or too large."""
    is_complex = base < 0 and not exponent.is_integer()
    if is_complex or not 0 < abs(base) <= _MAX_BASE or abs(exponent) > _MAX_EXPONENT:
        return 0.0
    try:
        return float(base**exponent)
    except OverflowError:
        return 0.0


_MAX_BASE: Final = 2.0**10
_MAX_EXPONENT: Final = 2.0**6
_MAX_OPERAND: Final = 1e12
_FLOAT32_MAX: Final = float.fromhex("0x1.fffffep127")
_FINFO: Final = frozenset({"torch.finfo", "np.finfo", "numpy.finfo"})
_OPERATORS: Final[dict[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Mult: lambda left, right: left * right,
    ast.Pow: _power,
}


def _is_float32(node: ast.AST) -> bool:
    """Return whether an expression is float32 under autocast whatever its inputs are."""
    while isinstance(node, ast.BinOp | ast.UnaryOp):
        if isinstance(node, ast.BinOp):
            return _is_float32(node.left) or _is_float32(node.right)
        node = node.operand
    if not isinstance(node, ast.Call):
        return False
    name = simple_name(node.func)
    if name in _FLOAT32_FUNCTIONS or mentions(node, "float32"):
        return True
    return (
        isinstance(node.func, ast.Attribute)
        and name in ("clamp", "mean", "sqrt", "masked_fill")
        and _is_float32(node.func.value)
    )


@dataclass(frozen=True, slots=True)
class UnfitNumber(Mistake):
    """A number that a 16-bit ``dtype`` cannot hold."""

    dtype: str = "float16"


@dataclass(frozen=True, slots=True)
class ConstantFinder:
    """Finds the numbers that float16 cannot represent.

    Attributes:
        named: Values of names that stand for such numbers.
        numbers: Numbers that names stand for, by the flow.
        float16: Positions of ops with a float16 operand, and of their operands.
        bfloat16: Positions of ops with a bfloat16 operand.
    """

    named: dict[str, ast.expr]
    numbers: Mapping[ast.AST, float]
    float16: Mapping[tuple[int, int], Certainty]
    bfloat16: Mapping[tuple[int, int], Certainty]

    def check(self, statement: ast.stmt, module: bool) -> Iterator[UnfitNumber]:
        """Yield the numbers in a statement, those of a module's ops as well if it is in one."""
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                yield from self._check_fill(node)
                if module:
                    yield from self._check_clamp(node)
            elif isinstance(node, ast.BinOp):
                if isinstance(node.op, ast.Mult):
                    yield from self._check_product(node)
                elif isinstance(node.op, ast.Add) and module:
                    yield from self._check_sum(node)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
                yield from self._check_assignment(node, node.targets[0])

    def _literal(self, node: ast.AST) -> float | None:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._literal(node.operand)
            return None if value is None else -value
        if node in self.numbers:
            return float(self.numbers[node])
        is_name = isinstance(node, ast.Name | ast.Attribute)
        return number_of(self.named.get(dotted_name(node), node) if is_name else node)

    def _is_float16(self, value: ast.expr) -> bool:
        """Return whether a number is the operand of an op of a float16 tensor, by the flow."""
        return position_of(value) in self.float16

    def _is_exempt(self, value: ast.expr, other: ast.AST) -> bool:
        return not self._is_float16(value) and _is_float32(other)

    def _too_large(self, node: ast.AST) -> bool:
        value = self._literal(node)
        return value is not None and _FLOAT16_MAX < abs(value) < float("inf")

    def _mask_diagnostic(self, value: ast.expr, text: str = "", node: ast.AST | None = None) -> UnfitNumber:
        """Report a mask at a node, by default the value itself, that fills the tensor with a name."""
        limit = "min" if (self._literal(value) or 0) < 0 else "max"
        return UnfitNumber(
            node or value,
            f"{self._literal(value):g} is outside the range of float16, whose minimum "
            "is -65504: filling with it raises, a product is -inf",
            "use torch.finfo(x.dtype).min of the tensor to fill",
            Fix.at(value, "replace", f"torch.finfo({text}.dtype).{limit}") if text else None,
            code="AMP860",
        )

    def _check_fill(self, node: ast.Call) -> Iterator[UnfitNumber]:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in _FILLS and isinstance(node.func, ast.Attribute):
            index = 2 if dotted_name(node.func.value) == "torch" else 1
            values = [*node.args[index : index + 1], *(k.value for k in node.keywords if k.arg == "value")]
            for value in values:
                receiver = node.args[0] if index == 2 and node.args else node.func.value
                if self._too_large(value) and not self._is_exempt(value, receiver):
                    yield self._mask_diagnostic(value, dotted_name(receiver))
        elif name in _OTHER_FILLS:
            for value in (*node.args, *(keyword.value for keyword in node.keywords)):
                if self._too_large(value) and self._is_float16(value):
                    yield self._mask_diagnostic(value)
        elif name == "where" and node.args:
            for value, other in zip(node.args[1:3], node.args[2:0:-1], strict=False):
                # two numbers create a float32 tensor, which promotes what it is added to
                is_fill = self._too_large(value) and self._literal(other) is None
                is_mask = mentions(node.args[0], "mask") or self._is_float16(value)
                if is_fill and is_mask and not self._is_exempt(value, other):
                    yield self._mask_diagnostic(value, dotted_name(other))

    def _check_product(self, node: ast.BinOp) -> Iterator[UnfitNumber]:
        for value, other in ((node.left, node.right), (node.right, node.left)):
            is_low = self._is_float16(value) and (self._literal(value) or 0) < 0
            is_mask = self._too_large(value) and (is_low or mentions(other, "mask"))
            if is_mask and not self._is_exempt(value, other):
                yield self._mask_diagnostic(value, node=value if is_low else node)

    def _check_assignment(self, node: ast.Assign, target: ast.Subscript) -> Iterator[UnfitNumber]:
        # a large positive number initializes the search for a minimum, mostly outside 16 bits
        low = (self._literal(node.value) or 0) < 0
        is_mask = mentions(target.slice, "mask") or self._is_float16(node.value)
        if low and self._too_large(node.value) and is_mask:
            name = dotted_name(target.value)
            if name and not name.startswith("np"):
                yield self._mask_diagnostic(node.value, name)

    def _rounds_to_zero(self, node: ast.AST) -> bool:
        value = self._literal(node)
        return value is not None and 0 < abs(value) <= FLOAT16_ROUNDS_TO_ZERO

    def _rounds_to_one(self, node: ast.AST, limit: float) -> bool:
        """Return whether an expression is ``1 - eps``, or such a number, that 16 bits round to 1."""
        value = self._literal(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and self._literal(node.left) == 1:
            eps = self._literal(node.right)
            value = None if eps is None else 1 - eps
        return value is not None and 1 - limit <= value < 1

    def _eps_diagnostic(self, value: ast.expr) -> UnfitNumber:
        return UnfitNumber(
            value,
            f"{self._literal(value):g} rounds to zero in float16, whose smallest number is 6e-8",
            "use at least 1e-6, or compute this in float32",
            code="AMP861",
        )

    def _check_sum(self, node: ast.BinOp) -> Iterator[UnfitNumber]:
        for value, other in ((node.left, node.right), (node.right, node.left)):
            is_eps = self._rounds_to_zero(value) and self._literal(other) is None
            if is_eps and not self._is_exempt(value, other):
                yield self._eps_diagnostic(value)

    def _check_clamp(self, node: ast.Call) -> Iterator[UnfitNumber]:
        names = ("clamp", "clamp_", "clamp_min", "clamp_min_", "clip")
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in names:
            return
        receiver = node.func.value
        if dotted_name(receiver) == "torch":
            receiver = node.args[0] if node.args else node
        values = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "min")]
        for value in values:
            if self._rounds_to_zero(value) and not self._is_exempt(value, receiver):
                yield self._eps_diagnostic(value)
        largest = node.args[-1:] if len(node.args) > 1 else []
        dtype = "bfloat16" if position_of(node) in self.bfloat16 else "float16"
        limit, below, most = _BELOW_ONE[dtype]
        for value in (*largest, *(k.value for k in node.keywords if k.arg == "max")):
            if self._rounds_to_one(value, limit) and not _is_float32(receiver):
                yield UnfitNumber(
                    node,
                    f"{ast.unparse(value)} rounds to 1 in {dtype}, whose largest number below 1 is {below}",
                    f"use at most {most}, or compute this in float32",
                    code="AMP861",
                    dtype=dtype,
                )


@rule("AMP801", ScriptFollowed)
def _half_layers(flow: Interpreter, followed: ScriptFollowed) -> Iterator[Mistake]:
    """Check layers that are made with ``dtype=torch.float16``, unless the script freezes parameters."""
    steps = [event for event in followed.events if isinstance(event, ScalerUnscale | ScalerStep)]
    if not steps or flow.linked.mentions("requires_grad"):
        return
    for event in of_type(followed.events, HalfLayer):
        yield Mistake(
            event.node,
            f"these parameters are float16, and the scaler at line {line_of(steps[0].node)} cannot "
            "unscale float16 gradients",
            "make the layer in float32 and let autocast choose the dtype of each op",
            certainty=Certainty.LIKELY,
        )


@rule("AMP873", ScriptFollowed, of_dtypes=True)
def _half_accumulators(flow: Interpreter, _: ScriptFollowed) -> Iterator[Mistake]:
    """Report tensors that are made in 16 bits and to which a later line adds again and again."""
    script = flow.linked.main
    if "float16" not in script.text and "half" not in script.text:
        return
    others = {item.name for item in script.assignments if not _dtype(script, item.value)}
    totals = {item.name: item.value for item in script.assignments if item.name not in others}
    for node in script.of_type(ast.AugAssign) if totals else ():
        index = node.target.slice if isinstance(node.target, ast.Subscript) else None
        name = dotted_name(node.target.value if isinstance(node.target, ast.Subscript) else node.target)
        repeats = "." in name or any(isinstance(part, ast.For | ast.While) for part in script.around(node))
        if name not in totals or not isinstance(node.op, ast.Add) or not repeats:
            continue
        if index is None or _names_element(totals[name], index):  # a region's elements may get few numbers
            dtype = _dtype(script, totals[name])
            largest = "256" if dtype == "bfloat16" else "2048"
            yield Mistake(
                node,
                f"this total is {dtype} and rounded at each addition: above {largest} times what is "
                "added, it stands still",
                "keep the total in float32",
                certainty=Certainty.LIKELY,
            )


def _names_element(tensor: ast.expr, index: ast.expr) -> bool:
    """Return whether an index names one element, as the tensor is made with a single size."""
    sizes = tensor.args if isinstance(tensor, ast.Call) else []
    single = len(sizes) == 1 and isinstance(sizes[0], ast.Constant | ast.Name | ast.Attribute)
    return single and not any(isinstance(part, ast.Slice) for part in ast.walk(index))


def _dtype(script: Script, value: ast.expr) -> str:
    """Return the 16-bit dtype in which ``torch.zeros`` and the like make a tensor; empty otherwise."""
    function = dotted_name(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
    if not isinstance(value, ast.Call) or function not in MAKES_TENSORS:
        return ""
    dtype_argument = keyword_value(value, "dtype")
    name = "" if dtype_argument is None else dotted_name(dtype_argument)
    assignments = script.assigned.get(name, [])
    name = dotted_name(assignments[0].value) if len(assignments) == 1 else name
    dtype = DTYPES.get(canonical_name(name), "")
    return dtype if dtype in ("float16", "bfloat16") else ""
