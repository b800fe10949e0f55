"""Defines what every source returns: a model, batches of inputs, and their origin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampaudit.core.files import FileState
from ampaudit.report.model import GIVEN, InputsInfo

__all__ = ["INPUT_SEED_OFFSET", "Batch", "ModelSource", "Sized"]

# keeps inputs apart from the random numbers of the weights
INPUT_SEED_OFFSET = 1_000_003


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of one call.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        item: The user's batch, where it differs from the arguments.
        name: Name in reports, such as ``call 14`` of a recording.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    item: Any = None
    name: str = ""

    def title(self, number: int) -> str:
        """Return the name, or ``batch N``."""
        return self.name or f"batch {number}"

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
        changed: dict[int, torch.Tensor] = {}

        def once(value: torch.Tensor) -> torch.Tensor:
            if id(value) not in changed:
                changed[id(value)] = change(value)
            return changed[id(value)]

        def over(value: Any) -> Any:
            return pytree.tree_map_only(torch.Tensor, once, value)

        return Batch(over(self.args), over(self.kwargs), over(self.item), self.name)


Sized = Callable[[Mapping[str, int]], tuple[Batch, ...]]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A loaded model.

    Attributes:
        location: Location from the command line.
        kind: ``python``, ``import``, ``huggingface``, ``pt2``, ``onnx``, ``converted`` or ``object``.
        sha256: Digest of the model's file or configuration.
        loss: The file's loss(output) or loss(output, batch), for audits of gradients.
        dtype: 16-bit format of a converted directory, or of a graph that contains its casts.
        release: Function that frees the memory of a streamed weight until its next use.
        optimizer: The file's optimizer(params), for ``ampaudit train``.
        files: State of the model's files before they were read.
        inputs: Origin of the batches.
        metric: The file's metric(output, batch), for ``ampaudit check``; larger is better.
        notes: Changes made to the model before the audit.
        next_inputs: The file's next_inputs(outputs, inputs) or scheduler, for audits of several steps.
        sized: Function that returns batches of other sizes, by axis; ``None`` if the sizes are fixed.
        reference: Source of the reference outputs, if not the model itself.
        places: Position of each input among those of the reference.
    """

    location: str
    kind: str
    model: nn.Module
    batches: tuple[Batch, ...]
    sha256: str | None = None
    loss: Callable[..., Any] | None = None
    metric: Callable[..., Any] | None = None
    optimizer: Callable[..., Any] | None = None
    release: Callable[[torch.Tensor], None] | None = None
    dtype: str | None = None
    files: tuple[FileState, ...] = ()
    inputs: InputsInfo = GIVEN
    notes: tuple[str, ...] = ()
    next_inputs: Any = None
    sized: Sized | None = None
    reference: ModelSource | None = None
    places: tuple[int, ...] = ()

    @property
    def names_files(self) -> bool:
        """Whether the model's file names source files, which must not be opened."""
        return self.kind in ("pt2", "converted", "onnx")
