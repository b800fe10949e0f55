"""Reads the recorded calls of a module as batches, mapping their tensors without reading them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from torch import nn

from ampaudit.checkpoint.layout import CALL_FILES, RECORDING, call_file
from ampaudit.checkpoint.mapped import map_checkpoint
from ampaudit.core.errors import InputError, WeightsError
from ampaudit.core.text import format_bytes, plural
from ampaudit.core.untrusted import MAX_TABLE, describe, describe_path, read_json, validate
from ampaudit.report.inputs import InputsInfo
from ampaudit.source.interface import Batch
from ampaudit.source.rebuild import KnownClasses, Rebuilder
from ampaudit.source.unwrapping import unwrapped
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["recorded_calls", "structure_of"]

_HINT = "record the calls again"
_Number = Annotated[int, Field(ge=0, le=10**12)]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")  # later versions may say more


class _Parameters(_Record):
    sha256: str
    count: int
    dtypes: list[str]


class _Totals(_Record):
    made: int
    recorded: int


class _Recording(_Record):
    schema_: Annotated[Literal[1], Field(alias="schema")]
    kind: Literal["recording"]
    module: str
    parameters: _Parameters
    calls: _Totals | None
    class_: Annotated[str, Field(alias="class")]


class _Call(_Record):
    call: _Number
    positional: Annotated[list[Any], Field(alias="args")]
    named: Annotated[dict[str, Any], Field(alias="kwargs")]
    training: bool
    autocast: dict[str, str]


_RECORDING, _CALL = TypeAdapter(_Recording), TypeAdapter(_Call)


def structure_of(module: nn.Module) -> dict[str, Any]:
    """Return a digest of the names and shapes of a module's parameters, their number, and their dtypes."""
    found = [
        (name.replace("_orig_mod.", ""), parameter)
        for name, parameter in unwrapped(module).named_parameters(remove_duplicate=False)
    ]
    lines = "".join(sorted(f"{name} {tuple(parameter.shape)}\n" for name, parameter in found))
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for _, parameter in found})
    return {"sha256": hashlib.sha256(lines.encode()).hexdigest(), "count": len(found), "dtypes": dtypes}


def recorded_calls(
    directory: Path, count: int | None, model: nn.Module, *, same_model: bool = True
) -> tuple[tuple[Batch, ...], InputsInfo]:
    """Read up to ``count`` calls of a recording, or all, as batches with names.

    Args:
        directory: of the recording.
        count: the number of calls.
        model: will be called with them.
        same_model: whether it has the parameter names of the module that was recorded.

    Raises:
        InputError: there is no recording, it is of another model, or it does not describe itself correctly.
    """
    found = _opened(directory)
    if same_model:
        _check_model(directory, found, model)
    files = _files(directory, found)
    chosen = files[:count]
    widen = _widens(found, model)
    classes = KnownClasses(model)
    calls = [_read(file, classes, widen=widen) for file in chosen]
    _check_memory(directory, calls, widen=widen)
    batches = tuple(call.batch(widen=widen) for call in calls)
    return batches, InputsInfo("given", _described(directory, found, calls, len(files)))


@dataclass(frozen=True, slots=True)
class _StoredCall:
    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: bool
    autocast: bool
    needs: int

    def batch(self, *, widen: bool) -> Batch:
        made = Batch(self.args, self.kwargs, name=f"call {self.number}")
        return made.mapped(_widened) if widen and not self.autocast else made


def _opened(directory: Path) -> _Recording:
    path = directory / RECORDING
    if not path.is_file():
        inner = sorted(file.parent.name for file in directory.glob(f"*/{RECORDING}"))
        hint = "give a directory that 'ampaudit record' wrote"
        if inner:
            hint = f"it holds recordings of {describe(', '.join(inner))}: give one of these directories"
        raise InputError(f"{describe_path(directory)}: no {RECORDING}", hint=hint)
    table = read_json(path, MAX_TABLE, InputError, _HINT)
    return validate(_RECORDING, table, path, InputError, _HINT)


