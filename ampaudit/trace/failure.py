"""Turns errors of torch.export into one line with the cause, the source line and a remedy."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from types import TracebackType
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from ampaudit.core.errors import AuditError, SourceError, TraceFailed, did_you_mean, first_line, text_of
from ampaudit.core.sites import SourceLine
from ampaudit.core.text import forward_slashes
from ampaudit.core.untrusted import describe
from ampaudit.policy.load import PLAIN_FP32
from ampaudit.trace.entry import named_inputs, restored, tensor_leaves
from ampaudit.trace.fake_model import named_tensors, without_cache
from ampaudit.trace.internals import FakeTensor
from ampaudit.trace.isolation import seeded, structural_copy
from ampaudit.trace.loss import LOSS_BATCH, WithLoss
from ampaudit.trace.stack import is_library, is_tool_file, library_path
from ampaudit.trace.twins import twins_checked
from ampaudit.trace.values import LOW_PRECISION_DTYPES, dtype_name, widened_tensor

_ONE_DEVICE = "keep every tensor on the input's device: pass device=x.device where tensors are made"
_MAX_LISTED = 6  # inputs or parameters
_MAX_REASON, _MAX_CODE = 300, 120  # characters
# (words in the error's type or text, our message, the remedy); the first match decides
_REMEDIES: tuple[tuple[tuple[str, ...], str | None, str], ...] = (
    (
        ("data-dependent", "datadependent", "guardondatadependent", "boolean value of tensor"),
        "Python control flow depends on the values of a tensor",
        "use torch.where or torch.cond there; a plain ampaudit scan audits the path that given inputs take",
    ),
    (
        ("sparsetensor", "sparse tensor", "sparsecpu", "sparse_"),
        "torch.export does not trace sparse tensors",
        "compute with dense tensors or with index_add and scatter_reduce, or audit the part without them",
    ),
    (
        ("nestedtensor", "nested tensor", "nestedint"),
        "torch.export does not trace nested tensors here",
        "pad the sequences to one length and pass a mask",
    ),
    (
        ("no fake impl", "register_fake", "unsupported operator"),
        None,
        "tell torch the shape of that operator's result with @torch.library.register_fake",
    ),
    (("unsupported scalartype bfloat16",), "NumPy has no bfloat16", "convert first: t.float().numpy()"),
    (
        (".numpy()", "numpy", "can't convert"),
        None,
        "values leave torch here (numpy, .tolist()); compute with tensors, or precompute it in __init__",
    ),
    (
        ("two different devices", "fake device", "same device", "cuda devices", "not compiled with cuda"),
        None,
        _ONE_DEVICE,
    ),
)
_PACKED = (
    "torch.export does not trace packed sequences",
    "pass the padded batch to the recurrent layer, without pack_padded_sequence, while you audit it",
)
_GENERATE = "generate() runs the model in a loop: return the output of one forward, model(input_ids), instead"
# what torch says of an op that is for another device
_KERNEL = re.compile(r"Could not run '(?P<op>[\w:.]+)' with arguments from the '(?P<device>\w+)' backend")
# errors of kernels whose inputs a policy cast only in part
_MIXED = ("same dtype", "expected scalar type", "have the same type", "same data type", "match weight dtype")
_FALLBACK = (
    "rewrite that line so that torch.export(strict=False) accepts it; --debug shows torch's own report"
)


def trace_failure(
    error: BaseException, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], policy: str
) -> AuditError:
    """Describe an error of torch.export, with the user's line at which tracing stopped.

    Returns:
        ``SourceError`` if the model fails without torch.export as well; otherwise ``TraceFailed``.
    """
    attempt = attempt_in_fp32(model, args, kwargs)
    if attempt.error is not None:
        return model_failure(attempt.error, model, args, kwargs)
    plainer, hint = _known(error)
    text = text_of(error).lower()
    mixed = policy != PLAIN_FP32 and any(words in text for words in _MIXED)
    if mixed:
        hint = (
            f"policy {policy} leaves this op's inputs in different dtypes; extend the policy with a rule "
            "for the op that says 'cast: widest' or 'cast: lower'"
        )
    user_line, library = failing_lines(error.__traceback__)
    reason = plainer or _summary(error)
    if library is not None:
        reason += f", in {library_path(library.file)}:{library.line}"
        hint = hint if mixed else _hint_for_library(library, user_line)
    elif attempt.ran and hint is _FALLBACK:
        hint = f"the model runs without torch.export; {hint}"
    where, code = _located(user_line, _named(error, model))
    return TraceFailed(f"{where}cannot be exported{code}: {reason}", hint=hint)


def model_failure(
    error: BaseException, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> SourceError:
    """Describe an error that the model raises by itself, in FP32."""
    if isinstance(error, SourceError):
        return error
    if isinstance(model, WithLoss):
        model, kwargs = model.inner, {name: value for name, value in kwargs.items() if name != LOSS_BATCH}
    user_line, library = failing_lines(error.__traceback__)
    where, code = _located(user_line, _named(error, model))
    if (lacks := _KERNEL.match(text_of(error))) and not lacks["op"].startswith("aten::"):
        hint = f"scan on its device, or say what it computes with ampaudit.twin({lacks['op']!r}, function)"
        return SourceError(f"{where}{lacks['op']} has no kernel for {lacks['device']}{code}", hint=hint)
    inside = f", in {library_path(library.file)}:{library.line}" if library else ""
    return SourceError(
        f"{where}the model itself fails in FP32{code}: {_summary(error)}{inside}",
        hint=_misfit(model, args, kwargs) or _hint_for_model(error, args, kwargs),
    )


def _named(error: BaseException, model: nn.Module) -> str:
    """Return what the error's notes say of its place, or else the model's type."""
    return ": ".join(getattr(error, "__notes__", ())) or type(model).__name__


def _hint_for_model(error: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if isinstance(error, NotImplementedError) and 'required "forward"' in text_of(error):
        return "give the module a forward(), or return the module that calls it"
    if isinstance(error, ModuleNotFoundError):
        return f"install {error.name!r} in the environment that runs ampaudit"
    if _known(error)[1] is _ONE_DEVICE:
        return _ONE_DEVICE
    inputs = _listed([_in_words(*item) for item in named_inputs(args, kwargs)]) or "none"
    return f"correct the model or its inputs; it was given {inputs}"


def _misfit(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Say how a call differs from the signature of the model's forward; ``None`` if it does not."""
    problem = None
    try:
        signature = inspect.signature(model.forward)
        signature.bind(*args, **kwargs)
    except ValueError:
        return None
    except TypeError as error:
        problem = str(error)
    parameters = list(signature.parameters)
    forward = f"forward({_listed(parameters)})"
    unknown = next((name for name in kwargs if name not in parameters), None)
    if unknown is None:
        return problem and f"the inputs do not fit {forward}: {problem}"
    if problem and len(parameters) == 1 and not args:
        return (
            f"a dict gives keyword arguments, and {forward} has no {describe(unknown)!r}: rename it, or "
            "return a tuple with the dict in it"
        )
    near = did_you_mean(unknown, parameters)  # **kwargs may have taken it
    return f"{near}{forward} has no {describe(unknown)!r}" if near or problem else None


