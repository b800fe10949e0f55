"""``ampaudit check``: checks targets against budgets, each in its own process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ampaudit.audit.config import ScanConfig
from ampaudit.ci.config import CheckConfig
from ampaudit.ci.judge import check_codes
from ampaudit.core.child import ChildLimits, ChildProcess, child_environment
from ampaudit.core.config import path_arguments, with_options
from ampaudit.core.errors import UsageError
from ampaudit.core.files import check_writable, temporary_directory, write_text
from ampaudit.core.imports import TRACER
from ampaudit.core.session import DEFAULT_SESSION, Progress, Session
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.text import model_file, parse_size
from ampaudit.core.untrusted import describe, describe_path
from ampaudit.render.json import to_json
from ampaudit.report.check import Baseline, Budgets, CheckResults, KnownTarget, Request, TargetResult
from ampaudit.report.documents import read_baseline

_HOW = "write one with: ampaudit check TARGETS --baseline FILE --update-baseline"
_POLL_SECONDS = 0.05
_HINTS = {
    "seconds": "raise --timeout, or find out why the model hangs",
    "memory": "raise --max-memory, or use a smaller batch",
}
_OPTIONS = CheckConfig.model_fields.keys() & (
    ScanConfig.model_fields.keys() | SourceConfig.model_fields.keys()
)


@with_options(CheckConfig)
def check(
    targets: str | Path | Iterable[str | Path] = (),
    *,
    config: CheckConfig | None = None,
    session: Session = DEFAULT_SESSION,
    **options: Any,
) -> CheckResults:
    """Check targets against budgets, each in its own process.

    Args:
        targets: Model files, converted directories, ``.pt2`` and ``.onnx`` files; by default those of
            ``config``.
        config: Options as one record.
        session: Context of the call; only ``on_progress`` is used.
        **options: Fields of ``CheckConfig``, which override those of ``config``.

    Returns:
        A result for each target, even if its process died.

    Raises:
        UsageError: There is no target, or a code or budget is invalid.
    """
    config = CheckConfig.merged(config, options)
    paths = list(dict.fromkeys(path_arguments(targets, "targets") or config.targets))  # globs may overlap
    if not paths:
        raise UsageError("no target", hint="name one, or write targets = [...] under [tool.ampaudit]")
    check_codes(config.allow)
    memory = parse_size(config.max_memory) if config.max_memory is not None else None
    limits = ChildLimits(config.timeout, memory)
    budgets = _json_values(config, {field.name for field in fields(Budgets)})
    Budgets.of(budgets)  # validates the limits
    update = config.update_baseline
    if update and config.baseline is None:
        raise UsageError("--update-baseline needs a file", hint="name it with --baseline FILE")
    baseline = BaselineFile(config.baseline, update=update) if config.baseline is not None else None
    settings = _json_values(config, _OPTIONS - {"fail_on"})
    _check_names([*paths, *map(str, settings.values())])
    requests = [
        Request(target, settings, budgets, baseline.entries(target) if baseline else None, update, number)
        for number, target in enumerate(paths)
    ]
    results = check_all(requests, config.jobs, limits, session.on_progress)
    if update and baseline is not None:
        baseline.update(results)
    return CheckResults.of(results)


def _check_names(names: Iterable[str]) -> None:
    """Check that names can be sent to another process as JSON."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{describe(name)}: the name is not UTF-8 text", hint="rename it") from error


def _json_values(config: CheckConfig, names: Iterable[str]) -> dict[str, object]:
    """Return fields of a record as JSON values, without those that are ``None``."""
    return config.model_dump(mode="json", include=set(names), exclude_none=True)


