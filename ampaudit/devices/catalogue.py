"""Reads the catalogue of devices (``catalogue.yaml``): rates, memory and advice, each with its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml
from pydantic import TypeAdapter

from ampaudit.core.errors import UsageError, did_you_mean

__all__ = ["Device", "Rates", "all_devices", "device_named", "nearest_device"]

_FILE = Path(__file__).with_name("catalogue.yaml")


@dataclass(frozen=True, slots=True)
class Rates:
    """TFLOPS of matrix products on tensor cores, dense, float32 accumulation; null where there are none."""

    fp16: float | None
    bf16: float | None
    tf32: float | None
    fp8: float | None


@dataclass(frozen=True, slots=True)
class Device:
    """One device, standing for its generation.

    Attributes:
        id: as ``--for`` takes it.
        match: regular expressions for the names that torch gives such devices.
        name: the maker's.
        generation: architecture.
        capability: CUDA compute capability.
        year: of its first sale.
        memory_gb: gigabytes (10^9 bytes).
        bandwidth_gbs: of memory, 10^9 bytes a second.
        fp32: TFLOPS of ordinary float32 arithmetic.
        fp16: the same in float16, without tensor cores.
        bf16: the same in bfloat16.
        tensor: with tensor or matrix cores.
        advice: what follows for mixed precision.
        sources: where the numbers are from.
    """

    id: str
    match: tuple[str, ...]
    name: str
    generation: str
    capability: tuple[int, int] | None
    year: int | None
    memory_gb: float | None
    bandwidth_gbs: float | None
    fp32: float | None
    fp16: float | None
    bf16: float | None
    tensor: Rates
    advice: str
    sources: tuple[str, ...]

    @property
    def has_tensor_cores(self) -> bool:
        """Whether matrix products are faster in some format."""
        return self.tensor.fp16 is not None or self.tensor.bf16 is not None

    def rate(self, precision: str, *, product: bool) -> float | None:
        """Return TFLOPS in ``float32``, ``tf32``, ``float16`` or ``bfloat16``, for products or other ops.

        A format without its own arithmetic is computed in float32.
        """
        ordinary = {"float32": self.fp32, "tf32": self.fp32, "float16": self.fp16, "bfloat16": self.bf16}
        tensor = {"float16": self.tensor.fp16, "bfloat16": self.tensor.bf16, "tf32": self.tensor.tf32}
        fast = tensor.get(precision) if product else None
        return fast or ordinary[precision] or self.fp32


@cache
def all_devices() -> Mapping[str, Device]:
    """Read every device by id, oldest generation first, as in the file."""
    rows = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    devices = TypeAdapter(list[Device]).validate_python(rows)
    return {device.id: device for device in devices}


def device_named(name: str) -> Device:
    """Return the device with a given id or a matching name.

    Raises:
        UsageError: none does.
    """
    known = all_devices()
    short = re.sub(r"[\s_-]+", "", name.lower())
    if short in known:
        return known[short]
    device = nearest_device(name, None)
    if device is not None:
        return device
    hint = f"{did_you_mean(short, known)}one of: {', '.join(known)}"
    raise UsageError(f"unknown device {name!r}", hint=hint)


def nearest_device(name: str, capability: tuple[int, int] | None) -> Device | None:
    """Return the entry for a device that torch reports: by name, else the first of its compute capability."""
    for device in all_devices().values():
        if any(re.search(pattern, name, re.IGNORECASE) for pattern in device.match):
            return device
    same = (d for d in all_devices().values() if capability is not None and d.capability == capability)
    return next(same, None)
