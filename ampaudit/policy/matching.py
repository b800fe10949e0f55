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
    """Return whether the other conditions of a rule that names this op hold."""
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
    """Return whether a rule's device and versions match an environment; unknown ones do not."""
    if when.capability is not None and (
        environment.capability is None or not when.capability.holds(environment.capability)
    ):
        return False
    if not when.versions:
        return True
    from packaging.specifiers import SpecifierSet

    return all(
        name in environment.versions
        and SpecifierSet(wanted).contains(environment.versions[name], prereleases=True)
        for name, wanted in when.versions.items()
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


def matches_class(wanted: Collection[str], classes: Collection[str]) -> bool:
    """Return whether a module's class or a base has one of the names, bare or qualified."""
    return any(name in wanted or name.rpartition(".")[2] in wanted for name in classes)


def class_names(kind: type) -> tuple[str, ...]:
    """Return the qualified names of a class and its bases, most derived first."""
    return tuple(f"{c.__module__}.{c.__qualname__}" for c in kind.__mro__ if c is not object)


def with_attributes(module: Any, attributes: Mapping[str, Any]) -> bool:
    """Return whether a module has all of these attributes with these values."""
    return module is not None and all(
        getattr(module, name, _MISSING) == value for name, value in attributes.items()
    )


def _measured(wanted: EvidenceCondition, seen: Measurement | None, dtype: str) -> bool:
    if seen is None or (wanted.mask is not None and wanted.mask is not seen.mask):
        return False
    headroom = None
    if seen.output_peak is not None:
        limit = format_named(dtype).max
        headroom = math.log2(limit / seen.output_peak) if seen.output_peak > 0 else math.inf
    pairs: tuple[tuple[NumericCondition | None, float | None], ...] = (
        (wanted.weight_peak, seen.weight_peak),
        (wanted.input_peak, seen.input_peak),
        (wanted.output_peak, seen.output_peak),
        (wanted.consumer_peak, seen.consumer_peak),
        (wanted.headroom_bits, headroom),
    )
    return all(bound is None or (value is not None and bound.holds(value)) for bound, value in pairs)


@cache
def compiled(pattern: str) -> Any:
    """Compile a pattern with RE2, which matches in linear time.

    Raises:
        ValueError: not a pattern of RE2, which lacks back-references and look-around.
    """
    import re2

    options = re2.Options()
    options.log_errors = False  # RE2 writes them to file descriptor 2, cut inside a character
    try:
        compile_pattern: Callable[..., Any] = re2.compile
        return compile_pattern(pattern, options)
    except re2.error as error:
        raise ValueError(str(error)) from error


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
