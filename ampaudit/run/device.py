"""Selects the device to run on, and describes it to policies."""

from __future__ import annotations

from typing import Any

import torch

from ampaudit.core.errors import UsageError
from ampaudit.policy import TargetEnvironment

__all__ = [
    "available_devices",
    "environment_of",
    "generators_of",
    "pick_device",
    "random_state",
    "restore_random_state",
]


_ACCELERATORS = ("cuda", "mps", "xpu")


def pick_device(name: str, *, audits: bool = False) -> torch.device:
    """Return the device for ``auto``, ``cpu``, or an accelerator such as ``cuda``, ``cuda:1`` or ``mps``.

    Args:
        name: Value of ``--device``.
        audits: Whether values are measured on the device, in float64.

    Raises:
        UsageError: the device is not available here, or lacks float64.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type != "cpu" and (device.index or 0) >= _count(device.type):
        hint = f"available: {', '.join(available_devices())}"
        raise UsageError(f"--device {name} is not available here", hint=hint)
    if audits and device.type == "mps":
        raise UsageError(
            "--device mps has no float64, in which an audit measures",
            hint="use --device cpu: it emulates the same 16-bit formats",
        )
    return device


def available_devices() -> list[str]:
    """List the devices of this machine as values of ``--device``."""
    devices = ["cpu"]
    for kind in _ACCELERATORS:
        count = _count(kind)
        devices += [kind] if count == 1 else [f"{kind}:{number}" for number in range(count)]
    return devices


def _count(kind: str) -> int:
    """Count the usable devices of a kind."""
    backend = torch.get_device_module(kind)
    return int(backend.device_count()) if backend.is_available() else 0


def generators_of(device: torch.device) -> dict[str, Any]:
    """Return arguments for ``torch.random.fork_rng`` to also restore a device's generator."""
    if device.type == "cpu":
        return {"devices": []}
    return {"devices": [device.index or 0], "device_type": device.type}


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of a device's random generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    module = torch.get_device_module(device)
    state: torch.Tensor = module.get_rng_state(*_index(device))
    return state


def restore_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Restore the state of a device's random generator."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, *_index(device))


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # there is only one, and its functions do not take it


def environment_of(device: torch.device) -> TargetEnvironment:
    """Return the compute capability (on CUDA only) and versions that rules depend on."""
    versions = {"torch": torch.__version__.partition("+")[0]}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    if device.type != "cuda":
        return TargetEnvironment(None, versions)
    major, minor = torch.cuda.get_device_capability(device)
    return TargetEnvironment(major + minor / 10, versions)
