"""Notes where the model's code reads a precision: from there on it may do something else than in FP32.

Code that never asks for a dtype computes the same ops in every precision. Function modes see who asks a
tensor; torch's functions about autocast are replaced for the time of a trace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ampaudit.core.sites import SourceLine
from ampaudit.trace.dtype_uses import only_makes_tensors
from ampaudit.trace.stack import code_line, is_library, is_tool_file

__all__ = ["PrecisionReads", "conversions_of"]

_LOWER = (torch.float16, torch.bfloat16)
_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
# what tells the dtype of a tensor among its arguments to Python code
_TELLING: frozenset[Any] = frozenset(
    {
        _DTYPE,
        torch.Tensor.itemsize.__get__,  # type: ignore[attr-defined]
        torch.Tensor.nbytes.__get__,  # type: ignore[attr-defined]
        torch.Tensor.element_size,
        torch.Tensor.type,
        torch.Tensor.__repr__,
        torch.Tensor.__format__,
        torch.Tensor.storage,
        torch.Tensor.storage_type,
        torch.Tensor.untyped_storage,
        torch.Tensor.new_tensor,  # a constant that is rounded while the model is traced
        torch.result_type,
    }
)
_AUTOCAST = (
    "is_autocast_enabled",
    "is_autocast_cpu_enabled",
    "get_autocast_dtype",
    "get_autocast_gpu_dtype",
    "get_autocast_cpu_dtype",
)
# of torch, these read dtypes on behalf of the model: clamp_probs takes finfo(dtype).eps
_ASKING = "/torch/distributions/"


class PrecisionReads(TorchFunctionMode):
    """While active, collects the lines of the model's code that read the precision of something in 16 bits.

    A dtype that only says in which dtype another tensor is made is no such thing. Attributes:
        lines: in order, each once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[SourceLine] = []
        self._known: set[tuple[Any, int]] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and look whether it tells a 16-bit dtype."""
        del types
        # x.type(dtype) is a cast
        tells = func in _TELLING and not (func is torch.Tensor.type and len(args) > 1)
        if tells and any(isinstance(arg, torch.Tensor) and _lower(arg) for arg in args):
            self._note(sys._getframe(1), dtype=func == _DTYPE)
        return func(*args) if kwargs is None else func(*args, **kwargs)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch tensors and torch's functions about autocast."""
        with ExitStack() as stack:
            for name in _AUTOCAST:
                stack.enter_context(mock.patch.object(torch, name, self._asked(getattr(torch, name))))
            stack.enter_context(self)
            yield

    def _asked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        enabled = torch.is_autocast_enabled

        def ask(*args: Any) -> Any:
            answer = function(*args)
            if answer is True or (isinstance(answer, torch.dtype) and (enabled("cpu") or enabled("cuda"))):
                self._note(sys._getframe(1), dtype=False)
            return answer

        return ask

    def _note(self, frame: FrameType | None, *, dtype: bool) -> None:
        while frame is not None and _hands_on(frame):
            frame = frame.f_back
        if frame is not None and _ASKING in frame.f_code.co_filename:
            while frame is not None and is_tool_file(frame.f_code.co_filename):
                frame = frame.f_back
        if frame is None or is_tool_file(frame.f_code.co_filename):
            return
        key = (frame.f_code, frame.f_lasti)
        if key in self._known:
            return
        self._known.add(key)
        if not (dtype and only_makes_tensors(*key)):
            line = code_line(frame.f_code.co_filename, frame.f_lineno)
            if line not in self.lines:
                self.lines.append(line)


def conversions_of(model: nn.Module) -> list[SourceLine]:
    """Methods of the user's own that run when the model is converted, and may leave it other than FP32's."""
    found = (getattr(type(m), name) for m in model.modules() for name in ("half", "bfloat16", "to", "_apply"))
    codes = dict.fromkeys(method.__code__ for method in found if hasattr(method, "__code__"))
    files = ((code.co_filename, code.co_firstlineno) for code in codes)
    return [code_line(file, line) for file, line in files if not is_library(file) and not is_tool_file(file)]


def _lower(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return tensor.dtype in _LOWER


def _hands_on(frame: FrameType) -> bool:
    """Whether a frame is torch's way from a tensor to the modes that watch it."""
    file = frame.f_code.co_filename
    return frame.f_code.co_name == "__torch_function__" or file.endswith(
        ("/torch/overrides.py", "/torch/_tensor.py")
    )
