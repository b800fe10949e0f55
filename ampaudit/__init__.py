"""ampaudit names the layers of a PyTorch model that overflow in 16 bits.

The names below are loaded on first use, so that ``import ampaudit`` and ``ampaudit --help`` never
import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ampaudit.errors import AuditError
    from ampaudit.report.conversion import Conversion
    from ampaudit.report.model import Report
    from ampaudit.report.plan import PlanReport
    from ampaudit.report.verification import Verification
    from ampaudit.testing.assertion import UnsafeModel, assert_safe
    from ampaudit.training.prepare import Prepared, prepare
    from ampaudit.training.scaler import LossScaler, scaler
    from ampaudit.training.watch import Watch, watch
    from ampaudit.workflows.convert import convert_model
    from ampaudit.workflows.options import ConvertOptions
    from ampaudit.workflows.plan import plan
    from ampaudit.workflows.scan import scan
    from ampaudit.workflows.verify import verify

__version__ = "0.1.0"
__all__ = [
    "AuditError",
    "Conversion",
    "ConvertOptions",
    "LossScaler",
    "PlanReport",
    "Prepared",
    "Report",
    "UnsafeModel",
    "Verification",
    "Watch",
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
    "AuditError": "ampaudit.errors",
    "Conversion": "ampaudit.report.conversion",
    "ConvertOptions": "ampaudit.workflows.options",
    "LossScaler": "ampaudit.training.scaler",
    "PlanReport": "ampaudit.report.plan",
    "Prepared": "ampaudit.training.prepare",
    "Report": "ampaudit.report.model",
    "UnsafeModel": "ampaudit.testing.assertion",
    "Verification": "ampaudit.report.verification",
    "assert_safe": "ampaudit.testing.assertion",
    "convert_model": "ampaudit.workflows.convert",
    "plan": "ampaudit.workflows.plan",
    "prepare": "ampaudit.training.prepare",
    "scaler": "ampaudit.training.scaler",
    "scan": "ampaudit.workflows.scan",
    "verify": "ampaudit.workflows.verify",
    "Watch": "ampaudit.training.watch",
    "watch": "ampaudit.training.watch",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ampaudit' has no attribute {name!r}")