def _in_words(name: str, value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{describe(name)}: {type(value).__name__}"
    return f"{describe(name)}: {dtype_name(value.dtype)}{list(value.shape)} on {value.device}"


def _listed(names: list[str]) -> str:
    more = ["..."] if len(names) > _MAX_LISTED else []
    return ", ".join(names[:_MAX_LISTED] + more)


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {describe(first_line(error), _MAX_REASON)}"


def _located(place: SourceLine | None, otherwise: str) -> tuple[str, str]:
    """Return how a message begins, and how it quotes the line."""
    if place is None:
        return f"{otherwise}: ", ""
    return f"{place.file}:{place.line}: ", f" at '{describe(place.code, _MAX_CODE)}'" if place.code else ""


def _hint_for_library(library: SourceLine, user_line: SourceLine | None) -> str:
    package = library_path(library.file).partition("/")[0]
    if "/generation/" in library.file:
        return _GENERATE
    does = f"the code of {package} does this, not yours"
    if user_line is None:
        return f"{does}: try another version or configuration of the model; --debug shows torch's own report"
    return f"{does}: call something else on your line, or audit a part of the model that does without it"


def plain_reason(error: BaseException) -> str:
    """Describe why code cannot be traced, in our words or torch's."""
    return _known(error)[0] or first_line(error)


def _known(error: BaseException) -> tuple[str | None, str]:
    """Return our message and remedy for a known error, if there is one."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    if any(isinstance(value, PackedSequence) for frame in frames for value in frame.f_locals.values()):
        return _PACKED
    text = f"{type(error).__name__} {text_of(error)}".lower()
    remedy = next((entry for entry in _REMEDIES if any(word in text for word in entry[0])), None)
    return (remedy[1], remedy[2]) if remedy is not None else (None, _FALLBACK)


def failing_lines(trace: TracebackType | None) -> tuple[SourceLine | None, SourceLine | None]:
    """Find the innermost line of the user's code in a traceback, and that of a library which it called.

    Python's own library counts for neither: its lines say nothing about the model.
    """
    return lines_of(traceback.extract_tb(trace))


def lines_of(stack: Sequence[traceback.FrameSummary]) -> tuple[SourceLine | None, SourceLine | None]:
    """Find the same two lines in a stack, below the first frame of ampaudit."""
    below_us = dropwhile(lambda f: "ampaudit" not in f.filename, stack)
    frames = [f for f in below_us if not is_tool_file(f.filename) and not f.filename.startswith("<")]
    user_frames = [index for index, f in enumerate(frames) if not is_library(f.filename)]
    last = user_frames[-1] if user_frames else -1
    called = [f for f in frames[last + 1 :] if "/site-packages/" in forward_slashes(f.filename)]

    def line(frame: traceback.FrameSummary) -> SourceLine:
        return SourceLine(forward_slashes(frame.filename), frame.lineno or 0, frame.line or "")

    return line(frames[last]) if user_frames else None, line(called[-1]) if called else None


@dataclass(frozen=True, slots=True)
class EagerCall:
    """The outcome of an eager call; ``error`` is ``None`` if the model ran or was not called."""

    ran: bool
    error: BaseException | None = None


def attempt_in_fp32(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> EagerCall:
    """Call a copy of the model, and report an error only if every kind of call fails.

    The calls are in FP32 without and with gradients, and in the stored dtypes if some weights have 16 bits. A
    model without values is not called, nor is one that may not fit into memory twice.
    """
    tensors = [*named_tensors(model).values(), *tensor_leaves(args, kwargs)]
    if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
        return EagerCall(ran=False)
    low_precision = [tensor for tensor in tensors if tensor.dtype in LOW_PRECISION_DTYPES]
    if sum(4 * tensor.numel() for tensor in low_precision) > psutil.virtual_memory().available // 2:
        return EagerCall(ran=False)
    first: BaseException | None = None
    for wide, grad in ((True, False), (True, True), *([(False, False)] if low_precision else [])):
        try:
            copied, new_args, new_kwargs = _copied(model, args, kwargs, wide=wide)
        except Exception:
            return EagerCall(ran=False)  # a failed copy says nothing about the model
        try:
            # the model's code has printed and warned while it was traced
            with seeded(0), torch.set_grad_enabled(grad), output_captured(), twins_checked():
                copied(*restored(new_args), **restored(new_kwargs))
        except (Exception, SystemExit) as error:
            first = first or error
        else:
            return EagerCall(ran=True)
    return EagerCall(ran=False, error=first)


@contextlib.contextmanager
def output_captured() -> Iterator[io.StringIO]:
    """Collect prints while active, and drop warnings."""
    printed = io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        warnings.simplefilter("ignore")
        yield printed


def _copied(model: nn.Module, args: Any, kwargs: Any, *, wide: bool) -> tuple[nn.Module, Any, Any]:
    """Copy a model and its inputs, in FP32 or as they are."""

    def clone(tensor: torch.Tensor) -> torch.Tensor:
        return writable(tensor, None) if wide else tensor.clone()

    new_args, new_kwargs = pytree.tree_map_only(torch.Tensor, clone, (args, kwargs))
    if wide:
        return fp32_copy(model, None), new_args, new_kwargs
    return structural_copy(model, {id(p): p for p in model.parameters()}), new_args, new_kwargs


def fp32_copy(model: nn.Module, device: torch.device | None) -> nn.Module:
    """Copy a model for one call in FP32 on a device, sharing the weights that are FP32 there already.

    ``None`` leaves each tensor where it is.
    """
    tensors: dict[int, torch.Tensor] = {}
    for tensor in named_tensors(model).values():
        if isinstance(tensor, nn.Parameter):
            wide = without_low_precision(tensor, device)
            tensors[id(tensor)] = nn.Parameter(wide, tensor.requires_grad and wide.is_floating_point())
        else:
            tensors[id(tensor)] = writable(tensor, device)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor):
                tensors.setdefault(id(value), writable(value, device))
    clone = structural_copy(model, tensors)
    without_cache(clone)
    return clone


def without_low_precision(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Return the tensor on the device, widened if it has 16 bits; without a copy if possible."""
    value = tensor.detach().to(device or tensor.device)
    return widened_tensor(value)


def writable(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Return ``without_low_precision`` of a tensor in memory that the model may write to."""
    wide = without_low_precision(tensor, device)
    return wide.clone() if wide.data_ptr() == tensor.data_ptr() else wide
