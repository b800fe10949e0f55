"""The options of a scan, as one value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from ampaudit.audit.checks.suppress import Suppression, option
from ampaudit.report.finding import FailOn
from ampaudit.run.audit import Progress, silent
from ampaudit.run.backends import Backend
from ampaudit.run.config import KeepOutputs

__all__ = ["Loss", "ScanOptions", "Settings"]

Loss = Callable[..., Any]


class ScanOptions(TypedDict, total=False):
    """The options by name, all with a default; see ``Settings``."""

    device: str
    seed: int
    ranges: bool
    min_headroom: float
    min_sqnr: float
    fail_on: FailOn
    ignore: Sequence[str]
    prove: bool
    advise: bool
    diff: bool
    static: bool
    contract: str
    stress: int
    stress_dir: str
    backward: bool
    loss: Loss | None
    loss_scale: float | None
    assume: Sequence[str]
    progress: Progress | None
    backend: Backend | None
    keep_outputs: KeepOutputs | None


@dataclass(frozen=True, slots=True)
class Settings:
    """How to scan.

    Attributes:
        device: ``auto``, ``cpu`` or ``cuda``.
        seed: of the random numbers that the model draws.
        ranges: only run FP32 and say what each format would do to its values.
        min_headroom: bits below which a healthy site is reported as a warning.
        min_sqnr: decibels below which an output, or an op by itself, is reported as inaccurate.
        fail_on: severity from which ``report.exit_code`` is 1.
        ignore: what to hide: ``CODE``, ``CODE:layer glob`` or ``:layer glob``.
        advise: try changes for the errors, and report those that cure.
        diff: with ``advise``, give a rewrite as a unified diff of the source.
        prove: bound every site for all inputs of the stated domain, too.
        static: bound every site and run nothing.
        contract: how the target computes, as ``saturate,decomposed``; empty for the usual way.
        stress: evaluations spent on each of a few unproved sites, to find an input that overflows it.
        stress_dir: where such inputs are saved.
        backward: audit the gradients, too: of ``loss``, or of an output that is one.
        loss: ``loss(output)`` or ``loss(output, batch)``, instead of the source's own.
        loss_scale: what the loss is multiplied by, instead of the policy's scale.
        assume: ranges of inputs for the proofs: ``input[0]=-1:1``, or ``input=-1:1`` for all.
        progress: told about each batch.
        backend: overrides the device's usual backend.
        keep_outputs: told each batch's number, and by name its outputs, FP32's and the 16-bit run's.
    """

    device: str = "auto"
    seed: int = 0
    ranges: bool = False
    min_headroom: float = 1.0
    min_sqnr: float = 20.0
    fail_on: FailOn = "error"
    ignore: Sequence[str] = ()
    prove: bool = False
    advise: bool = False
    diff: bool = False
    static: bool = False
    contract: str = ""
    stress: int = 0
    stress_dir: str = "."
    backward: bool = False
    loss: Loss | None = None
    loss_scale: float | None = None
    assume: Sequence[str] = ()
    progress: Progress | None = None
    backend: Backend | None = None
    keep_outputs: KeepOutputs | None = None

    @property
    def told(self) -> Progress:
        """Who is told about progress."""
        return self.progress or silent

    @property
    def hidden(self) -> tuple[Suppression, ...]:
        """The suppressions that ``ignore`` asks for.

        Raises:
            UsageError: one of them names no check.
        """
        return tuple(map(option, self.ignore))
