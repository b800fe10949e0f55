"""Reads the catalogue of devices (``catalogue.yaml``): rates, memory and advice, each with its source.

An unlisted device gets the formats, compute capability and advice of its generation, but neither memory nor
rates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from ampaudit.core.errors import UsageError, did_you_mean

_FILE = Path(__file__).with_name("catalogue.yaml")
# parts of a name that do not distinguish devices
_BRANDS = re.compile(r"nvidia|geforce|tesla|amd|radeon|instinct|[\s_()/-]+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Rates:
    """Dense TFLOPS of matrix products on tensor cores with float32 accumulation; ``None`` if unsupported."""

    fp16: float | None
    bf16: float | None
    tf32: float | None
    fp8: float | None


@dataclass(frozen=True, slots=True)
class Device:
    """One device."""

    id: str  # for --for
    match: tuple[str, ...]  # regular expressions for its name in torch, without makers, brands and separators
    # regular expressions for names of other devices of the generation; only in its first entry
    family: tuple[str, ...]
    name: str  # by its maker
    generation: str  # architecture
    capability: tuple[int, int] | None  # CUDA compute capability
    year: int | None  # of release
    memory_gb: float | None  # 10^9 bytes
    bandwidth_gbs: float | None  # 10^9 bytes per second
    fp32: float | None  # TFLOPS without tensor cores, as of the other formats
    fp16: float | None
    bf16: float | None
    tensor: Rates  # TFLOPS with tensor or matrix cores
    advice: str
    sources: tuple[str, ...]  # of the numbers
    like: str = ""  # id of the entry that represents its generation; empty for that entry

    @property
    def products(self) -> str:
        """The formats of its tensor or matrix cores, as text; ``none`` without such cores."""
        rates = asdict(all_devices()[self.like or self.id].tensor)
        names = {"fp16": "float16", "bf16": "bfloat16", "tf32": "TF32", "fp8": "float8"}
        return ", ".join(text for name, text in names.items() if rates[name] is not None) or "none"

    def rate(self, precision: str, *, product: bool) -> float | None:
        """Return TFLOPS in ``float32``, ``tf32``, ``float16`` or ``bfloat16``, for products or other ops.

        A format without its own arithmetic is computed in float32.
        """
        ordinary = {"float32": self.fp32, "tf32": self.fp32, "float16": self.fp16, "bfloat16": self.bf16}
        tensor = {"float16": self.tensor.fp16, "bfloat16": self.tensor.bf16, "tf32": self.tensor.tf32}
        fast = tensor.get(precision) if product else None
        return fast or ordinary[precision] or self.fp32


@dataclass(frozen=True, slots=True)
class _Card:
    """Another device of a generation, with the fields that differ."""

    id: str
    name: str
    year: int
    memory_gb: float
    bandwidth_gbs: float
    fp32: float | None
    match: tuple[str, ...] = ()
    tensor: Rates | None = None

    def device(self, like: Device, sources: tuple[str, ...]) -> Device:
        """Return the device, with the other rates of ``like`` scaled by the float32 rates."""

        def scaled(rate: float | None) -> float | None:
            return None if rate is None or not self.fp32 or not like.fp32 else rate * self.fp32 / like.fp32

        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {"fp16": scaled(like.fp16), "bf16": scaled(like.bf16)}
        values["tensor"] = self.tensor or Rates(**{k: scaled(v) for k, v in asdict(like.tensor).items()})
        return replace(like, **values, family=(), sources=sources, like=like.id)


@dataclass(frozen=True, slots=True)
class _Cards:
    like: str
    sources: tuple[str, ...]
    cards: tuple[_Card, ...]


@dataclass(frozen=True, slots=True)
class _Catalogue:
    generations: tuple[Device, ...]
    cards: tuple[_Cards, ...]


@cache
def _read() -> _Catalogue:
    return TypeAdapter(_Catalogue).validate_python(yaml.safe_load(_FILE.read_text(encoding="utf-8")))


def generations() -> tuple[Device, ...]:
    """Return the device that represents each generation, oldest first."""
    return _read().generations


@cache
def all_devices() -> Mapping[str, Device]:
    """Return all devices by id, in the order of the file."""
    devices = {device.id: device for device in generations()}
    for group in _read().cards:
        for card in group.cards:
            devices[card.id] = card.device(devices[group.like], group.sources)
    return devices


def device_named(name: str) -> Device:
    """Return a device by id or name; an unlisted one has neither memory nor rates.

    Raises:
        UsageError: The device and its generation are unknown.
    """
    known = all_devices()
    device = nearest_device(name, None)
    if device is not None:
        return device
    hint = f"{did_you_mean(_short(name), known)}'ampaudit devices' lists all of them"
    raise UsageError(f"unknown device {name!r}", hint=hint)


def nearest_device(name: str, capability: tuple[int, int] | None) -> Device | None:
    """Return the device with a name in torch, or one of its generation by name or compute capability."""
    known, short = all_devices(), _short(name)
    for device in known.values():
        if short == _short(device.id) or any(re.fullmatch(pattern, short) for pattern in device.match):
            return device
    for device in generations():
        in_family = any(re.search(pattern, name, re.IGNORECASE) for pattern in device.family)
        if in_family or (capability is not None and device.capability == capability):
            return _unlisted(name, device)
    return None


def _short(name: str) -> str:
    return _BRANDS.sub("", name.lower())


def _unlisted(name: str, like: Device) -> Device:
    nothing: dict[str, Any] = dict.fromkeys(("year", "memory_gb", "bandwidth_gbs", "fp32", "fp16", "bf16"))
    rates = Rates(None, None, None, None)
    title = f"{name} (not listed: only what its generation implies)"
    return replace(
        like, id=_short(name), name=title, match=(), family=(), tensor=rates, like=like.id, **nothing
    )
