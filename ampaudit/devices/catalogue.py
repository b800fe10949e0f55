"""Reads the catalogue of devices (``catalogue.yaml``): rates, memory and advice, each with its source.

A device that is not listed gets what its generation implies: formats, compute capability and advice, and
neither memory nor rates.
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

__all__ = ["Device", "Rates", "all_devices", "device_named", "generations", "nearest_device"]

_FILE = Path(__file__).with_name("catalogue.yaml")
# words of a name that tell no devices apart
_BRANDS = re.compile(r"nvidia|geforce|tesla|amd|radeon|instinct|[\s_()/-]+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Rates:
    """TFLOPS of matrix products on tensor cores, dense, float32 accumulation; null where there are none."""

    fp16: float | None
    bf16: float | None
    tf32: float | None
    fp8: float | None


@dataclass(frozen=True, slots=True)
class Device:
    """One device.

    Attributes:
        id: as ``--for`` takes it.
        match: regular expressions for its name as torch gives it, without makers, brands and separators.
        family: regular expressions for the names of other devices of the generation; the first entry of a
            generation has them.
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
        like: id of the entry that stands for its generation; empty for that entry.
    """

    id: str
    match: tuple[str, ...]
    family: tuple[str, ...]
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
    like: str = ""

    @property
    def products(self) -> str:
        """The formats of its tensor or matrix cores, in words; ``none`` without any."""
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
    """A further device of a generation, with what it does not share with others."""

    id: str
    name: str
    year: int
    memory_gb: float
    bandwidth_gbs: float
    fp32: float | None
    match: tuple[str, ...] = ()
    tensor: Rates | None = None

    def device(self, like: Device, sources: tuple[str, ...]) -> Device:
        """Return the device, with the rates of one that it is like in proportion to its float32."""

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
    """Return the device that stands for each generation, oldest first."""
    return _read().generations


@cache
def all_devices() -> Mapping[str, Device]:
    """Return every device by id, as in the file."""
    devices = {device.id: device for device in generations()}
    for group in _read().cards:
        for card in group.cards:
            devices[card.id] = card.device(devices[group.like], group.sources)
    return devices


def device_named(name: str) -> Device:
    """Return the device with a given id or name; one that is not listed has neither memory nor rates.

    Raises:
        UsageError: not even its generation is known.
    """
    known = all_devices()
    device = nearest_device(name, None)
    if device is not None:
        return device
    hint = f"{did_you_mean(_short(name), known)}'ampaudit devices' lists all of them"
    raise UsageError(f"unknown device {name!r}", hint=hint)


def nearest_device(name: str, capability: tuple[int, int] | None) -> Device | None:
    """Return what is known of a device that torch reports, by its name or else its compute capability."""
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
