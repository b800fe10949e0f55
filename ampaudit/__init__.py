"""ampaudit names the layers of a PyTorch model that overflow in 16 bits.

The names below are loaded on first use, so that ``import ampaudit`` and ``ampaudit --help`` never
import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ampaudit.audit.plan import plan
    from ampaudit.audit.scan import scan
    from ampaudit.ci.assertion import UnsafeModel, assert_safe
    from ampaudit.core.errors import AuditError
    from ampaudit.export.convert import convert_model
    from ampaudit.export.options import ConvertOptions
    from ampaudit.export.verify import verify
    from ampaudit.report.conversion import Conversion
    from ampaudit.report.model import Report
    from ampaudit.report.plan import PlanReport
    from ampaudit.report.verification import Verification
    from ampaudit.training.prepare import Prepared, prepare
    from ampaudit.training.scaler import LossScaler, scaler
    from ampaudit.training.watch import TrainingMonitor, watch

from ampaudit.core.version import __version__

__all__ = [
    "AuditError",
    "Conversion",
    "ConvertOptions",
    "LossScaler",
    "PlanReport",
    "Prepared",
    "Report",
    "TrainingMonitor",
    "UnsafeModel",
    "Verification",
    "__version__",
    "assert_safe",
    "convert_model",
    "plan",
    "prepare",
    "scaler",
    "scan",
    "verify",
    "watch",
]

_HOMES = {
    "AuditError": "ampaudit.core.errors",
    "Conversion": "ampaudit.report.conversion",
    "ConvertOptions": "ampaudit.export.options",
    "LossScaler": "ampaudit.training.scaler",
    "PlanReport": "ampaudit.report.plan",
    "Prepared": "ampaudit.training.prepare",
    "Report": "ampaudit.report.model",
    "UnsafeModel": "ampaudit.ci.assertion",
    "Verification": "ampaudit.report.verification",
    "assert_safe": "ampaudit.ci.assertion",
    "convert_model": "ampaudit.export.convert",
    "plan": "ampaudit.audit.plan",
    "prepare": "ampaudit.training.prepare",
    "scaler": "ampaudit.training.scaler",
    "scan": "ampaudit.audit.scan",
    "verify": "ampaudit.export.verify",
    "TrainingMonitor": "ampaudit.training.watch",
    "watch": "ampaudit.training.watch",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ampaudit' has no attribute {name!r}")
