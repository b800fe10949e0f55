"""Defines the result of every source: a model, batches of inputs, and their origin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampaudit.core.files import FileState
from ampaudit.report.inputs import GIVEN, InputsInfo

__all__ = ["INPUT_SEED_OFFSET", "Batch", "ModelSource", "Sized"]

# inputs must differ from the random numbers of the weights
INPUT_SEED_OFFSET = 1_000_003


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of one call; ``item`` is the user's batch, if that differs from the arguments.

    ``name`` is what reports call it, such as ``call 14`` of a recording.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    item: Any = None
    name: str = ""

    def title(self, number: int) -> str:
        """Return its name, or what a batch of that number is called."""
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
        """Change each tensor once, so that ``item`` and the model's inputs still share tensors."""
        made: dict[int, torch.Tensor] = {}

        def once(value: torch.Tensor) -> torch.Tensor:
            if id(value) not in made:
                made[id(value)] = change(value)
            return made[id(value)]

        def over(value: Any) -> Any:
            return pytree.tree_map_only(torch.Tensor, once, value)

        return Batch(over(self.args), over(self.kwargs), over(self.item), self.name)


Sized = Callable[[Mapping[str, int]], tuple[Batch, ...]]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A loaded model.

    Attributes:
        location: the location that the user gave.
        kind: ``python``, ``import``, ``huggingface``, ``pt2``, ``onnx``, ``converted`` or ``object``.
        sha256: digest of the model's file or configuration.
        loss: the file's loss(output) or loss(output, batch), for audits of gradients.
        dtype: the 16-bit format of a converted directory, or of a graph that has its casts in it.
        release: frees the memory of a streamed weight until its next use.
        optimizer: the file's optimizer(params), for ``ampaudit train``.
        files: its files as they were before they were read.
        inputs: where the batches come from.
        metric: the file's metric(output, batch), larger is better, for ``ampaudit check``.
        notes: what was changed of the model before it is audited.
        next_inputs: the file's next_inputs(outputs, inputs), or its scheduler, for audits of several steps.
        sized: makes batches of other sizes, by axis; ``None`` if the inputs are what they are.
        reference: the model whose outputs are right, if it is another one.
        places: for each input, in order, the place of the reference's.
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
        """Whether its file says which source files its ops come from; these must not be opened."""
        return self.kind in ("pt2", "converted", "onnx")
