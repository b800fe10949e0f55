"""Records the calls of modules while a program runs; modules are passed in, or found by name."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import re
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from importlib import metadata
from io import BufferedWriter
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch import nn

from ampaudit.checkpoint import CALL_FILES, RECORDING, TORCH_NAMES, call_file
from ampaudit.checkpoint.safetensors import TensorEntry, header_bytes
from ampaudit.core import __version__
from ampaudit.core.config import with_options
from ampaudit.core.errors import OutputError, UsageError, first_line
from ampaudit.core.files import check_directory, write_text
from ampaudit.core.text import escape_control, format_bytes, plural
from ampaudit.core.untrusted import describe, describe_path
from ampaudit.recording.config import RecordConfig
from ampaudit.source.inputs import CACHES, is_cache, structure_of
from ampaudit.source.unwrapping import unwrapped
from ampaudit.trace.internals import Replacement, patched
from ampaudit.trace.values import dtype_name

_MAX_DEPTH = 24  # nested containers; each is up to four levels of JSON, and readers allow 100
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer, nn.UninitializedParameter)
_TORCH_VALUES = {torch.dtype: "dtype", torch.device: "device", torch.layout: "layout"}
_TORCH_VALUES |= {torch.memory_format: "memory_format"}
_FILE_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items() if name != "F4"}
_ALIGNMENT = 16  # bytes of the largest dtype
_Described = tuple[torch.Tensor, dict[str, Any]]
# an entry of the file, and its bytes on the CPU, which may share memory with the call's tensors
_Packed = tuple[TensorEntry, torch.Tensor]
_MIN_FREE = 200_000_000  # bytes to leave free on the disk
_MAX_JSON = 5_000_000  # bytes; readers reject JSON with more values than this may hold
_LIBRARIES = ("torch", "transformers", "diffusers")
Result = TypeVar("Result")
_LOCK = threading.Lock()
_WATCHERS: list[Watcher] = []
_PATCH = ExitStack()
_NESTED = threading.local()  # depth of the calls in a thread


class Watcher:
    """Passes the calls of modules to their recordings; these are stored by module name.

    The module of a recording may be given, or is looked up by name: ``pipe.unet`` for an attribute of a
    variable, ``encoder.layer.0`` for a submodule of a module that the program calls, or the name of a class.
    """

    def __init__(self, recordings: Mapping[str, Recording]) -> None:
        self.recordings = recordings
        # number of calls that the program itself makes, by class of module
        self.called: Counter[str] = Counter()
        # recordings whose module has not been found yet
        self.unresolved = {
            name: recording for name, recording in recordings.items() if recording.module is None
        }

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], depth: int) -> None:
        """Record a call before it is made, if its module is watched."""
        if depth == 0:
            self.called[type(module).__name__] += 1
        for name, recording in list(self.unresolved.items()):
            candidate: Any = module if name == type(module).__name__ else None
            if candidate is None and depth == 0:
                candidate = _resolve(module, name.split(".")) or _from_variables(name)
            if isinstance(candidate, nn.Module):
                recording.module = candidate
                del self.unresolved[name]
        for recording in self.recordings.values():
            if recording.module is module:
                recording.take(args, kwargs)


def _watched(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``nn.Module.__call__`` so that each call is first passed to the watchers."""
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
    """Resolve a dotted name to a module, from the variables of the script, then of its functions."""
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
    config = RecordConfig.merged(config, options)
    modules = module if isinstance(module, Mapping) else {"": module}
    for name, one in modules.items():
        if not isinstance(one, nn.Module):
            raise UsageError(
                f"record: {name or 'the module'} is of type {type(one).__name__}",
                hint="pass the module to record, or a dict of modules",
            )
    several = isinstance(module, Mapping)
    recordings = _create_recordings(modules, Path(directory), config, several=several)
    return _watching(Watcher(recordings), recordings if several else recordings[""])


def record_named(
    names: Sequence[str], directory: Path, config: RecordConfig
) -> AbstractContextManager[Watcher]:
    """Record the calls of modules while active, found by their names in the program.

    Raises:
        OutputError: The directory exists or cannot be written.
    """
    modules = dict.fromkeys(names)
    watcher = Watcher(_create_recordings(modules, directory, config, several=len(modules) > 1))
    return _watching(watcher, watcher)


