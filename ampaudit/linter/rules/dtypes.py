"""Rules on the dtypes of operands: what 16 bits cannot compute, or not accurately enough."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from ampaudit.linter.diagnostic import Certainty, Fix, Mistake
from ampaudit.linter.flow.events import LossCalled, OpEvaluated
from ampaudit.linter.flow.interpreter import Interpreter
from ampaudit.linter.flow.statement_context import nodes_around
from ampaudit.linter.flow.syntax import dotted_name, keyword_value, last_component, mentions, names_in
from ampaudit.linter.flow.torch_names import (
    MATRIX_LAYERS,
    WITHOUT_HALF_KERNEL,
    WRITES_SAME_DTYPE,
)
from ampaudit.linter.flow.values import Tensor
from ampaudit.linter.rules.rule import rule

_IN_FLOAT32: Final = "under 'with torch.autocast(device_type, enabled=False):'"


@rule("AMP844", LossCalled, of_dtypes=True)
def _probabilities(flow: Interpreter, event: LossCalled) -> Iterator[Mistake]:
    """Binary cross entropy of probabilities, which CUDA's autocast refuses."""
    autocast, node = event.autocast, event.node
    is_on = autocast.enabled is True and autocast.device != "cpu"
    if event.loss.name not in ("BCELoss", "binary_cross_entropy") or not is_on:
        return
    if autocast.conditional and _is_off_by_default(flow, autocast.node):
        return
    outputs = event.outputs
    argument = node.args[0] if isinstance(node, ast.Call) and node.args else None
    direct = isinstance(outputs, Tensor) and outputs.sigmoid is argument and isinstance(argument, ast.Call)
    yield Mistake(
        node,
        "autocast rejects binary cross entropy on probabilities, whose log easily becomes -inf in float16",
        "pass logits to BCEWithLogitsLoss or F.binary_cross_entropy_with_logits, without the sigmoid",
        Fix.at(node, "with logits") if direct and event.loss.name == "binary_cross_entropy" else None,
        Certainty.LIKELY if autocast.conditional else Certainty.KNOWN,
    )


def _is_off_by_default(flow: Interpreter, autocast: ast.AST | None) -> bool:
    """Return whether the setting that enables autocast has a default somewhere, which is false."""
    switch = keyword_value(autocast, "enabled") if isinstance(autocast, ast.Call) else None
    name = last_component(dotted_name(switch)) if switch is not None else ""
    return name != "" and any(name in script.off_by_default for script in flow.linked.scripts)


@rule("AMP854", LossCalled, of_dtypes=True)
def _loss_outside(_: Interpreter, event: LossCalled) -> Iterator[Mistake]:
    outputs, name = event.outputs, event.loss.name
    # a target of another loss may be float32, and then so is the loss
    takes_classes = name in ("cross_entropy", "CrossEntropyLoss", "nll_loss", "NLLLoss")
    if event.autocast.enabled is False and isinstance(outputs, Tensor) and outputs.cast and takes_classes:
        under, advice = "", "pass it output.float()"
        if outputs.computed_under:
            under, advice = " under autocast", f"move the loss into the autocast block, or {advice}"
        yield Mistake(
            event.node,
            f"the model's output is {outputs.cast}{under}, and so is this loss, which is computed outside"
            " autocast",
            advice,
        )


@rule("AMP846", OpEvaluated, of_dtypes=True)
def _without_kernel(flow: Interpreter, event: OpEvaluated) -> Iterator[Mistake]:
    first = event.tensors[0] if event.tensors else None
    if first is None or first.node is None:  # unknown code returned it, and may have cast it
        return
    is_bfloat16 = event.name == "numpy" and "bfloat16" in (first.dtype, first.weights_dtype)
    if is_bfloat16 and not any(
        isinstance(n, ast.If | ast.IfExp) and mentions(n.test, "bfloat16")
        for n in nodes_around(flow.linked, event.node)
    ):
        by = "the weights of the model that returned it" if first.weights_dtype else "autocast"
        yield Mistake(
            event.node,
            f"numpy has no bfloat16, which this tensor is by {by}",
            "write .float() first",
            certainty=Certainty.LIKELY if first.weights_dtype else Certainty.KNOWN,
        )
    # autocast on the CPU computes these in float32
    cast_here = event.autocast.enabled is not False and event.autocast.device == "cpu"
    if first.cast and event.path in WITHOUT_HALF_KERNEL and not cast_here:
        yield Mistake(
            event.node,
            f"{event.path} has no {first.cast} kernel, and its input is {first.cast} under autocast",
            f"compute it from float32 inputs {_IN_FLOAT32}",
        )
    is_known = first.cast in ("float16", "bfloat16")
    if event.path.startswith("torch.fft.") and is_known and event.autocast.device != "cpu":
        # cuFFT takes no bfloat16, and float16 only in sizes that are powers of 2
        is_bfloat16 = first.cast == "bfloat16"
        refused = "any bfloat16 input" if is_bfloat16 else "a size that is not a power of two in float16"
        yield Mistake(
            event.node,
            f"{event.path} refuses {refused}, and its input is {first.cast} under autocast, which does not "
            "cast it",
            f"transform x.float(), {_IN_FLOAT32}",
            certainty=Certainty.KNOWN if is_bfloat16 else Certainty.LIKELY,
        )


