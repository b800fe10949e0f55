"""Defines the facts that rules depend on: an op, its measurement, and the target environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Measurement", "OpFacts", "TargetEnvironment"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Peaks at one op: largest finite magnitudes of an FP32 run, ``None`` if there were none.

    Attributes:
        weight_peak: peak of its parameters and buffers.
        input_peak: peak of its other inputs.
        output_peak: peak of its output.
        consumer_peak: peak of the outputs of the ops that use its output.
        mask: whether an input or the output contains an attention mask, large by design.
    """

    weight_peak: float | None = None
    input_peak: float | None = None
    output_peak: float | None = None
    consumer_peak: float | None = None
    mask: bool = False

    def joined(self, other: Measurement) -> Measurement:
        """Join the measurements of two runs: the larger peaks, and a mask if either has one."""
        peaks = {
            name: max((p for p in (getattr(self, name), getattr(other, name)) if p is not None), default=None)
            for name in ("weight_peak", "input_peak", "output_peak", "consumer_peak")
        }
        return Measurement(**peaks, mask=self.mask or other.mask)


@dataclass(frozen=True, slots=True)
class TargetEnvironment:
    """The environment of the converted model; ``capability`` is CUDA's, such as 9.0, or ``None``."""

    capability: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpFacts:
    """The facts about an op.

    Attributes:
        op: the ATen name, such as ``softmax.int``.
        layer: path of the module whose forward calls it.
        dtype: the 16-bit format of the run.
        site: the op's id in reports.
        classes: qualified class names of the layer's module and its bases, most derived first.
        module: the module itself, for its attributes.
        parameters: names of the parameters and buffers among its inputs.
        arguments: scalar and list arguments by name; those left at their default are absent.
        depth: how many terms it adds up for one element of its output.
        measurement: its measurement, after the first run.
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
