"""Watches the calls of modules while a program runs: of given ones, or of those that it names."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, overload

import torch
from torch import nn

from ampaudit.core.config import with_options
from ampaudit.core.errors import OutputError, UsageError
from ampaudit.core.untrusted import describe_path
from ampaudit.recording.config import RecordConfig
from ampaudit.recording.recorder import Recording
from ampaudit.trace.internals import Replacement, patched

__all__ = ["Watcher", "record", "record_named"]

Result = TypeVar("Result")
_LOCK = threading.Lock()
_WATCHERS: list[Watcher] = []
_PATCH = ExitStack()
_NESTED = threading.local()  # depth of the calls in a thread


class Watcher:
    """Hands the calls of modules to their recordings.

    A module is given, or named as the program names it: ``pipe.unet`` for an attribute of a variable,
    ``encoder.layer.0`` for a submodule of a module that the program calls, or the name of a class.

    Args:
        recordings: by the names of their modules.

    Attributes:
        called: classes of modules that the program calls itself, with the numbers of their calls.
    """

    def __init__(self, recordings: Mapping[str, Recording]) -> None:
        self.recordings = recordings
        self.called: Counter[str] = Counter()
        self.unknown = {name: recording for name, recording in recordings.items() if recording.module is None}

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], depth: int) -> None:
        """Record a call that is about to be made, if it is one of a watched module."""
        if depth == 0:
            self.called[type(module).__name__] += 1
        if self.unknown:
            self._look_for(module, depth)
        for recording in self.recordings.values():
            if recording.module is module:
                recording.take(args, kwargs)

    def _look_for(self, module: nn.Module, depth: int) -> None:
        for name, recording in list(self.unknown.items()):
            candidate: Any = module if name == type(module).__name__ else None
            if candidate is None and depth == 0:
                candidate = _attribute(module, name.split(".")) or _variable(name)
            if isinstance(candidate, nn.Module):
                recording.module = candidate
                del self.unknown[name]


def _watched(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call of all modules with the watchers before it."""
    process = os.getpid()

    @wraps(call)
    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or os.getpid() != process:  # a child writes no calls
            return call(self, *args, **kwargs)
        depth = getattr(_NESTED, "depth", 0)
        for watcher in tuple(_WATCHERS):
            watcher.take(self, args, kwargs, depth)
        _NESTED.depth = depth + 1
        try:
            return call(self, *args, **kwargs)
        finally:
            _NESTED.depth = depth

    return watched


def _variable(name: str) -> nn.Module | None:
    """Return the module that a variable of the program leads to: of the script first, then of functions."""
    first, *rest = name.split(".")
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            frames.append(frame)
        frame = frame.f_back
    scopes = (scope for frame in reversed(frames) for scope in (frame.f_locals, frame.f_globals))
    for scope in (vars(sys.modules["__main__"]), *scopes):
        module = _attribute(scope[first], rest) if first in scope else None
        if isinstance(module, nn.Module):
            return module
    return None


def _attribute(owner: Any, path: Sequence[str]) -> Any:
    for name in path:
        value = None
        with suppress(Exception):  # of a property of the program's
            value = getattr(owner, name, None)
        if value is None and name.isdecimal() and isinstance(owner, list | tuple):
            value = owner[int(name)] if int(name) < len(owner) else None
        owner = value
    return owner


@overload
def record(
    module: nn.Module,
    directory: str | Path,
    *,
    config: RecordConfig | None = None,
    **options: Any,
) -> AbstractContextManager[Recording]: ...


@overload
def record(
    module: Mapping[str, nn.Module],
    directory: str | Path,
    *,
    config: RecordConfig | None = None,
    **options: Any,
) -> AbstractContextManager[dict[str, Recording]]: ...


@with_options(RecordConfig)
def record(
    module: nn.Module | Mapping[str, nn.Module],
    directory: str | Path,
    *,
    config: RecordConfig | None = None,
    **options: Any,
) -> Any:
    """Record the calls of a module while active, for ``--inputs`` and ``SourceConfig(inputs=...)``.

    The arguments of each call are written before the call is made, as safetensors and JSON. Nothing in the
    program changes: not its results, not its random numbers, and not the module, which gets no hooks.

    Args:
        module: the module, or several by name; each of these gets a directory in ``directory``.
        directory: where to write.
        config: the options as one record.
        **options: fields of ``RecordConfig``, which override those of ``config``: ``every=10``, ``first=50``,
            ``max_bytes="1GB"``, ``force=True``.

    Returns:
        A context manager that gives the recording, or the recordings by name.

    Raises:
        UsageError: there is no module.
        OutputError: the directory exists, or cannot be written.
    """
    chosen = RecordConfig.given(config, options)
    modules = module if isinstance(module, Mapping) else {"": module}
    for name, one in modules.items():
        if not isinstance(one, nn.Module):
            raise UsageError(
                f"record: {name or 'the module'} is of type {type(one).__name__}",
                hint="pass the module whose calls are to be recorded, or a dict of modules",
            )
    recordings = _recordings(tuple(modules), Path(directory), chosen)
    for name, one in modules.items():
        recordings[name].module = one
        recordings[name].name = name or type(one).__name__
    return _watching(Watcher(recordings), recordings if isinstance(module, Mapping) else recordings[""])


def record_named(
    names: Sequence[str], directory: Path, config: RecordConfig
) -> AbstractContextManager[Watcher]:
    """Record the calls of modules while active, by the names that a program gives them.

    Raises:
        OutputError: see ``record``.
    """
    folders = names if len(names) > 1 else ("",)
    recordings = dict(zip(names, _recordings(folders, directory, config).values(), strict=True))
    for name, recording in recordings.items():
        recording.name = name
    watcher = Watcher(recordings)
    return _watching(watcher, watcher)


def _recordings(names: Sequence[str], directory: Path, config: RecordConfig) -> dict[str, Recording]:
    """Return recordings in a directory, or of several modules in directories inside it."""
    if not names:
        raise UsageError("record: there is no module", hint="name the modules whose calls to record")
    recordings = {}
    for name in names:
        folder = re.sub(r"[^\w.-]", "_", name).strip(".")
        recordings[name] = Recording(directory / folder if folder else directory, config)
    if len({recording.directory for recording in recordings.values()}) < len(recordings):
        raise UsageError("record: two modules have the same name", hint="give each a name of its own")
    if len(names) > 1 or names[0]:
        try:
            directory.mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot make {describe_path(directory)}: {error.strerror}") from error
    for recording in recordings.values():
        recording.check()
    return recordings


@contextmanager
def _watching(watcher: Watcher, result: Result) -> Iterator[Result]:
    """Let a watcher see the calls of all modules; the first of several replaces what torch calls."""
    with _LOCK:
        if not _WATCHERS:
            _PATCH.enter_context(patched([Replacement(nn.Module, "__call__", _watched(nn.Module.__call__))]))
        _WATCHERS.append(watcher)
    try:
        yield result
    finally:
        with _LOCK:
            _WATCHERS.remove(watcher)
            if not _WATCHERS:
                _PATCH.close()
        for recording in watcher.recordings.values():
            recording.close()
