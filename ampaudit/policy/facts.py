"""What a rule may look at: an op, what was measured there, and where the model will run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Measurement", "OpFacts", "TargetEnvironment"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a run saw at one op, largest absolute finite values in FP32; ``None`` where it saw nothing.

    Attributes:
        weight_peak: of the parameters and buffers that it takes.
        input_peak: of its other inputs.
        output_peak: of its output.
        consumer_peak: of the outputs of the ops that use its output.
        mask: whether an input or the output is, or holds, an attention mask, large by design.
    """

    weight_peak: float | None = None
    input_peak: float | None = None
    output_peak: float | None = None
    consumer_peak: float | None = None
    mask: bool = False

    def joined(self, other: Measurement) -> Measurement:
        """What both runs saw together: the larger peaks, and a mask if either saw one."""
        peaks = {
            name: max((p for p in (getattr(self, name), getattr(other, name)) if p is not None), default=None)
            for name in ("weight_peak", "input_peak", "output_peak", "consumer_peak")
        }
        return Measurement(**peaks, mask=self.mask or other.mask)


@dataclass(frozen=True, slots=True)
class TargetEnvironment:
    """Where the converted model will run. ``capability`` is CUDA's, such as 9.0; ``None`` without a GPU."""

    capability: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Everything that a rule may look at.

    Attributes:
        op: the ATen name, such as ``softmax.int``.
        layer: path of the module whose forward calls it.
        dtype: the 16-bit format of the run.
        site: its id in reports.
        classes: qualified class names of the layer's module and its bases, most derived first.
        module: the module itself, to read attributes from; ``None`` where there is none.
        parameters: names of the parameters and buffers that it takes directly.
        arguments: scalar and list arguments by name; those left at their default are absent.
        depth: terms that are summed for one element of its output.
        measurement: what a run saw, in the second phase.
    """

    op: str
    layer: str
    dtype: str
    site: str = ""
    classes: tuple[str, ...] = ()
    module: Any = None
    parameters: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    depth: int | None = None
    measurement: Measurement | None = None
