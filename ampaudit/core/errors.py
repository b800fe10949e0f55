"""Defines every error that users can see, with its exit code and a hint.

::

    AuditError
      UsageError        2  an option that cannot be honoured
      SourceError       2  the model file, import path, directory or archive; or an error of the model
      InputError        2  example inputs that do not fit the model
      WeightsError      2  a checkpoint that is corrupt, hostile or does not match
      PolicyError       2  a rule file or policy name
      OutputError       2  a file that cannot be written
      CouldNotAudit     3  the audit itself could not be carried out
        TraceFailed     3  torch.export refused the model
        RunFailed       3  the run broke (out of memory, an op without a kernel)
        ReferenceBroken 3  the FP32 model itself is not finite
        ProofBroken     3  a run contradicts a proof: a defect of ampaudit
      RankLost          3  another process of the audit has ended, failed or hung
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's text, or the name of its type."""
    lines = (line.strip() for line in text_of(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)


def text_of(error: BaseException) -> str:
    """Return an error's text; empty if its ``__str__`` raises."""
    try:
        return str(error)
    except Exception:
        return ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean 'x'? `` with the most similar known name; empty if none is similar.

    Case does not matter. The shortest known name that begins with ``name`` comes first.
    """
    folded = {each.casefold(): each for each in known}
    completions = [each for each in folded if name and each.startswith(name.casefold())]
    near = difflib.get_close_matches(name.casefold(), folded, n=1)
    if completions:
        near = [min(completions, key=len)]
    return f"did you mean {folded[near[0]]!r}? " if near else ""


class AuditError(Exception):
    """An error whose message says what failed and where, and whose hint says what to do next."""

    exit_code = 2
    default_hint = "see 'ampaudit --help'"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint or self.default_hint

    def __str__(self) -> str:
        return f"{self.args[0]}\n  next: {self.hint}"

    def add_place(self, place: str) -> None:
        """Add a place to the message, unless it already names that place."""
        if place not in str(self.args[0]):
            self.args = (f"{self.args[0]} (in {place})", *self.args[1:])


class UsageError(AuditError):
    """Raised for an invalid option or argument."""


class SourceError(AuditError):
    """Raised if the model cannot be loaded, or fails by itself."""

    default_hint = (
        "the model file needs get_model() and example_inputs(); see docs/scanning.md, 'Model files'"
    )


class InputError(AuditError):
    """Raised if the example inputs do not fit the model."""

    default_hint = "make example_inputs() return a tensor, a tuple, or a dict of keyword arguments"


class WeightsError(AuditError):
    """Raised if a checkpoint is corrupt, would run code, or does not match the model."""

    default_hint = "pass a safetensors file, or a .pt file that holds a plain state_dict"


class PolicyError(AuditError):
    """Raised for an unknown policy name or an invalid rule file."""

    default_hint = "name a policy that 'ampaudit rules list' lists, or the path of a rule file"


class OutputError(AuditError):
    """Raised if an output cannot be written; no partial file is left behind."""

    default_hint = "choose another path, or free some space"


class CouldNotAudit(AuditError):
    """Raised if the input is valid but the audit cannot be carried out."""

    exit_code = 3
    default_hint = "run again with --debug for the full traceback"


class TraceFailed(CouldNotAudit):
    """Raised if ``torch.export`` cannot turn the model into a graph."""


class RunFailed(CouldNotAudit):
    """Raised if the traced model cannot be run."""


class ReferenceBroken(CouldNotAudit):
    """Raised if the FP32 model itself produces NaN or infinity, so that there is no reference."""

    default_hint = "repair the FP32 model or its inputs first; ampaudit compares 16 bits with FP32"


class ProofBroken(CouldNotAudit):
    """Raised if a run computes a value that a proof excludes, which is a defect of ampaudit."""


class RankLost(AuditError):
    """Raised if another process of the same audit has ended, failed or hung, so that there is no report."""

    exit_code = 3
