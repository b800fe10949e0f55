"""Writes training runs as TensorBoard summaries: loss, scale and gradients of each variant."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampaudit.core.errors import OutputError, UsageError
from ampaudit.core.files import check_writable
from ampaudit.core.interrupts import Committing
from ampaudit.core.text import escape_control
from ampaudit.report.training import TrainingReport, Variant

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def write_summaries(report: TrainingReport, directory: Path, *, force: bool = False) -> None:
    """Write one folder of events per variant to a directory, to be passed to ``tensorboard --logdir``.

    With ``force``, events are added to folders that hold some already.

    Raises:
        UsageError: The package tensorboard is missing.
        OutputError: A folder holds events already, or cannot be written.
    """
    names = [variant.name for variant in report.variants]
    check_summaries(directory, force=force, runs=names)
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise _not_installed() from error
    try:
        for variant, folder in zip(report.variants, _folders(directory, names), strict=True):
            with Committing(folder), SummaryWriter(str(folder)) as writer:
                _write(variant, report, writer)
    except OSError as error:
        raise OutputError(f"cannot write {directory}: {error.strerror or error}") from error


def check_summaries(directory: Path, *, force: bool, runs: Sequence[str] = ("fp32",)) -> None:
    """Raise early for what would fail after a long run, which has at least the given variants.

    Raises:
        UsageError, OutputError: see ``write_summaries``.
    """
    if find_spec("tensorboard") is None:
        raise _not_installed()
    for folder in _folders(directory, runs):
        if not force and folder.is_dir() and any(folder.glob("events.out.tfevents.*")):
            raise OutputError(
                f"{folder} holds summaries already",
                hint="choose another folder, or replace it with --force (in Python: force=True)",
            )
        existing = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
        check_writable(existing / "events.out.tfevents", force=True)


def _folders(directory: Path, names: Sequence[str]) -> list[Path]:
    return [directory / (re.sub(r"[^\w.-]+", "-", name).strip("-") or "run") for name in names]


def _not_installed() -> UsageError:
    hint = "pip install 'ampaudit[tensorboard]'"
    return UsageError("TensorBoard summaries need the package tensorboard", hint=hint)


def _write(variant: Variant, report: TrainingReport, writer: SummaryWriter) -> None:
    health = variant.health
    for record in health.steps:
        if record.recorded:
            _scalar(writer, "loss", record.loss, record.step)
        _scalar(writer, "loss scale", record.scale, record.step)
        _scalar(writer, "skipped", float(record.skipped), record.step)
    for parameter in health.parameters:
        name = escape_control(parameter.name)
        for step, peak in zip(health.watched, parameter.gradient_peaks, strict=False):
            _scalar(writer, f"gradient peak/{name}", peak, step)
        last = health.watched[-1] if health.watched else 0
        for field in ("zero", "flushed", "update_ratio", "lost", "state_flushed"):
            _scalar(writer, f"{field.replace('_', ' ')}/{name}", getattr(parameter, field), last)
    findings = [f for f in report.findings if f.site.rpartition("/")[0] == variant.name]
    for index, finding in enumerate(findings):
        text = (
            f"**{finding.severity.value} {finding.code}** {escape_control(finding.cause)}. "
            f"{escape_control(finding.advice)}"
        )
        writer.add_text("findings", text.replace("<", "&lt;"), index)


def _scalar(writer: Any, tag: str, value: float | None, step: int) -> None:
    """Write a missing value as NaN: a gap in the curve."""
    writer.add_scalar(tag, math.nan if value is None else value, step)
