"""Records the calls of modules while a program runs: of given modules, or of modules found by name."""

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
    """Passes the calls of modules to their recordings.

    A recording without a module finds it by name: ``pipe.unet`` for an attribute of a variable,
    ``encoder.layer.0`` for a submodule of a module that the program calls, or the name of a class.

    Args:
        recordings: Recordings by the name of their module.

    Attributes:
        called: Number of calls that the program itself makes, by class of module.
        unknown: Recordings whose module has not been found yet.
    """

    def __init__(self, recordings: Mapping[str, Recording]) -> None:
        self.recordings = recordings
        self.called: Counter[str] = Counter()
        self.unknown = {name: recording for name, recording in recordings.items() if recording.module is None}

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], depth: int) -> None:
        """Record a call before it is made, if its module is watched."""
        if depth == 0:
            self.called[type(module).__name__] += 1
        if self.unknown:
            self._find_modules(module, depth)
        for recording in self.recordings.values():
            if recording.module is module:
                recording.take(args, kwargs)

    def _find_modules(self, module: nn.Module, depth: int) -> None:
        for name, recording in list(self.unknown.items()):
            candidate: Any = module if name == type(module).__name__ else None
            if candidate is None and depth == 0:
                candidate = _resolve(module, name.split(".")) or _from_variables(name)
            if isinstance(candidate, nn.Module):
                recording.module = candidate
                del self.unknown[name]


def _watched(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``nn.Module.__call__`` so that watchers see each call first."""
    process = os.getpid()

    @wraps(call)
    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or os.getpid() != process:  # child processes do not record
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


def _from_variables(name: str) -> nn.Module | None:
    """Resolve a dotted name from the variables of the script, and then of its functions, to a module."""
    first, *rest = name.split(".")
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            frames.append(frame)
        frame = frame.f_back
    scopes = (scope for frame in reversed(frames) for scope in (frame.f_locals, frame.f_globals))
    for scope in (vars(sys.modules["__main__"]), *scopes):
        module = _resolve(scope[first], rest) if first in scope else None
        if isinstance(module, nn.Module):
            return module
    return None


def _resolve(owner: Any, path: Sequence[str]) -> Any:
    for name in path:
        value = None
        with suppress(Exception):  # a property may raise anything
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

    The arguments of each call are written as safetensors and JSON before the call is made. The program is
    not affected: results and random numbers stay the same, and the module gets no hooks.

    Args:
        module: Module, or several by name, each with a subdirectory of ``directory``.
        directory: Directory to write to.
        config: Options as one record.
        **options: Fields of ``RecordConfig``, which override those of ``config``: ``every=10``, ``first=50``,
            ``max_bytes="1GB"``, ``force=True``.

    Returns:
        A context manager that yields the recording, or the recordings by name.

    Raises:
        UsageError: There is no module.
        OutputError: The directory exists or cannot be written.
    """
    chosen = RecordConfig.given(config, options)
    modules = module if isinstance(module, Mapping) else {"": module}
    for name, one in modules.items():
        if not isinstance(one, nn.Module):
            raise UsageError(
                f"record: {name or 'the module'} is of type {type(one).__name__}",
                hint="pass the module whose calls are to be recorded, or a dict of modules",
            )
    recordings = _create_recordings(tuple(modules), Path(directory), chosen)
    for name, one in modules.items():
        recordings[name].module = one
        recordings[name].name = name or type(one).__name__
    return _watching(Watcher(recordings), recordings if isinstance(module, Mapping) else recordings[""])


def record_named(
    names: Sequence[str], directory: Path, config: RecordConfig
) -> AbstractContextManager[Watcher]:
    """Record the calls of modules while active, found by their names in the program.

    Raises:
        OutputError: The directory exists or cannot be written.
    """
    folders = names if len(names) > 1 else ("",)
    recordings = dict(zip(names, _create_recordings(folders, directory, config).values(), strict=True))
    for name, recording in recordings.items():
        recording.name = name
    watcher = Watcher(recordings)
    return _watching(watcher, watcher)


def _create_recordings(names: Sequence[str], directory: Path, config: RecordConfig) -> dict[str, Recording]:
    """Create a recording in a directory, or several in its subdirectories."""
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
    """Activate a watcher; the first one patches ``nn.Module.__call__``."""
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
