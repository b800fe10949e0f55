"""Runs a model as Python does, in FP32 or really in 16 bits, and notes its way and its overflows."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Line = tuple[str, int]
_TORCH = Path(torch.__file__).parent.as_posix()
_VALUES = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)


@dataclass
class Trail:
    """What happened on the way through the model's code.

    Attributes:
        overflows: lines at which finite values gave infinity.
        lines: lines of this folder's files, in the order in which they ran.
        decisions: whole numbers, booleans and sizes that Python was given.
        output: what the model returned.
    """

    overflows: set[Line] = field(default_factory=set)
    lines: list[Line] = field(default_factory=list)
    decisions: list[Any] = field(default_factory=list)
    output: Any = None

    def agrees(self, other: Trail) -> bool:
        """Whether both went the same way."""
        same_shapes = _shapes(self.output) == _shapes(other.output)
        return self.lines == other.lines and self.decisions == other.decisions and same_shapes


class _Observing(TorchDispatchMode):
    """Notes each op; infinity made of finite values becomes the largest number, and the run goes on."""

    def __init__(self, trail: Trail) -> None:
        super().__init__()
        self.trail = trail

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = any(map(_infinite, pytree.tree_leaves((args, kwargs))))
        out = _call(func, args, kwargs or {})
        if func in _VALUES and not isinstance(out, float):
            self.trail.decisions.append(out)
        for value in pytree.tree_leaves(out):
            if not isinstance(value, torch.Tensor):
                continue
            if torch.Tag.dynamic_output_shape in getattr(func, "tags", ()):
                self.trail.decisions.append(tuple(value.shape))
            if value.dtype is torch.float16 and not before and _infinite(value):
                self.trail.overflows.add(_line_of(sys._getframe(1)))
                value.clamp_(-65504, 65504)
        return out


def follow(
    model: nn.Module, inputs: Any, dtype: torch.dtype | None = None, *, line_by_line: bool = False
) -> Trail:
    """Run a copy of a model as it is, or all of it in another dtype; noting each line takes long."""
    trail, model, inputs = Trail(), copy.deepcopy(model), copy.deepcopy(inputs)
    if dtype is not None:
        model = model.to(dtype)
        inputs = pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, inputs
        )
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    torch.manual_seed(0)
    before = sys.gettrace()
    with torch.no_grad(), _Observing(trail):
        if line_by_line:
            sys.settrace(lambda frame, event, _: _tracer(frame, trail))
        try:
            trail.output = model(*(args if isinstance(args, tuple) else (args,)), **kwargs)
        finally:
            sys.settrace(before)
    return trail


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an op; one without a kernel for float16 computes in float32."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if "not implemented for 'Half'" not in str(error):
            raise

    def widen(value: torch.Tensor) -> torch.Tensor:
        return value.float() if value.dtype is torch.float16 else value

    out = func(*pytree.tree_map_only(torch.Tensor, widen, args), **kwargs)
    return pytree.tree_map_only(torch.Tensor, lambda v: v.half() if v.is_floating_point() else v, out)


def _shapes(output: Any) -> list[torch.Size]:
    return [value.shape for value in pytree.tree_leaves(output) if isinstance(value, torch.Tensor)]


def _infinite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() and bool(value.isinf().any())
    return isinstance(value, float) and math.isinf(value)


def _tracer(frame: FrameType, trail: Trail) -> Any:
    """Note the lines of the model's own file."""
    file = Path(frame.f_code.co_filename)
    if file == Path(__file__) or Path(__file__).parent not in file.parents:
        return None

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            trail.lines.append((frame.f_code.co_filename, frame.f_lineno))
        return local

    return local


def _line_of(frame: FrameType | None) -> Line:
    """Find the innermost line that is not torch's."""
    for found in _outward(frame):
        file = Path(found.f_code.co_filename).as_posix()
        if not file.startswith(_TORCH) and file != Path(__file__).as_posix():
            return file, found.f_lineno
    raise AssertionError("no line of a model")


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
