"""Selects the device to run on, and describes it to policies."""

from __future__ import annotations

import torch

from ampaudit.core.errors import UsageError
from ampaudit.policy import TargetEnvironment

__all__ = ["environment_of", "pick_device"]


def pick_device(name: str) -> torch.device:
    """Return the device for ``auto``, ``cuda`` or ``cpu``.

    Raises:
        UsageError: another name, or CUDA where there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this machine has no usable CUDA device", hint="use --device cpu")
    if name not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: unknown device", hint="one of: auto, cuda, cpu")
    return torch.device(name)


def environment_of(device: torch.device) -> TargetEnvironment:
    """Return the device and versions that rules depend on; without CUDA, no capability is known."""
    versions = {"torch": torch.__version__.partition("+")[0]}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    if device.type != "cuda":
        return TargetEnvironment(None, versions)
    major, minor = torch.cuda.get_device_capability(device)
    return TargetEnvironment(major + minor / 10, versions)
