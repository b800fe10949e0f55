"""Describes this machine as torch sees it."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Group, RenderableType
from rich.text import Text

from ampaudit.core.text import escape_control, format_bytes
from ampaudit.devices.catalogue import Device, all_devices, generations, nearest_device
from ampaudit.render.grid import hanging, open_table

_CPUINFO = Path("/proc/cpuinfo")
# descriptions of the flags in /proc/cpuinfo for 16-bit arithmetic
_FLAGS = {
    "amx_tile": "AMX",
    "amx_bf16": "AMX bfloat16",
    "amx_fp16": "AMX float16",
    "avx512_fp16": "AVX512 float16",
    "avx512_bf16": "AVX512 bfloat16",
    "avx_ne_convert": "AVX conversions of 16-bit floats",
    "f16c": "conversions of float16",
    "fphp": "float16 arithmetic",
    "bf16": "bfloat16 arithmetic",
}


@dataclass(frozen=True, slots=True)
class HostDevice:
    """One device of this machine."""

    kind: str  # cuda, mps or cpu
    name: str  # by torch or the system
    memory_bytes: int | None
    facts: tuple[str, ...]  # capabilities, as text
    entry: str | None  # catalogue id of the device or of its generation; None if neither is listed


@dataclass(frozen=True, slots=True)
class Host:
    """The devices of this machine, and torch's switches that affect results in float32 and 16 bits."""

    torch: str
    devices: tuple[HostDevice, ...]
    switches: dict[str, str]


@dataclass(frozen=True, slots=True)
class Devices:
    """The document of ``ampaudit devices``."""

    schema: Literal[1]
    machine: Host
    catalogue: tuple[Device, ...]


