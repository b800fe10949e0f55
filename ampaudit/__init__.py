"""Find the layers of a PyTorch model that overflow in 16 bits.

The public names are loaded on first use, so that ``import ampaudit`` and ``ampaudit --help`` never import
torch. Type checkers and editors read them from ``__init__.pyi``, which ``make stub`` writes.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:  # the program handles interrupts once this is imported, so this is fast
    from typing import Any

_MODULES = {
    "PlanConfig": "ampaudit.audit.config",
    "ScanConfig": "ampaudit.audit.config",
    "plan": "ampaudit.audit.plan",
    "scan": "ampaudit.audit.scan",
    "BenchConfig": "ampaudit.benchmarking.config",
    "bench": "ampaudit.benchmarking.run",
    "UnsafeModel": "ampaudit.ci.assertion",
    "assert_safe": "ampaudit.ci.assertion",
    "check": "ampaudit.ci.check",
    "CheckConfig": "ampaudit.ci.config",
    "AuditError": "ampaudit.core.errors",
    "CouldNotAudit": "ampaudit.core.errors",
    "InputError": "ampaudit.core.errors",
    "OutputError": "ampaudit.core.errors",
    "PolicyError": "ampaudit.core.errors",
    "ProofBroken": "ampaudit.core.errors",
    "ReferenceBroken": "ampaudit.core.errors",
    "RunFailed": "ampaudit.core.errors",
    "SourceError": "ampaudit.core.errors",
    "TraceFailed": "ampaudit.core.errors",
    "UsageError": "ampaudit.core.errors",
    "WeightsError": "ampaudit.core.errors",
    "Session": "ampaudit.core.session",
    "SourceConfig": "ampaudit.core.source_config",
    "__version__": "ampaudit.core",
    "ConvertConfig": "ampaudit.export.config",
    "VerifyConfig": "ampaudit.export.config",
    "convert": "ampaudit.export.convert",
    "verify": "ampaudit.export.verify",
    "LintConfig": "ampaudit.linter.config",
    "lint": "ampaudit.linter.lint",
    "Policy": "ampaudit.policy",
    "load_policy": "ampaudit.policy",
    "record": "ampaudit.recording.calls",
    "RecordConfig": "ampaudit.recording.config",
    "BenchReport": "ampaudit.report.bench",
    "CheckResults": "ampaudit.report.check",
    "DiffConfig": "ampaudit.report.compare",
    "Conversion": "ampaudit.report.conversion",
    "Differences": "ampaudit.report.difference",
    "Finding": "ampaudit.findings.finding",
    "Severity": "ampaudit.findings.finding",
    "LintReport": "ampaudit.report.lint",
    "Comparison": "ampaudit.report.model",
    "Report": "ampaudit.report.model",
    "PlanReport": "ampaudit.report.plan",
    "diff": "ampaudit.report.compare",
    "read_report": "ampaudit.report.compare",
    "TrainingReport": "ampaudit.report.training",
    "TuningReport": "ampaudit.report.tuning",
    "Verification": "ampaudit.report.conversion",
    "twin": "ampaudit.trace.twins",
    "TrainConfig": "ampaudit.training.config",
    "LossScaler": "ampaudit.training.prepare",
    "Prepared": "ampaudit.training.prepare",
    "prepare": "ampaudit.training.prepare",
    "scaler": "ampaudit.training.prepare",
    "train": "ampaudit.training.train",
    "TrainingMonitor": "ampaudit.training.watch",
    "watch": "ampaudit.training.watch",
    "TuneConfig": "ampaudit.tuning.config",
    "tune": "ampaudit.tuning.tune",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "__all__":
        return sorted(_MODULES)
    if name not in _MODULES:
        raise AttributeError(f"module 'ampaudit' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
