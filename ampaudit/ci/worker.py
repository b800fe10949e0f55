"""The worker process of ``ampaudit check``: checks one target and writes the result as JSON.

The model's code runs in this process, so a crash does not affect other targets.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from ampaudit.audit.config import ScanConfig, policies_of, rules_of
from ampaudit.audit.metric import metric_of
from ampaudit.audit.scan import scan
from ampaudit.ci.judge import judge, known_target, measured_in
from ampaudit.core.config import Config
from ampaudit.core.errors import AuditError, first_line
from ampaudit.core.session import Session
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.torchrun import rank_and_world_size
from ampaudit.export.manifest import read_manifest
from ampaudit.export.verify import verify
from ampaudit.findings.finding import counts_in_words, gaps_in_words
from ampaudit.policy.schema import AS_IS
from ampaudit.report.check import Breach, Budgets, Measurements, Request, TargetResult
from ampaudit.report.model import Report
from ampaudit.run.share import ALONE, PartDone
from ampaudit.source import ModelSource
from ampaudit.source.open import open_source

if TYPE_CHECKING:
    from ampaudit.parallel.ranks import RankShare


def check_target(request: Request, share: RankShare | None = None) -> TargetResult:
    """Audit a target and compare it with its budgets; a share divides the batches among processes.

    Raises:
        PartDone: Another process has the result.
        AuditError: The target cannot be audited.
    """
    source = open_source(request.target, SourceConfig.read(_options_of(SourceConfig, request)))
    config = ScanConfig.read(_options_of(ScanConfig, request))
    config = config.changed(policy=rules_of(config.policy))  # one policy: ``scan`` takes several
    budgets = Budgets.of(request.budgets)
    breaches: list[Breach] = []
    notes: list[str] = []
    if source.kind == "converted":
        config = config.changed(policy=AS_IS, dtype=source.dtype or config.dtype)
        breaches += [Breach("integrity", p.where, p.what) for p in verify(Path(request.target)).problems]
        notes.append("audited as converted, with its casts; its files were verified")
    if share is not None and not _divide(source, config, share, request.target):
        share = None
    report, metric = _audit(source, config, share)
    if report.run.made_up:
        notes.append(f"audited on {report.run.made_up}")
    if report.gaps:
        notes.append(gaps_in_words(report.gaps))
    hidden = [f.severity for f in report.findings if f.suppressed is not None or f.code in budgets.allow]
    if hidden:
        notes.append(f"ignored: {counts_in_words(hidden)}")
    measured = measured_in(report)
    if metric is not None:
        measured = replace(measured, metric_fp32=metric[0], metric_lower=metric[1])
    if source.kind == "converted":
        measured = _with_recorded(measured, Path(request.target))
    if budgets.max_metric_drop is not None and measured.metric_fp32 is None:
        notes.append("the model file has no metric(output, batch): max-metric-drop was not checked")
    policy, dtype = report.run.policy, report.run.dtype
    known = (k for k in request.baseline or () if (k.policy, k.dtype) == (policy, dtype))
    before, accepted = next(known, None), None
    crashed = report.exit_code == 3  # one of ampaudit's checks failed
    if request.update_baseline and not crashed:
        before = accepted = known_target(request.target, report, measured, budgets, before)
    if before is None and request.baseline is not None:
        notes.append(f"the baseline has no entry under {policy} in {dtype}")
    judged = judge(report, measured, budgets, before)
    errors = judge(report, measured, replace(budgets, fail_on="error"), before).breaches
    breaches += judged.breaches
    return TargetResult(
        target=request.target,
        verdict="error" if crashed else "fail" if breaches or errors else "pass",
        exit_code=3 if crashed else int(bool(breaches)),
        error="a check failed and its findings are missing\n  next: run 'ampaudit scan' on it"
        if crashed
        else "",
        breaches=tuple(breaches),
        ignored=tuple(breach for breach in errors if breach not in breaches),
        known=judged.known,
        gone=judged.gone,
        accepted=accepted,
        measured=measured,
        policy=policy,
        dtype=dtype,
        notes=tuple(notes),
    )


def _audit(
    source: ModelSource, config: ScanConfig, share: RankShare | None
) -> tuple[Report, tuple[float, float] | None]:
    """Audit a model; return the report, and its metric in FP32 and in 16 bits if it has one."""
    report: Report | None = None
    outputs: dict[int, Any] = {}
    session = Session(share=share, keep_outputs=outputs.__setitem__ if source.metric is not None else None)
    with suppress(PartDone):  # rank 0 still needs the outputs of this process for the metric
        report = scan(source, config=config, session=session)
    metric = None
    if source.metric is not None and (outputs or share is not None):
        metric = metric_of(source, outputs, share or ALONE)
    if report is None:
        raise PartDone
    return report, metric


def _divide(source: ModelSource, config: ScanConfig, share: RankShare, location: str) -> bool:
    """Divide the batches among processes; ``False`` if that is impossible, and rank 0 runs all of them."""
    from ampaudit.parallel.identity import identity_of, is_divisible

    if not is_divisible(config):
        share.finish()
        return False
    share.describe(location, identity_of(source, policies_of(config.policy), config))
    return True


def _options_of(record: type[Config], request: Request) -> dict[str, object]:
    return {name: value for name, value in request.options.items() if name in record.model_fields}


def _with_recorded(measured: Measurements, directory: Path) -> Measurements:
    """Add the accuracy against the FP32 model, which was recorded at conversion; its weights are not here."""
    recorded = read_manifest(directory).outputs
    accuracies = [o.sqnr_db for o in recorded if o.sqnr_db is not None]
    accuracies += [measured.sqnr_db] if measured.sqnr_db is not None else []
    broken = (o.name for o in recorded if o.max_error is None)
    return replace(
        measured,
        sqnr_db=min(accuracies, default=None),
        broken=tuple(dict.fromkeys([*measured.broken, *broken])),
    )


def _check(request: Request) -> TargetResult:
    """Check a target, together with the workers of other ranks if there are any."""
    if rank_and_world_size() is None:
        return check_target(request)
    from click.exceptions import Exit

    from ampaudit.parallel.ranks import with_ranks

    try:
        with with_ranks(name=f"check/{request.number}") as share:
            return check_target(request, share)
    except Exit as error:
        return TargetResult(request.target, "error", error.exit_code, error="rank 0 has the result")


def main() -> None:
    """Check the request in a file and write the result to another; both paths are arguments."""
    request = TypeAdapter(Request).validate_json(Path(sys.argv[1]).read_bytes())
    try:
        result = _check(request)
    except AuditError as error:
        result = TargetResult(request.target, "error", error.exit_code, error=str(error))
    except MemoryError:
        result = TargetResult(request.target, "error", 3, error="out of memory\n  next: use a smaller batch")
    except Exception as error:
        what = f"internal error: {type(error).__name__}: {first_line(error)}"
        text = f"{what}\n  next: run 'ampaudit scan --debug' on it"
        result = TargetResult(request.target, "error", 3, error=text)
    part = Path(f"{sys.argv[2]}.part")
    part.write_text(json.dumps(TypeAdapter(TargetResult).dump_python(result, mode="json")), encoding="utf-8")
    part.replace(sys.argv[2])
