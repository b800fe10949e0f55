"""Writes the calls of one module to a directory, each complete before the next begins."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from io import BufferedWriter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ampaudit.checkpoint.header import laid_out
from ampaudit.checkpoint.layout import CALL_FILES, RECORDING, call_file
from ampaudit.core.errors import OutputError, first_line
from ampaudit.core.files import check_directory, write_text
from ampaudit.core.text import escape_control, format_bytes, plural
from ampaudit.core.untrusted import describe
from ampaudit.core.version import __version__
from ampaudit.recording.config import RecordConfig
from ampaudit.recording.encode import Unstorable, class_name, encode_call
from ampaudit.recording.pack import pack_tensors
from ampaudit.source.calls import structure_of
from ampaudit.source.unwrapping import unwrapped

__all__ = ["Recording"]

_MIN_FREE = 200_000_000  # bytes of the disk that are left to others
_MAX_JSON = 5_000_000  # bytes: more values than that may hold, no reader accepts
_LIBRARIES = ("torch", "transformers", "diffusers")


@dataclass(slots=True)
class Recording:
    """The recording of one module.

    Attributes:
        directory: where it is written.
        config: its limits.
        module: the module, once it is known.
        calls: calls of the module so far.
        recorded: those that were written.
        skipped: reasons why others could not be written, with their numbers.
        bytes: what the files need.
        stopped: why no further call is written; empty while calls are.
    """

    directory: Path
    config: RecordConfig
    module: nn.Module | None = None
    name: str = ""
    calls: int = 0
    recorded: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    stopped: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _header: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Reject a directory that cannot or should not be written to.

        Raises:
            OutputError: see ``check_directory``.
        """
        check_directory(self.directory, force=self.config.force, ours=RECORDING)

    def take(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record a call that is about to be made; whatever fails, the program goes on."""
        with self._lock:
            self.calls += 1
            if self.stopped or (self.calls - 1) % self.config.every:
                return
            try:
                mode = _mode()
                with torch.no_grad():
                    self._write(args, kwargs, mode)
            except Unstorable as error:
                self._skip(str(error))
            except OutputError as error:
                self._stop(str(error.args[0]))
            except OSError as error:
                self._stop(f"cannot write {describe(self.directory)}: {error.strerror or error}")
            except Exception as error:  # of the program's own classes, say; a program must not notice
                self._skip(f"{type(error).__name__}: {describe(first_line(error), 150)}")

    def close(self) -> None:
        """Write how many calls there were, after which none may be missing."""
        if self._header:
            found = {"made": self.calls, "recorded": self.recorded, "skipped": dict(self.skipped)}
            with suppress(OutputError):  # the calls can be read without it
                self._describe(calls=found, stopped=self.stopped)

    @property
    def summary(self) -> str:
        """What was recorded, in a line."""
        missed = self.skipped.total()
        words = f"{self.recorded} of {plural(self.calls, 'call')} of {self.name or 'the module'} recorded"
        words += f", {missed} skipped" if missed else ""
        return f"{words} in {describe(self.directory)} ({format_bytes(self.bytes)})"

    def _write(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: dict[str, Any]) -> None:
        encoded = encode_call(args, kwargs)
        tensors = pack_tensors(encoded.tensors)
        head, _ = laid_out([item.entry for item in tensors], {})
        assert self.module is not None
        call = {"call": self.calls, "args": encoded.args, "kwargs": encoded.kwargs}
        text = json.dumps({**call, "training": self.module.training, **mode}, allow_nan=False).encode()
        if len(text) > _MAX_JSON:
            raise Unstorable(f"its texts and numbers need {format_bytes(len(text))}")
        size = len(head) + len(text) + sum(item.data.numel() for item in tensors)
        if self._is_full(size):
            return
        if not self._header:
            self._begin()
        place = self.directory / call_file(self.calls)
        if tensors:
            with _placed(place.with_suffix(".safetensors")) as stream:
                stream.write(head)
                for item in tensors:
                    stream.write(item.data.numpy().data)
        with _placed(place) as stream:  # last: the call is there once this is
            stream.write(text)
        self.recorded += 1
        self.bytes += size
        if self.recorded == self.config.first:
            self._stop(f"the first {plural(self.recorded, 'call')} are recorded", quiet=True)

    def _is_full(self, size: int) -> bool:
        if self.bytes + size > self.config.limit:
            needs = f"call {self.calls} needs {format_bytes(size)} more"
            self._stop(f"{format_bytes(self.bytes)} are written, and {needs}; --max-bytes allows more")
        elif shutil.disk_usage(self.directory.resolve().parent).free - size < _MIN_FREE:
            self._stop(f"the disk of {describe(self.directory)} is almost full")
        return bool(self.stopped)

    def _begin(self) -> None:
        """Make the directory, or empty that of an earlier recording."""
        self.check()
        if self.directory.is_dir():
            for pattern in (CALL_FILES, CALL_FILES.replace("json", "safetensors"), ".call-*.part"):
                for old in self.directory.glob(pattern):
                    old.unlink()
        self.directory.mkdir(exist_ok=True)
        assert self.module is not None
        versions: dict[str, str] = {"ampaudit": __version__}
        for library in _LIBRARIES:
            with suppress(metadata.PackageNotFoundError):
                versions[library] = metadata.version(library)
        self._header = {
            "schema": 1,
            "kind": "recording",
            "versions": versions,
            "module": self.name,
            "class": class_name(type(unwrapped(self.module))),
            "parameters": structure_of(self.module),
            "every": self.config.every,
        }
        self._describe(calls=None, stopped="")

    def _describe(self, **more: Any) -> None:
        text = json.dumps(self._header | more, indent=1, ensure_ascii=False)
        write_text(self.directory / RECORDING, f"{text}\n", force=True)

    def _skip(self, reason: str) -> None:
        self.skipped[reason] += 1
        if self.skipped[reason] == 1:
            _say(f"call {self.calls} of {self.name} is not recorded: {reason}")

    def _stop(self, reason: str, *, quiet: bool = False) -> None:
        self.stopped = reason
        if not quiet:
            _say(f"recording of {self.name} stops at call {self.calls}: {reason}")


def _mode() -> dict[str, Any]:
    """Return the modes that a call is made in.

    Raises:
        Unstorable: its tensors have no values.
    """
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if captured or torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise Unstorable("it is being traced or captured")
    devices = [name for name in ("cpu", "cuda", "mps", "xpu") if torch.is_autocast_enabled(name)]
    autocast = {name: str(torch.get_autocast_dtype(name)).removeprefix("torch.") for name in devices}
    return {"grad": torch.is_grad_enabled(), "autocast": autocast}


def _say(text: str) -> None:
    print(escape_control(f"ampaudit: {text}"), file=sys.stderr)


@contextmanager
def _placed(path: Path) -> Iterator[BufferedWriter]:
    """Fill a file beside its place, and rename it: what is in place is whole, also after a crash."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as stream:
            yield stream
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
