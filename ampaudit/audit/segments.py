"""Decides whether all batches run through one segment of the model at a time, and within which memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import psutil
import torch

from ampaudit.audit.config import ScanConfig
from ampaudit.core.errors import UsageError
from ampaudit.core.text import parse_size
from ampaudit.run.config import RunConfig
from ampaudit.run.share import ALONE
from ampaudit.source import ModelSource

__all__ = ["by_segment", "usual_memory"]

_WHOLE = ("static", "backward", "steps", "sensitivity", "against")
_OF_HOST = 0.5  # of what is free; the rest is for others, and for what the run itself needs
_OF_DEVICE = 0.8


def by_segment(plans: Sequence[RunConfig], source: ModelSource, config: ScanConfig) -> list[RunConfig]:
    """Set the memory of runs by segment: where it is asked for, and where several batches stream weights.

    Raises:
        UsageError: a pipeline is asked for with an option that needs the whole model.
    """
    memory = parse_size(config.memory) if config.memory else None
    whole = next((option for option in _WHOLE if getattr(config, option)), "")
    share = config.share or ALONE
    if share.route.stages() > 1 and whole:
        raise UsageError(
            f"--pipeline cannot be combined with --{whole}, which needs the whole model",
            hint=f"leave out --{whole}",
        )
    streams = source.release is not None and len(source.batches) > 1
    if memory is None and not whole and (streams or share.route.stages() > 1):
        memory = usual_memory(plans[0].device)
    return [replace(plan, memory=memory) for plan in plans]


def usual_memory(device: torch.device) -> int:
    """Return how many bytes a run may take where nothing else is said: a share of what is free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _OF_DEVICE)
    return int(psutil.virtual_memory().available * _OF_HOST)