def _create_recordings(
    modules: Mapping[str, nn.Module | None], directory: Path, config: RecordConfig, *, several: bool
) -> dict[str, Recording]:
    """Create a recording in a directory, or several in its subdirectories."""
    if not modules:
        raise UsageError("record: there is no module", hint="name the modules to record")
    recordings = {}
    for name, module in modules.items():
        folder = re.sub(r"[^\w.-]", "_", name).strip(".") if several else ""
        recordings[name] = Recording(directory / folder, config, module, name or type(module).__name__)
    if len({recording.directory for recording in recordings.values()}) < len(recordings):
        raise UsageError("record: two modules have the same name", hint="give each its own name")
    if several:
        try:
            directory.mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot create {describe_path(directory)}: {error.strerror}") from error
    for recording in recordings.values():
        check_directory(recording.directory, force=config.force, marker=RECORDING)
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


@dataclass(frozen=True, slots=True)
class _Span:
    """A tensor's byte range in its storage."""

    start: int
    stop: int
    tensor: torch.Tensor
    description: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for views of the same elements."""
        return self.start, self.tensor.dtype, self.tensor.shape, self.tensor.stride()


def pack_tensors(tensors: Iterable[_Described]) -> list[_Packed]:
    """Lay out tensors, and add their entry, dtype, shape, strides and offset to their descriptions.

    Overlapping tensors are stored as the memory range that they cover, so that they share memory again when
    they are read. If that range has large gaps, contiguous copies are stored instead.
    """
    storages: dict[tuple[str, int], list[_Span]] = {}
    for number, (tensor, description) in enumerate(tensors):
        # the address is 0 for a tensor without elements, which gets a group of its own
        address = tensor.untyped_storage().data_ptr() or -number - 1
        storages.setdefault((str(tensor.device), address), []).append(_span(tensor, description))
    packed: list[_Packed] = []
    for spans in storages.values():
        for cluster in _clusters(spans):
            _pack(cluster, packed)
    # entries have no gaps between them: if those of aligned sizes come first, all of these are aligned
    return sorted(packed, key=lambda item: -(item[0].size % _ALIGNMENT == 0))


def _span(tensor: torch.Tensor, description: dict[str, Any]) -> _Span:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    width = tensor.dtype.itemsize
    start = int(tensor.storage_offset()) * width
    return _Span(start, start + int(last + 1) * width if tensor.numel() else start, tensor, description)


def _clusters(spans: Sequence[_Span]) -> Iterator[list[_Span]]:
    """Yield groups of overlapping spans."""
    group: list[_Span] = []
    for span in sorted(spans, key=lambda span: (span.start, span.stop)):
        if group and span.start >= max(other.stop for other in group) and span.key != group[-1].key:
            yield group
            group = []
        group.append(span)
    yield group


def _pack(cluster: Sequence[_Span], packed: list[_Packed]) -> None:
    views = {span.key: span.tensor for span in cluster}
    start, stop = cluster[0].start, max(span.stop for span in cluster)
    if stop - start > 2 * sum(view.numel() * view.dtype.itemsize for view in views.values()):
        for key, view in views.items():
            copied = view.contiguous()
            alike = [_span(copied, span.description) for span in cluster if span.key == key]
            _store(alike, alike[0].start, alike[0].stop, packed)
    else:
        several = len({view.dtype for view in views.values()}) > 1
        _store(cluster, start - start % _ALIGNMENT if several else start, stop, packed)


def _store(cluster: Sequence[_Span], start: int, stop: int, packed: list[_Packed]) -> None:
    name, tensor = str(len(packed)), cluster[0].tensor
    dtypes = {span.tensor.dtype for span in cluster}
    kind = _FILE_NAMES.get(dtype_name(tensor.dtype), "U8") if len(dtypes) == 1 else "U8"
    width = 1 if kind == "U8" else tensor.dtype.itemsize
    alone = len({span.key for span in cluster}) == 1 and tensor.is_contiguous() and kind != "U8"
    shape = tuple(tensor.shape) if alone else ((stop - start) // width,)
    data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    data.set_(tensor.untyped_storage(), start, (stop - start,), (1,))
    packed.append((TensorEntry(name, kind, shape), data.cpu()))
    for span in cluster:
        span.description.update(
            tensor=name,
            dtype=dtype_name(span.tensor.dtype),
            shape=list(span.tensor.shape),
            stride=list(span.tensor.stride()),
            offset=(span.start - start) // span.tensor.dtype.itemsize,
        )


@dataclass(slots=True)
class Recording:
    """The recording of one module."""

    directory: Path
    config: RecordConfig
    module: nn.Module | None = None  # None until it is found
    name: str = ""  # of the module
    calls: int = 0  # number of calls so far
    recorded: int = 0  # number of recorded calls
    # number of calls that could not be recorded, by reason
    skipped: Counter[str] = field(default_factory=Counter)
    bytes: int = 0  # size of the files
    stopped: str = ""  # why recording has stopped; empty while it goes on
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _header: dict[str, Any] = field(default_factory=dict)
    _place: Path = field(init=False)  # absolute, since the program may change the working directory

    def __post_init__(self) -> None:
        self._place = self.directory.absolute()

    def take(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record a call before it is made; failures are reported but never raised."""
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
            except Exception as error:  # the program's own classes may raise anything
                self._skip(f"{type(error).__name__}: {describe(first_line(error), 150)}")

    def close(self) -> None:
        """Write the final counts of calls."""
        if self._header:
            counts = {"made": self.calls, "recorded": self.recorded, "skipped": dict(self.skipped)}
            with suppress(OutputError):  # readers do not need the counts
                self._describe(calls=counts, stopped=self.stopped)

    @property
    def summary(self) -> str:
        """A one-line summary."""
        missed = self.skipped.total()
        words = f"{self.recorded} of {plural(self.calls, 'call')} of {self.name or 'the module'} recorded"
        words += f", {missed} skipped" if missed else ""
        return f"{words} in {describe(self.directory)} ({format_bytes(self.bytes)})"

    def _write(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: dict[str, Any]) -> None:
        encoder = _Encoder()
        call = {
            "call": self.calls,
            "args": [encoder.encode(value, f"input[{index}]") for index, value in enumerate(args)],
            "kwargs": {name: encoder.encode(value, name) for name, value in kwargs.items()},
        }
        tensors = pack_tensors(encoder.tensors)
        head = header_bytes([entry for entry, _ in tensors], {})
        assert self.module is not None
        text = json.dumps({**call, "training": self.module.training, **mode}, allow_nan=False).encode()
        if len(text) > _MAX_JSON:
            raise Unstorable(f"its texts and numbers need {format_bytes(len(text))}")
        size = len(head) + len(text) + sum(data.numel() for _, data in tensors)
        if self._is_full(size):
            return
        if not self._header:
            self._begin()
        place = self._place / call_file(self.calls)
        if tensors:
            with _atomic_file(place.with_suffix(".safetensors")) as stream:
                stream.write(head)
                for _, data in tensors:
                    stream.write(data.numpy().data)
        with _atomic_file(place) as stream:  # last: it marks the call as complete
            stream.write(text)
        self.recorded += 1
        self.bytes += size
        if self.recorded == self.config.first:
            self._stop(f"the first {plural(self.recorded, 'call')} are recorded", quiet=True)

    def _is_full(self, size: int) -> bool:
        if self.bytes + size > self.config.limit:
            needs = f"call {self.calls} needs {format_bytes(size)} more"
            self._stop(f"{format_bytes(self.bytes)} are written, and {needs}; raise --max-bytes for more")
        elif shutil.disk_usage(self._place.resolve().parent).free - size < _MIN_FREE:
            self._stop(f"the disk of {describe(self.directory)} is almost full")
        return bool(self.stopped)

    def _begin(self) -> None:
        """Create the directory, or empty that of an earlier recording."""
        check_directory(self._place, force=self.config.force, marker=RECORDING)
        if self._place.is_dir():
            for pattern in (CALL_FILES, CALL_FILES.replace("json", "safetensors"), ".call-*.part"):
                for old in self._place.glob(pattern):
                    old.unlink()
        self._place.mkdir(exist_ok=True)
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
        write_text(self._place / RECORDING, f"{text}\n", force=True)

    def _skip(self, reason: str) -> None:
        self.skipped[reason] += 1
        if self.skipped[reason] == 1:
            _report(f"call {self.calls} of {self.name} is not recorded: {reason}")

    def _stop(self, reason: str, *, quiet: bool = False) -> None:
        self.stopped = reason
        if not quiet:
            _report(f"recording of {self.name} stops at call {self.calls}: {reason}")