def this_machine() -> Host:
    """Describe all devices that torch can use."""
    import torch

    cuda = [_cuda(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    mps = torch.backends.mps.is_available()
    other = [HostDevice("mps", "Apple GPU", None, ("float16 and bfloat16 storage",), "m2")] if mps else []
    return Host(torch.__version__, (*cuda, *other, _cpu()), _switches())


def _cuda(index: int) -> HostDevice:
    import torch

    about = torch.cuda.get_device_properties(index)
    capability = (int(about.major), int(about.minor))
    device = nearest_device(about.name, None if torch.version.hip else capability)
    entry = None
    if device is not None:
        entry = device.id if device.id in all_devices() else device.like
    system = "ROCm" if torch.version.hip else f"compute capability {capability[0]}.{capability[1]}"
    facts = (
        system,
        f"{about.multi_processor_count} multiprocessors",
        "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bfloat16",
    )
    return HostDevice("cuda", about.name, int(about.total_memory), facts, entry)


def _cpu() -> HostDevice:
    import psutil
    import torch

    flags = cpu_flags()
    facts = tuple(text for flag, text in _FLAGS.items() if flag in flags)
    entry = "spr" if "amx_tile" in flags else "zen4" if "avx512_bf16" in flags else "cpu"
    name = _read_field(_CPUINFO, "model name") or platform.processor() or platform.machine()
    capability = torch.backends.cpu.get_cpu_capability()
    return HostDevice(
        "cpu", name, int(psutil.virtual_memory().total), (f"torch uses {capability}", *facts), entry
    )


def cpu_flags(path: Path = _CPUINFO) -> frozenset[str]:
    """Return the CPU flags that Linux lists; empty on other systems."""
    return frozenset(_read_field(path, "flags", "features").split())


def _read_field(path: Path, *labels: str) -> str:
    """Return the first value with one of these labels in a system file; empty if it is missing."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    values = (line.partition(":")[2].strip() for line in lines if line.lower().startswith(labels))
    return next(values, "")


def _switches() -> dict[str, str]:
    """Describe torch's switches without setting any."""
    import torch

    matmul = torch.backends.cuda.matmul
    reduced = "partial sums of a split product may be added in 16 bits"
    meaning = {
        "allow_tf32": "float32 products may keep 10 bits of each factor",
        "allow_fp16_reduced_precision_reduction": reduced,
        "allow_bf16_reduced_precision_reduction": reduced,
    }
    switches = {
        f"torch.backends.cuda.matmul.{name}": f"{getattr(matmul, name, 'unknown')}: {text}"
        for name, text in meaning.items()
    }
    switches["torch.backends.cudnn.allow_tf32"] = (
        f"{torch.backends.cudnn.allow_tf32}: the same for convolutions"
    )
    switches["torch.get_float32_matmul_precision()"] = torch.get_float32_matmul_precision()
    return switches


def render_machine(machine: Host) -> RenderableType:
    """Render this machine with advice for each device, and torch's switches."""
    parts: list[RenderableType] = [Text("This machine", "bold")]
    devices = all_devices()
    for host_device in machine.devices:
        parts += [Text(), _headline(host_device)]
        if host_device.entry is not None:
            device = devices[host_device.entry]
            rows = [("kind", device.generation), ("advice", device.advice)]
            parts.append(hanging((Text(f"  {label}", "dim"), Text(text)) for label, text in rows))
    parts += [Text(), Text(f"Settings of torch {escape_control(machine.torch)}", "bold")]
    parts += [
        Text.assemble((f"  {name}\n", "dim"), f"    {value}") for name, value in machine.switches.items()
    ]
    return Group(*parts)


def _headline(device: HostDevice) -> Text:
    memory = f", {format_bytes(device.memory_bytes)}" if device.memory_bytes else ""
    return Text.assemble(
        (escape_control(device.name), "bold"), f" ({device.kind}{memory}): {', '.join(device.facts)}"
    )


def render_catalogue() -> RenderableType:
    """Render a table of the generations with rates in TFLOPS, and the ids of the other devices."""
    heads = ("fp32", "tf32", "fp16", "fp16 tensor", "bf16 tensor", "fp8")
    table = open_table("device", "generation", *heads, "GB/s", "memory", left=("generation",))
    for d in generations():
        rates = (d.fp32, d.tensor.tf32, d.fp16, d.tensor.fp16, d.tensor.bf16, d.tensor.fp8, d.bandwidth_gbs)
        memory = f"{d.memory_gb:g} GB" if d.memory_gb else ""
        table.add_row(d.id, d.generation, *map(_rate, rates), memory)
    others = ", ".join(device.id for device in all_devices().values() if device.like)
    return Group(
        Text("What each generation can do: dense TFLOPS, products with float32 accumulation", "bold"),
        table,
        Text.assemble(("Also listed  ", "bold"), others),
        Text("ampaudit devices NAME: one device, with advice and sources", "dim"),
    )


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"


def render_device(device: Device) -> RenderableType:
    """Render the details of one device."""
    tensor = device.tensor
    rates = {
        "float32": device.fp32,
        "TF32 products": tensor.tf32,
        "float16": device.fp16,
        "float16 products": tensor.fp16,
        "bfloat16": device.bf16,
        "bfloat16 products": tensor.bf16,
        "float8 products": tensor.fp8,
    }
    rows = [(name, f"{_rate(value)} TFLOPS") for name, value in rates.items() if value is not None]
    if device.bandwidth_gbs:
        memory = f"{device.memory_gb:g} GB, " if device.memory_gb else ""
        rows.append(("memory", f"{memory}{device.bandwidth_gbs:,g} GB/s"))
    if device.tensor.fp16 is None and device.capability is not None:
        rows.append(("tensor cores", device.products))
    rows.append(("advice", device.advice))
    rows += [("source", source) for source in device.sources]
    since = f", {device.year}" if device.year else ""
    capability = f", compute capability {'.'.join(map(str, device.capability))}" if device.capability else ""
    head = Text.assemble((device.name, "bold"), f"  {device.generation}{capability}{since}")
    return Group(head, hanging((Text(f"  {label}", "dim"), Text(text)) for label, text in rows))