class BaselineFile:
    """A baseline file, which names targets by their paths relative to its directory.

    A file that will be updated need not exist.

    Raises:
        InputError: The file cannot be read or is not a baseline.
        OutputError: The file will be updated, and its directory is missing or read-only.
    """

    def __init__(self, path: Path, *, update: bool) -> None:
        if update:
            check_writable(path, force=True)
        self._path = path
        self._baseline = Baseline()
        if path.exists() or not update:
            name = f"--baseline {describe_path(path)}"
            self._baseline = read_baseline(path, name, _HOW)

    def entries(self, target: str) -> tuple[KnownTarget, ...]:
        """Return the entries of a target, under all policies."""
        key = self._key(target)
        return tuple(known for known in self._baseline.targets if known.target == key)

    def update(self, results: Iterable[TargetResult]) -> None:
        """Replace the entries of these targets, and keep those of other targets, policies and formats.

        Raises:
            OutputError: The file cannot be written.
        """
        accepted = [
            replace(r.accepted, target=self._key(r.target)) for r in results if r.accepted is not None
        ]
        if accepted:
            write_text(self._path, to_json(self._baseline.updated(accepted)), force=True)

    def _key(self, target: str) -> str:
        """Return a target's path relative to the file's directory; import paths stay as they are."""
        file = target if Path(target).exists() else model_file(target)
        if not Path(file).exists():
            return target
        relative = os.path.relpath(Path(file).resolve(), self._path.resolve().parent)
        return f"{relative.replace(os.sep, '/')}{target[len(file) :]}"


def check_all(
    requests: Sequence[Request], jobs: int, limits: ChildLimits, on_progress: Progress
) -> list[TargetResult]:
    """Run the requests, at most ``jobs`` at a time, and return their results in order.

    If a process dies or is stopped, the result says that its target could not be audited.
    """
    jobs = min(jobs, len(requests))
    waiting = list(enumerate(requests))[::-1]
    running: dict[int, _Worker] = {}
    results: dict[int, TargetResult] = {}
    with temporary_directory("ampaudit-check-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    number, request = waiting.pop()
                    running[number] = _Worker(request, folder / str(number), jobs, limits)
                time.sleep(_POLL_SECONDS)
                for number, worker in list(running.items()):
                    result = worker.poll()
                    if result is not None:
                        results[number] = result
                        del running[number]
                        on_progress("checking", len(results), len(requests))
        finally:
            for worker in running.values():
                worker.process.stop()
    return [results[number] for number in range(len(requests))]


class _Worker:
    """The process of one request."""

    def __init__(self, request: Request, folder: Path, jobs: int, limits: ChildLimits) -> None:
        folder.mkdir()
        self._request, self._limits = request, limits
        self._result = folder / "result.json"
        environment = child_environment()
        if jobs > 1:  # divide the cores among the processes
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
        question = folder / "request.json"
        question.write_bytes(TypeAdapter(Request).dump_json(request))
        self.process = ChildProcess(
            "ampaudit.ci.worker:main",
            str(question),
            str(self._result),
            log=folder / "stderr",
            imports=(TRACER,),
            environment=environment,
        )

    def poll(self) -> TargetResult | None:
        """Return the result, or ``None`` while the process runs."""
        running = self.process.running()
        exceeded = self.process.exceeded(self._limits) if running else None
        if running and exceeded is None:
            return None
        self.process.stop()  # including children that the model's code has left behind
        if exceeded is not None:
            which, what = exceeded
            return self._failed(f"{what}\n  next: {_HINTS[which]}")
        if not self._result.is_file():
            return self._failed(f"{self.process.death()}\n  next: run 'ampaudit scan' on it")
        # a model's error message need not be UTF-8, which ``validate_json`` requires
        outcome = TypeAdapter(TargetResult).validate_python(json.loads(self._result.read_bytes()))
        return replace(outcome, **self._spent())

    def _failed(self, error: str) -> TargetResult:
        return TargetResult(self._request.target, "error", 3, error=error, **self._spent())

    def _spent(self) -> dict[str, Any]:
        return {"seconds": round(self.process.seconds, 2), "peak_bytes": self.process.peak_bytes}
