"""``ampaudit check``: checks targets against budgets, each in its own process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ampaudit.audit.config import ScanConfig
from ampaudit.ci.config import CheckConfig
from ampaudit.ci.judge import check_codes
from ampaudit.core.arguments import given_paths
from ampaudit.core.child import ChildLimits, ChildProcess, child_environment
from ampaudit.core.config import Progress, with_options
from ampaudit.core.errors import UsageError
from ampaudit.core.files import temporary_directory, write_text
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.text import model_file, parse_size
from ampaudit.core.untrusted import describe_path
from ampaudit.render.json import to_json
from ampaudit.report.check import Baseline, Budgets, CheckResults, KnownTarget, Request, TargetResult
from ampaudit.report.saved import read_record

__all__ = ["BaselineFile", "Limits", "check", "check_all"]

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
    **options: Any,
) -> CheckResults:
    """Check targets against budgets, each in its own process.

    Args:
        targets: model files, converted directories, ``.pt2`` and ``.onnx`` files; by default those of
            ``config``.
        config: the options as one record.
        **options: fields of ``CheckConfig``, which override those of ``config``.

    Returns:
        A result for each target, even if its process died.

    Raises:
        UsageError: there is no target, or a code or budget is invalid.
    """
    chosen = CheckConfig.given(config, options)
    wanted = given_paths(targets, "targets") or list(chosen.targets)
    if not wanted:
        raise UsageError("no target", hint="name one, or write targets = [...] under [tool.ampaudit]")
    check_codes(chosen.allow)
    limits = Limits(chosen.jobs, chosen.timeout, parse_size(chosen.max_memory) if chosen.max_memory else None)
    budgets = _plain(chosen, {field.name for field in fields(Budgets)})
    Budgets.of(budgets)  # refuses what is no limit
    update = chosen.update_baseline
    if update and chosen.baseline is None:
        raise UsageError("--update-baseline needs a file", hint="name it with --baseline FILE")
    baseline = BaselineFile(chosen.baseline, update=update) if chosen.baseline is not None else None
    settings = _plain(chosen, _OPTIONS - {"fail_on", "on_progress"})
    requests = [
        Request(target, settings, budgets, baseline.entries(target) if baseline else None, update, number)
        for number, target in enumerate(wanted)
    ]
    results = check_all(requests, limits, chosen.on_progress)
    if update and baseline is not None:
        baseline.update(results)
    return CheckResults.of(results)


def _plain(config: CheckConfig, names: Iterable[str]) -> dict[str, object]:
    """Return the fields that are set as values that JSON can carry."""
    return config.model_dump(mode="json", include=set(names), exclude_none=True)


class BaselineFile:
    """What a file accepts of each target; targets are named by their paths from its directory."""

    def __init__(self, path: Path, *, update: bool) -> None:
        """Read the file.

        Args:
            path: of the file.
            update: whether it will be written, and need not exist yet.

        Raises:
            InputError: it cannot be read, or is no baseline.
        """
        self._path = path
        self._baseline = Baseline()
        if path.exists() or not update:
            name = f"--baseline {describe_path(path)}"
            self._baseline = read_record(Baseline, "baseline", path, name, _HOW)

    def entries(self, target: str) -> tuple[KnownTarget, ...]:
        """Return what is accepted of a target, under any policy."""
        key = self._key(target)
        return tuple(known for known in self._baseline.targets if known.target == key)

    def update(self, results: Iterable[TargetResult]) -> None:
        """Accept what was found, and keep what the file has of other targets, policies and formats.

        Raises:
            OutputError: the file cannot be written.
        """
        found = [replace(r.accepted, target=self._key(r.target)) for r in results if r.accepted is not None]
        if found:
            write_text(self._path, to_json(self._baseline.updated(found)), force=True)

    def _key(self, target: str) -> str:
        """Return a target's path from the directory of the file; an import path stays as it is."""
        file = target if Path(target).exists() else model_file(target)
        if not Path(file).exists():
            return target
        beside = os.path.relpath(Path(file).resolve(), self._path.resolve().parent)
        return f"{beside.replace(os.sep, '/')}{target[len(file) :]}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Number of parallel processes, and the limits of each; ``None`` means unlimited."""

    jobs: int = 1
    timeout: float | None = None
    memory: int | None = None


def check_all(requests: Sequence[Request], limits: Limits, on_progress: Progress) -> list[TargetResult]:
    """Return the results in the order of the requests, even if processes die.

    A process that is stopped, or dies, is a result like any other: its target could not be audited.
    """
    waiting = list(enumerate(requests))[::-1]
    running: dict[int, _Worker] = {}
    results: dict[int, TargetResult] = {}
    with temporary_directory("ampaudit-check-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < limits.jobs:
                    number, request = waiting.pop()
                    running[number] = _Worker(request, folder / str(number), limits)
                time.sleep(_POLL_SECONDS)
                for number, worker in list(running.items()):
                    result = worker.poll()
                    if result is not None:
                        results[number] = result
                        del running[number]
                        on_progress("checking", len(results), len(requests))
        finally:
            for worker in running.values():
                worker.stop()
    return [results[number] for number in range(len(requests))]


class _Worker:
    """One process with its limits."""

    def __init__(self, request: Request, folder: Path, limits: Limits) -> None:
        folder.mkdir()
        self._request, self._limits = request, ChildLimits(limits.timeout, limits.memory)
        self._result = folder / "result.json"
        question = folder / "request.json"
        question.write_bytes(TypeAdapter(Request).dump_json(request))
        self._process = ChildProcess(
            "ampaudit.ci.worker:main",
            str(question),
            str(self._result),
            log=folder / "stderr",
            environment={**child_environment(), **_threads(limits.jobs)},
        )

    def poll(self) -> TargetResult | None:
        """Return the result once there is one."""
        running = self._process.running()
        exceeded = self._process.exceeded(self._limits) if running else None
        if running and exceeded is None:
            return None
        self.stop()  # with children that the model's code left behind
        if exceeded is not None:
            which, what = exceeded
            return self._failed(f"{what}\n  next: {_HINTS[which]}")
        if not self._result.is_file():
            return self._failed(f"{self._process.death()}\n  next: run 'ampaudit scan' on it")
        found = TypeAdapter(TargetResult).validate_json(self._result.read_bytes())
        return replace(found, **self._spent())

    def stop(self) -> None:
        """Kill the process and all its children."""
        self._process.stop()

    def _failed(self, error: str) -> TargetResult:
        return TargetResult(self._request.target, "error", 3, error=error, **self._spent())

    def _spent(self) -> dict[str, Any]:
        return {"seconds": round(self._process.seconds, 2), "peak_bytes": self._process.peak_bytes}


def _threads(jobs: int) -> dict[str, str]:
    """Divide the cores among parallel processes; a single process keeps its default."""
    return {} if jobs == 1 else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
