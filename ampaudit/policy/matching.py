"""Matches rules against the facts about an op."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from ampaudit.core.formats import format_named
from ampaudit.policy.schema import UNSET, EvidenceCondition, Match, NumericCondition, Rule, When

__all__ = [
    "Measurement",
    "OpFacts",
    "TargetEnvironment",
    "applies",
    "class_names",
    "compiled",
    "fits_environment",
    "matches_any",
    "matches_class",
    "with_attributes",
]


_MISSING = object()


def applies(rule: Rule, facts: OpFacts, near: Collection[str]) -> bool:
    """Return whether a rule that names this op applies, given its other conditions."""
    when = rule.when
    if when.dtype and facts.dtype not in when.dtype:
        return False
    if (when.producer and "producer" not in near) or (when.consumer and "consumer" not in near):
        return False
    if not _matches(rule.match, facts):
        return False
    if not all(test.holds(facts.arguments.get(name, UNSET)) for name, test in when.arguments.items()):
        return False
    if when.depth is not None and (facts.depth is None or not when.depth.holds(facts.depth)):
        return False
    return when.evidence is None or _measured(when.evidence, facts.measurement, facts.dtype)


def fits_environment(when: When, environment: TargetEnvironment) -> bool:
    """Return whether an environment meets a rule's conditions; an unknown device or version does not."""
    if when.capability is not None and (
        environment.capability is None or not when.capability.holds(environment.capability)
    ):
        return False
    if not when.versions:
        return True
    from packaging.specifiers import SpecifierSet

    return all(
        name in environment.versions
        and SpecifierSet(specifier).contains(environment.versions[name], prereleases=True)
        for name, specifier in when.versions.items()
    )


def _matches(match: Match, facts: OpFacts) -> bool:
    return (
        (not match.layer or matches_any(match.layer, facts.layer))
        and (not match.layer_regex or any(compiled(p).search(facts.layer) for p in match.layer_regex))
        and (not match.module or matches_class(match.module, facts.classes))
        and (not match.attributes or with_attributes(facts.module, match.attributes))
        and (not match.parameter or any(matches_any(match.parameter, name) for name in facts.parameters))
        and (not match.site or matches_any(match.site, facts.site))
    )


def matches_any(globs: Collection[str], text: str) -> bool:
    """Return whether one of the globs matches the whole text."""
    return any(fnmatchcase(text, glob) for glob in globs)


def matches_class(names: Collection[str], classes: Collection[str]) -> bool:
    """Return whether one of the qualified class names is listed, with or without its module."""
    return any(name in names or name.rpartition(".")[2] in names for name in classes)


def class_names(kind: type) -> tuple[str, ...]:
    """Return the qualified names of a class and its bases, most derived first."""
    return tuple(f"{c.__module__}.{c.__qualname__}" for c in kind.__mro__ if c is not object)


def with_attributes(module: Any, attributes: Mapping[str, Any]) -> bool:
    """Return whether a module has all these attribute values."""
    return module is not None and all(
        getattr(module, name, _MISSING) == value for name, value in attributes.items()
    )


def _measured(condition: EvidenceCondition, measurement: Measurement | None, dtype: str) -> bool:
    if measurement is None or (condition.mask is not None and condition.mask is not measurement.mask):
        return False
    headroom = None
    if measurement.output_peak is not None:
        limit = format_named(dtype).max
        headroom = math.log2(limit / measurement.output_peak) if measurement.output_peak > 0 else math.inf
    pairs: tuple[tuple[NumericCondition | None, float | None], ...] = (
        (condition.weight_peak, measurement.weight_peak),
        (condition.input_peak, measurement.input_peak),
        (condition.output_peak, measurement.output_peak),
        (condition.consumer_peak, measurement.consumer_peak),
        (condition.headroom_bits, headroom),
    )
    return all(bound is None or (value is not None and bound.holds(value)) for bound, value in pairs)


@cache
def compiled(pattern: str) -> Any:
    """Compile a pattern with RE2, which matches in linear time.

    Raises:
        ValueError: RE2 rejects the pattern; it lacks back-references and look-around.
    """
    import re2

    options = re2.Options()
    options.log_errors = False  # RE2 would write them to file descriptor 2, truncated within a character
    try:
        compile_pattern: Callable[..., Any] = re2.compile
        return compile_pattern(pattern, options)
    except re2.error as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Measurement:
    """Largest finite magnitudes at one op in an FP32 run; ``None`` without a finite value.

    Attributes:
        weight_peak: Peak of its parameters and buffers.
        input_peak: Peak of its other inputs.
        output_peak: Peak of its output.
        consumer_peak: Peak of the outputs of the ops that use its output.
        mask: Whether an input or the output contains an attention mask, large by design.
    """

    weight_peak: float | None = None
    input_peak: float | None = None
    output_peak: float | None = None
    consumer_peak: float | None = None
    mask: bool = False

    def joined(self, other: Measurement) -> Measurement:
        """Combine two runs: the larger peaks, and a mask if either has one."""
        peaks = {
            name: max((p for p in (getattr(self, name), getattr(other, name)) if p is not None), default=None)
            for name in ("weight_peak", "input_peak", "output_peak", "consumer_peak")
        }
        return Measurement(**peaks, mask=self.mask or other.mask)


@dataclass(frozen=True, slots=True)
class TargetEnvironment:
    """The environment that the converted model will run in.

    Attributes:
        capability: CUDA compute capability, such as 9.0; ``None`` without CUDA.
        versions: Versions of ``torch`` and ``cuda``.
    """

    capability: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpFacts:
    """The facts about an op.

    Attributes:
        op: ATen name, such as ``softmax.int``.
        layer: Path of the module whose forward calls it.
        dtype: 16-bit format of the run.
        site: Site id in reports.
        classes: Qualified class names of the module and its bases, most derived first.
        module: The module, for its attributes.
        parameters: Names of the parameters and buffers among its inputs.
        arguments: Scalar and list arguments by name, without those left at their default.
        depth: Number of terms summed for one element of its output.
        measurement: Measurement from the first run; ``None`` before it.
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
