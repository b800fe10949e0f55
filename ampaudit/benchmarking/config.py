"""Options of ``bench``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import AfterValidator, BeforeValidator, InstanceOf

from ampaudit.audit.config import Rules, check_device
from ampaudit.core.config import (
    Config,
    DeviceName,
    DtypeName,
    Option,
    Seed,
    UserFunction,
    python_only,
    split_commas,
)
from ampaudit.core.errors import UsageError, did_you_mean
from ampaudit.devices.catalogue import Device, device_named

MODES = ("fp32", "tf32", "autocast", "half", "bf16", "converted", "converted+compile")
DEFAULT_MODES = MODES[:-1]


def parse_modes(value: str | Iterable[str]) -> tuple[str, ...]:
    """Parse names such as ``fp32,autocast``, and drop duplicates.

    Raises:
        UsageError: There is no name, or one is unknown.
    """
    names = tuple(dict.fromkeys(split_commas(value)))
    for name in names:
        if name not in MODES:
            hint = f"{did_you_mean(name, MODES)}one of: {', '.join(MODES)}"
            raise UsageError(f"--modes {name}: no such mode", hint=hint)
    if not names:
        raise UsageError("--modes is empty", hint=f"some of: {', '.join(MODES)}")
    return names


def _read_sizes(value: Any) -> Any:
    """Parse batch sizes such as ``8,32``."""
    if not isinstance(value, str):
        return value
    try:
        return [int(size) for size in value.split(",")]
    except ValueError:
        raise _sizes_error(value) from None


def _check_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Reject sizes below 1, and drop duplicates."""
    if min(sizes, default=1) < 1:
        raise _sizes_error(",".join(map(str, sizes)))
    return tuple(dict.fromkeys(sizes))


def _sizes_error(value: str) -> UsageError:
    return UsageError(f"--batch-size {value}: give positive integers, such as 8,32")


class BenchConfig(Config):
    """Options of ``bench``."""

    train: Annotated[bool, Option("Measure training steps instead of forward passes.")] = False
    modes: Annotated[
        Sequence[str],
        BeforeValidator(split_commas),
        AfterValidator(parse_modes),
        Option("Modes to compare; also converted+compile.", commas=True, accepts="str | Sequence[str]"),
    ] = DEFAULT_MODES
    sizes: Annotated[
        Sequence[int],
        BeforeValidator(_read_sizes),
        AfterValidator(_check_sizes),
        Option(
            "Batch sizes.  [default: the model file's]",
            metavar="N[,N]",
            flags=("--batch-size",),
            commas=True,
            accepts="str | Sequence[int]",
        ),
    ] = ()
    target: Annotated[
        InstanceOf[Device] | None,
        BeforeValidator(lambda value: device_named(value) if isinstance(value, str) else value),
        Option(
            "Device to estimate the time for; ampaudit devices lists them.",
            metavar="DEVICE",
            flags=("--for",),
            accepts="str | Device | None",
        ),
    ] = None
    max_batch: Annotated[bool, Option("Search for the largest batch (on a CPU only with --for).")] = False
    repeats: Annotated[int, Ge(1), Option("Timed steps of each mode.")] = 10
    policy: Annotated[Rules, Option("Policy of the converted modes: a name or a rule file.")] = "ampaudit"
    dtype: DtypeName = "float16"
    device: DeviceName = "auto"
    seed: Seed = 0
    loss: Annotated[
        UserFunction | None,
        python_only("Loss function, called as loss(output) or loss(output, batch); for train."),
    ] = None

    def check(self) -> None:
        """Check that this machine has the device."""
        check_device(self.device)