def _check_model(directory: Path, found: _Recording, model: nn.Module) -> None:
    own, theirs = structure_of(model), found.parameters
    if own["sha256"] != theirs.sha256:
        recorded = f"{_short(found.class_)} with {plural(theirs.count, 'parameter')}"
        raise InputError(
            f"{describe_path(directory)}: the calls of another model: {recorded}, recorded as "
            f"{describe(found.module)}; this is {type(unwrapped(model)).__name__} with {own['count']:,}",
            hint="names and shapes of the parameters must be the same; record this model",
        )


def _files(directory: Path, found: _Recording) -> list[Path]:
    """Return the files of the calls in order."""
    files = sorted(directory.glob(CALL_FILES), key=lambda file: (len(file.name), file.name))
    if not files:
        raise InputError(f"{describe_path(directory)}: holds no call", hint=_HINT)
    if found.calls is not None and len(files) != found.calls.recorded:
        what = f"{plural(len(files), 'call')} of {found.calls.recorded:,} that were recorded"
        raise InputError(f"{describe_path(directory)}: holds {what}", hint=_HINT)
    return files


def _read(path: Path, classes: KnownClasses, *, widen: bool) -> _StoredCall:
    call = validate(_CALL, read_json(path, MAX_TABLE, InputError, _HINT), path, InputError, _HINT)
    if path.name != call_file(call.call):
        raise InputError(f"{describe_path(path)}: describes call {call.call}", hint=_HINT)
    values = path.with_suffix(".safetensors")
    try:
        tensors = map_checkpoint(values).tensors if values.exists() else {}
    except WeightsError as error:
        raise InputError(str(error.args[0]), hint=_HINT) from error
    rebuilder = Rebuilder(path, tensors, classes, widened=widen and not call.autocast)
    args = tuple(rebuilder.rebuild(value, f"input[{index}]") for index, value in enumerate(call.positional))
    kwargs = {name: rebuilder.rebuild(value, name) for name, value in call.named.items()}
    return _StoredCall(call.call, args, kwargs, call.training, bool(call.autocast), rebuilder.needs)


def _widens(found: _Recording, model: nn.Module) -> bool:
    """Return whether the recorded module had 16-bit parameters and the model has none.

    Such a program gives its module 16-bit inputs, which the same numbers in float32 stand for.
    """
    low = {str(dtype).removeprefix("torch.") for dtype in LOW_PRECISION_DTYPES}
    own = structure_of(model)["dtypes"]
    return bool(low & set(found.parameters.dtypes)) and bool(own) and not low & set(own)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in LOW_PRECISION_DTYPES else tensor


def _check_memory(directory: Path, calls: Iterable[_StoredCall], *, widen: bool) -> None:
    """Reject a call that cannot be in memory; only widened calls are all there at once."""
    available = psutil.virtual_memory().available
    largest = max(calls, key=lambda call: call.needs)
    needed = 2 * sum(call.needs for call in calls) if widen else largest.needs
    if needed > available:
        what = "the calls need" if widen else f"call {largest.number} needs"
        raise InputError(
            f"{describe_path(directory)}: {what} {format_bytes(needed)} of memory; "
            f"{format_bytes(available)} are free",
            hint="replay fewer calls with --batches, or record smaller ones",
        )


def _described(directory: Path, found: _Recording, calls: list[_StoredCall], total: int) -> str:
    numbers = f"call {calls[0].number}"
    if len(calls) > 1:
        numbers = f"calls {calls[0].number} to {calls[-1].number}"
    words = f"{len(calls)} of {plural(total, 'recorded call')} of {_short(found.class_)} ({numbers})"
    words += f" in {describe(directory)}"
    modes = {call.training for call in calls}
    return f"{words}, made in {'train' if True in modes else 'eval'} mode" if len(modes) == 1 else words


def _short(name: str) -> str:
    return describe(name.rpartition(":")[2], 40)
