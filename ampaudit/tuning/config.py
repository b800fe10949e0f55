"""Options of ``tune``."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import BeforeValidator, InstanceOf

from ampaudit.audit.config import TwinFile, check_device
from ampaudit.core.config import (
    NOT_NAN,
    Config,
    DeviceName,
    Option,
    Seed,
)
from ampaudit.core.errors import UsageError
from ampaudit.devices.catalogue import Device, device_named

CostKind = Literal["ops", "bytes", "time"]
TunedDtype = Literal["float16", "bfloat16", "auto"]
DEFAULT_DB = 40.0


class TuneConfig(Config):
    """Options of ``tune``."""

    min_sqnr: Annotated[
        float | None,
        NOT_NAN,
        Ge(0),
        Option("Required accuracy of every output.  [default: 40]", metavar="DB"),
    ] = None
    metric_drop: Annotated[
        float | None,
        Ge(0),
        Option("Allowed drop of the model file's metric, instead of --min-sqnr.", metavar="X"),
    ] = None
    dtype: Annotated[TunedDtype, Option("16-bit format; auto takes the one that needs less float32.")] = (
        "float16"
    )
    cost: Annotated[CostKind, Option("What float32 costs: ops, bytes moved, or time on a device.")] = "ops"
    target: Annotated[
        InstanceOf[Device] | None,
        BeforeValidator(lambda value: device_named(value) if isinstance(value, str) else value),
        Option(
            "Device for --cost time; ampaudit devices lists them.",
            metavar="DEVICE",
            flags=("--for",),
            accepts="str | Device | None",
        ),
    ] = None
    exhaustive: Annotated[bool, Option("Check that each op in float32 is needed, by one run per op.")] = False
    device: DeviceName = "auto"
    seed: Seed = 0
    twins: TwinFile = None

    def check(self) -> None:
        """Raise early for options that contradict each other, and for a missing device."""
        if self.min_sqnr is not None and self.metric_drop is not None:
            raise UsageError("--min-sqnr and --metric-drop are two goals", hint="leave one out")
        if self.target is not None and self.cost != "time":
            raise UsageError("--for names a device for --cost time", hint="add --cost time, or leave it out")
        check_device(self.device, audits=True)

    @property
    def target_db(self) -> float | None:
        """The required accuracy; ``None`` where the metric decides."""
        if self.metric_drop is not None:
            return None
        return DEFAULT_DB if self.min_sqnr is None else self.min_sqnr
