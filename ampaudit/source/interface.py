"""Defines what every source returns: a model, batches of inputs, and their origin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampaudit.core.files import FileState
from ampaudit.report.model import GIVEN, InputsInfo

# keeps inputs apart from the random numbers of the weights
INPUT_SEED_OFFSET = 1_000_003


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    item: Any = None  # the user's batch, where it differs from the arguments
    name: str = ""  # in reports, such as ``call 14`` of a recording

    def title(self, number: int) -> str:
        """Return the name, or that of the batch with this index, such as ``batch 1`` for 0."""
        return self.name or f"batch {number + 1}"

    @property
    def whole(self) -> Any:
        """The batch as the user's ``loss`` and ``metric`` see it."""
        if self.item is not None:
            return self.item
        if self.kwargs and not self.args:
            return self.kwargs
        return self.args[0] if len(self.args) == 1 else self.args

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Apply a function once per tensor, so that ``item`` and the arguments still share tensors."""
        parts = self.args, self.kwargs, self.item
        args, kwargs, item = pytree.tree_map_only(torch.Tensor, cache(change), parts)
        return Batch(args, kwargs, item, self.name)


BatchFactory = Callable[[Mapping[str, int]], tuple[Batch, ...]]  # sizes by axis -> batches


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A loaded model, its inputs, and the optional functions of its file."""

    location: str  # from the command line
    kind: str  # ``python``, ``import``, ``huggingface``, ``pt2``, ``onnx``, ``converted`` or ``object``
    model: nn.Module
    batches: tuple[Batch, ...]
    sha256: str | None = None  # of the model's file or configuration
    loss: Callable[..., Any] | None = None  # (output) or (output, batch), for audits of gradients
    metric: Callable[..., Any] | None = None  # (output, batch), for ``ampaudit check``; larger is better
    optimizer: Callable[..., Any] | None = None  # (params), for ``ampaudit train``
    release: Callable[[torch.Tensor], None] | None = None  # frees a streamed weight until its next use
    dtype: str | None = None  # 16-bit format of a converted directory, or of a graph that contains its casts
    files: tuple[FileState, ...] = ()  # of the model, before they were read
    inputs: InputsInfo = GIVEN  # origin of the batches
    notes: tuple[str, ...] = ()  # changes made to the model before the audit
    next_inputs: Any = None  # (outputs, inputs) or a scheduler, for audits of several steps
    make_batches: BatchFactory | None = None  # makes batches of other sizes; None if the sizes are fixed
    reference: ModelSource | None = None  # of the reference outputs, if not the model itself
    places: tuple[int, ...] = ()  # position of each input among those of the reference

    @property
    def names_files(self) -> bool:
        """Whether source lines come from the model's file; the files that they name are not opened."""
        return self.kind in ("pt2", "converted", "onnx")