def _mode() -> dict[str, Any]:
    """Return the gradient and autocast modes of the current call.

    Raises:
        Unstorable: The call is being traced or captured, so its tensors have no values.
    """
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if captured or torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise Unstorable("it is being traced or captured")
    devices = [name for name in ("cpu", "cuda", "mps", "xpu") if torch.is_autocast_enabled(name)]
    autocast = {name: dtype_name(torch.get_autocast_dtype(name)) for name in devices}
    return {"grad": torch.is_grad_enabled(), "autocast": autocast}


def _report(text: str) -> None:
    print(escape_control(f"ampaudit: {text}"), file=sys.stderr)


@contextmanager
def _atomic_file(path: Path) -> Iterator[BufferedWriter]:
    """Write a temporary file and rename it, so that a crash leaves no incomplete file."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as stream:
            yield stream
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


class Unstorable(Exception):
    """Raised for an argument that cannot be recorded; the message names it."""


def class_name(kind: type) -> str:
    """Return the qualified name of a class, such as ``torch.nn:Linear``."""
    return f"{kind.__module__}:{kind.__qualname__}"


@dataclass(slots=True)
class _Encoder:
    """Encodes the arguments of a call as JSON, and collects its tensors with their descriptions in it.

    The tensors are the caller's, so they must be written before the call is made.
    """

    tensors: list[_Described] = field(default_factory=list)

    def encode(self, value: Any, place: str, depth: int = 0) -> Any:
        """Encode a value; types that JSON lacks become an object with the type as its only key.

        Raises:
            Unstorable: The value is an object, a function, a file or the like.
        """
        if depth > _MAX_DEPTH:
            raise Unstorable(f"{describe(place)} is nested more than {_MAX_DEPTH} deep")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, place)
        if isinstance(value, np.ndarray | np.generic) and not isinstance(value, str | bytes):
            return self._array(value, place)
        if isinstance(value, enum.Enum) and value.name in type(value).__members__:
            return {"enum": [class_name(type(value)), value.name]}
        if isinstance(value, str | bytes | int | float | complex):
            return _scalar(value, place)
        for kind, name in _TORCH_VALUES.items():
            if isinstance(value, kind):
                return {name: str(value).removeprefix("torch.")}
        if isinstance(value, torch.Generator):
            return {"generator": value.initial_seed() % 2**63}
        if isinstance(value, type) and value.__module__ == CACHES:
            return {"class": class_name(value)}
        return self._container(value, place, depth + 1)

    def _container(self, value: Any, place: str, depth: int) -> Any:
        def items(values: Any) -> list[Any]:
            return [self.encode(item, f"{place}[{index}]", depth) for index, item in enumerate(values)]

        def attributes(names: Iterator[tuple[str, Any]]) -> dict[str, Any]:
            return {name: self.encode(item, f"{place}.{name}", depth) for name, item in names}

        kind = type(value)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return {"namedtuple": [class_name(kind), items(value)]}
        if isinstance(value, torch.Size):
            return {"size": items(value)}
        if isinstance(value, list):
            return items(value)
        if isinstance(value, tuple):  # torch's own structures as well
            return {"tuple": items(value)}
        if dataclasses.is_dataclass(value):
            fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
            return {"dataclass": [class_name(kind), attributes(fields)]}
        if isinstance(value, Mapping):
            pairs = [
                [self.encode(key, place, depth), self.encode(item, f"{place}[{key!r}]", depth)]
                for key, item in value.items()
            ]
            return {"dict": pairs}
        if isinstance(value, set | frozenset):
            return {"frozenset" if isinstance(value, frozenset) else "set": items(value)}
        if isinstance(value, slice | range):
            return {kind.__name__: items((value.start, value.stop, value.step))}
        if is_cache(kind):  # an object with plain attributes
            return {"object": [class_name(kind), attributes(iter(vars(value).items()))]}
        what = "a function" if callable(value) and hasattr(value, "__code__") else f"of type {kind.__name__}"
        raise Unstorable(f"{describe(place)} is {describe(what)}")

    def _tensor(self, value: torch.Tensor, place: str) -> dict[str, Any]:
        what = ""
        if type(value) not in _PLAIN_TENSORS:
            what = f"a {type(value).__name__}"
        elif value.is_quantized or not _has_storage(value):
            what = "a tensor without a storage of its own"
        elif value.device.type == "meta":
            what = "a tensor without values"
        if what:
            raise Unstorable(f"{describe(place)} is {what}")
        if value.is_conj() or value.is_neg():
            value = value.resolve_conj().resolve_neg()
        description: dict[str, Any] = {}  # completed by pack_tensors
        self.tensors.append((value.detach(), description))
        return description

    def _array(self, value: Any, place: str) -> dict[str, Any]:
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        try:
            return {kind: self._tensor(torch.from_numpy(np.array(value, order="C")), place)}
        except TypeError:
            raise Unstorable(f"{describe(place)} is a NumPy array of {value.dtype}") from None


def _has_storage(value: torch.Tensor) -> bool:
    """Return whether a tensor has a strided storage; sparse, nested and vmapped tensors do not."""
    try:
        value.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return value.layout is torch.strided


def _scalar(value: str | bytes | complex, place: str) -> Any:
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Unstorable(f"{describe(place)} is a text with half of a surrogate pair") from None
        return str(value)
    if isinstance(value, int):
        if abs(value) >= 2**63:
            raise Unstorable(f"{describe(place)} is an integer of more than 64 bits")
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    return {"complex": str(complex(value))}