@rule("AMP868", OpEvaluated, of_dtypes=True)
def _exp(_: Interpreter, event: OpEvaluated) -> Iterator[Mistake]:
    value = event.tensors[0] if event.tensors else None
    is_half = value is not None and value.cast == "float16" and event.autocast.enabled is False
    if event.path == "torch.exp" and is_half and not _is_bounded(event.node):
        yield Mistake(
            event.node,
            "exp of more than 11 overflows in float16, the dtype of these values, which autocast would cast",
            "compute it from float32 values: write .float() first, or use log_softmax or cross_entropy",
            certainty=Certainty.LIKELY,
        )


def _is_bounded(node: ast.AST) -> bool:
    """Return whether exp is of what is negative, shifted by the maximum, or the logarithm of a variance."""
    assert isinstance(node, ast.Call)
    argument = (
        node.args[0] if node.args else node.func.value if isinstance(node.func, ast.Attribute) else node
    )
    start = argument
    while isinstance(start, ast.BinOp):
        start = start.left
    is_negative = isinstance(start, ast.UnaryOp) and isinstance(start.op, ast.USub)
    names = {part for part in ast.walk(argument) if isinstance(part, ast.Name | ast.Attribute)}
    texts = {part.attr if isinstance(part, ast.Attribute) else part.id for part in names}
    return is_negative or any(word in text.lower() for text in texts for word in _BOUNDS)


_BOUNDS: Final = ("max", "clamp", "clip", "sigmoid", "tanh", "var", "std", "sigma")


@rule("AMP868", OpEvaluated, of_dtypes=True)
def _log_probabilities(flow: Interpreter, event: OpEvaluated) -> Iterator[Mistake]:
    first = event.tensors[0] if event.tensors else Tensor()
    dtype = first.weights_dtype or first.cast
    if event.name not in ("log_softmax", "logsumexp") or not dtype:
        return
    enabled = event.autocast.enabled
    is_off = not (enabled if enabled is not None else flow.linked.mentions("autocast"))
    if is_off and flow.linked.uses_name("backward"):
        bits = 8 if dtype == "bfloat16" else 11
        yield Mistake(
            event.node,
            f"the model returned {dtype}, in which this is computed outside autocast: log-probabilities keep"
            f" {bits} significant bits, where autocast would compute them in float32",
            "write logits.float() first",
            certainty=Certainty.LIKELY,
        )


@rule("AMP869", OpEvaluated, of_dtypes=True)
def _angles(flow: Interpreter, event: OpEvaluated) -> Iterator[Mistake]:
    """Sines and cosines of positions that were rounded to 16 bits, also in a model that takes times."""
    for value in event.tensors:
        if value.rounded is None:
            continue
        is_angle = event.path in ("torch.sin", "torch.cos")
        is_time = (
            event.path == "torch.nn.Module"
            and value.dtype != "float16"  # in which the whole numbers of time steps are exact
            and isinstance(value.rounded, ast.Call)
            and any(_names_time(name) for name in names_in(value.rounded.func))
            and flow.linked.uses_name("backward")
        )
        if is_angle or is_time:
            yield Mistake(
                value.rounded,
                "positions or times are rounded to 16 bits here, to 8 significant bits in bfloat16 and 11 in "
                "float16: the sines and cosines of neighbors become equal",
                f"compute them in float32 {_IN_FLOAT32}, then cast",
                certainty=Certainty.LIKELY,
            )


def _names_time(name: str) -> bool:
    return name in ("time", "times") or "timestep" in name or "time_step" in name or "sigma" in name


@rule("AMP873", OpEvaluated, of_dtypes=True)
def _sum(_: Interpreter, event: OpEvaluated) -> Iterator[Mistake]:
    values, node = event.tensors[0] if event.tensors else Tensor(), event.node
    if event.path != "torch.sum" or values.cast != "float16" or event.autocast.enabled is not False:
        return
    arguments = [*node.args, *(word.value for word in node.keywords)] if isinstance(node, ast.Call) else []
    has_one_dim = any(isinstance(argument, ast.Constant | ast.UnaryOp) for argument in arguments)
    # along one dimension, of as many probabilities as there are classes
    if not (has_one_dim and values.sigmoid is not None and values.sigmoid is values.node):
        yield Mistake(
            node,
            "these values are float16, and so is their sum outside of autocast: above 65504 it is inf",
            "compute it inside the autocast block, or from values.float()",
            certainty=Certainty.LIKELY,
        )


@rule("AMP874", OpEvaluated, of_dtypes=True)
def _two_dtypes(_: Interpreter, event: OpEvaluated) -> Iterator[Mistake]:
    what = _SAME_DTYPE.get(event.name)
    dtypes = [value.dtype for value in event.tensors if value.dtype]
    casts = [dtype for dtype in dtypes if dtype in ("float16", "bfloat16")]
    if what is not None and casts and "float32" in dtypes:
        is_model = event.name == "Model"
        which = ("the weights are", "the input") if is_model else ("one is", "the other")
        yield Mistake(
            event.node,
            f"{what} takes tensors of one dtype and raises, as {which[0]} {casts[0]} and {which[1]} float32",
            "cast one to the dtype of the other, as in x.to(y.dtype)",
            certainty=Certainty.LIKELY if is_model else Certainty.KNOWN,
        )


_SAME_DTYPE: Final = {
    **{name: f"{name}()" for name in WRITES_SAME_DTYPE},
    **dict.fromkeys(MATRIX_LAYERS, "this layer"),
    "Model": "this model",
    "__setitem__": "an assignment by index or mask",
}
