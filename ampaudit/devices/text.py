"""Renders the catalogue and this machine for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ampaudit.core.text import escape_control, format_bytes
from ampaudit.devices.catalogue import Device, all_devices, generations
from ampaudit.devices.host import Host, HostDevice
from ampaudit.render.grid import hanging, open_table

__all__ = ["render_catalogue", "render_device", "render_machine"]


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
    parts += [Text(), Text(f"Switches of torch {escape_control(machine.torch)}", "bold")]
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
    others = ", ".join(device.id for device in all_devices().values() if device.like)
    return Group(
        Text("What each generation can do: dense TFLOPS, products with float32 accumulation", "bold"),
        _table(generations()),
        Text.assemble(("Also listed  ", "bold"), others),
        Text("ampaudit devices NAME: one device, with advice and sources", "dim"),
    )


def _table(devices: Sequence[Device]) -> Table:
    heads = ("fp32", "tf32", "fp16", "fp16 tensor", "bf16 tensor", "fp8")
    table = open_table("device", "generation", *heads, "GB/s", "memory", left=("generation",))
    for d in devices:
        rates = (d.fp32, d.tensor.tf32, d.fp16, d.tensor.fp16, d.tensor.bf16, d.tensor.fp8, d.bandwidth_gbs)
        memory = f"{d.memory_gb:g} GB" if d.memory_gb else ""
        table.add_row(d.id, d.generation, *map(_rate, rates), memory)
    return table


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
