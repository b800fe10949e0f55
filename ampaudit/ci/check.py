"""``ampaudit check``: checks targets against budgets, each in its own process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Unpack

from ampaudit.audit.config import ScanConfig
from ampaudit.ci.baseline import BaselineFile
from ampaudit.ci.config import CheckConfig, CheckOptions
from ampaudit.ci.judge import check_codes
from ampaudit.ci.pool import Limits, check_all
from ampaudit.core.arguments import given_paths
from ampaudit.core.config import with_options
from ampaudit.core.errors import UsageError
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.text import parse_size
from ampaudit.report.budgets import Budgets
from ampaudit.report.check import CheckResults, Request

__all__ = ["check"]

_OPTIONS = CheckConfig.model_fields.keys() & (
    ScanConfig.model_fields.keys() | SourceConfig.model_fields.keys()
)


@with_options(CheckConfig, CheckOptions)
def check(
    targets: str | Path | Iterable[str | Path] = (),
    *,
    config: CheckConfig | None = None,
    **options: Unpack[CheckOptions],
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
