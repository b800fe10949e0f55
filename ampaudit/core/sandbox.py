"""Runs third-party code on untrusted data in a confined process."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from ampaudit.core import interrupts
from ampaudit.core.child import ChildLimits, ChildProcess, child_environment
from ampaudit.core.errors import AuditError, CouldNotAudit
from ampaudit.core.files import temporary_directory
from ampaudit.core.forkserver import prepare_forks
from ampaudit.core.untrusted import MAX_MESSAGE, describe, parse_json, read_bounded

_ANSWER_REQUEST = "ampaudit.core.sandboxed:answer_request"
REQUEST, ANSWER = "request.json", "answer.json"
_MAX_ANSWER = 16_000_000
_WAIT_SECONDS = 0.05
_IMPORT_BYTES = 1_500_000_000  # memory allowance for importing torch and transformers
# variables that an interpreter, its libraries and torch need; no proxies, no tokens
_INHERITED = (
    *("PATH", "PYTHON", "HOME", "USERPROFILE", "APPDATA", "LANG", "LC_", "TZ", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("LD_LIBRARY_PATH", "DYLD_", "SYSTEMROOT", "WINDIR", "NUMBER_OF_PROCESSORS", "PROCESSOR_"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "ATEN_", "ONEDNN_", "DNNL_", "TORCH_", "CUDA_", "CUBLAS_", "NVIDIA_"),
)
_FOLDERS = ("TMPDIR", "TEMP", "TMP", "HF_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR")


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """The limits of a confined process; ``None`` means unlimited."""

    seconds: float  # of wall-clock time
    memory: int | None = None  # bytes in addition to those of its imports
    processor_seconds: int | None = None  # after its imports


class Sandbox:
    """A confined process; starts at construction and is killed when the context is left.

    Args:
        target: ``module:function``. The function takes the request, imports what it needs, and returns a
            function without arguments, which is called in confinement and returns the answer.
        request: Argument of the target, as JSON values.
        limits: Limits of the process.
        environment: Additional environment variables.
        imports: Additional modules to import before the limits apply.
    """

    def __init__(
        self,
        target: str,
        request: Any,
        limits: SandboxLimits,
        environment: dict[str, str] | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        self._limits = limits
        self._resources = ExitStack()
        imports = (target.partition(":")[0], *imports)
        order = {"target": target, "imports": imports, "limits": asdict(limits), "request": request}
        try:
            self._folder = self._resources.enter_context(temporary_directory("ampaudit-sandbox-"))
            self.folder.mkdir()
            (self._folder / REQUEST).write_text(json.dumps(order), encoding="utf-8")
            self._process = ChildProcess(
                _ANSWER_REQUEST,
                str(self._folder / REQUEST),
                str(self.folder),
                log=self._folder / "log",
                environment=_environment() | (environment or {}),
                variables=dict.fromkeys(_FOLDERS, str(self.folder)),
                imports=imports,
                folder=self.folder,
            )
        except OSError as error:
            self._resources.close()
            raise CouldNotAudit(
                f"cannot start a sandbox in the temporary directory: {error.strerror or error}",
                hint="free some space, or set TMPDIR to another directory",
            ) from error
        self._resources.callback(self._process.stop)

    @property
    def folder(self) -> Path:
        """Folder that the process may write to; removed when the context is left."""
        return self._folder / "scratch"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def answer(self, what: str, error: type[AuditError], hint: str) -> Any:
        """Wait for the answer.

        Messages name the input as ``what``; errors have this hint unless the process gives one.

        Raises:
            AuditError: The process rejected the input, was killed, exceeded a limit, or gave no valid answer;
                of type ``error``.
        """
        memory = self._limits.memory
        limits = ChildLimits(self._limits.seconds, None if memory is None else memory + _IMPORT_BYTES)
        while self._process.running(_WAIT_SECONDS):
            exceeded = self._process.exceeded(limits)
            if exceeded is not None:
                raise error(_message(what, f"its reader was {exceeded[1]}"), hint=hint)
        self._process.stop()  # and processes that it left behind
        path = self.folder / ANSWER
        if not path.exists():
            why = f"could not be read: {self._process.death()}"
            if self._process.killed_by == "SIGXCPU":
                why = f"reading it takes more than {self._limits.processor_seconds} s"
            raise error(_message(what, why), hint=hint)
        try:
            answer = parse_json(read_bounded(path, _MAX_ANSWER, error))
        except (ValueError, AuditError) as cause:
            raise error(_message(what, "its reader gave no valid answer"), hint=hint) from cause
        if not isinstance(answer, dict) or answer.keys() not in ({"answer"}, {"error", "hint"}):
            raise error(_message(what, "its reader gave no valid answer"), hint=hint)
        if "error" in answer:
            hint = describe(answer["hint"], MAX_MESSAGE) if answer["hint"] else hint
            raise error(_message(what, str(answer["error"])), hint=hint)
        return answer["answer"]


def prepare_sandbox(target: str, environment: dict[str, str], imports: Sequence[str]) -> None:
    """Start the imports of a sandbox that will be constructed with these arguments."""
    if sys.platform == "linux":
        with interrupts.Deferred(), suppress(OSError):  # the sandbox will report it
            imports = (target.partition(":")[0], *imports)
            prepare_forks(_ANSWER_REQUEST, imports, _environment() | environment)


def _message(what: str, why: str) -> str:
    return describe(f"{what}: {why}", MAX_MESSAGE)


def _environment() -> dict[str, str]:
    inherited = {
        name: value for name, value in child_environment().items() if name.upper().startswith(_INHERITED)
    }
    return {
        **inherited,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OPENBLAS_NUM_THREADS": "1",  # threads that numpy starts would not be confined
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONSAFEPATH": "1",
    }
