"""Loads the loss-scale profiles of systems that train in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from ampaudit.core.errors import PolicyError, did_you_mean
from ampaudit.core.formats import BFLOAT16, NumberFormat
from ampaudit.core.untrusted import describe
from ampaudit.policy.schema import LossScale, StrictModel
from ampaudit.policy.yamlfile import read_yaml

__all__ = [
    "LossScaleProfile",
    "StartingScale",
    "loss_scale_for",
    "policy_names",
    "profile",
    "profiles",
    "rules_directory",
    "starting_scale",
]


class LossScaleProfile(StrictModel):
    """A system's loss scale, and the source of its constants."""

    title: str
    source: str
    scale: LossScale


@dataclass(frozen=True, slots=True)
class StartingScale:
    """The initial loss scale of training.

    Attributes:
        value: Factor of the loss.
        dynamic: Whether the scale is reduced when a gradient overflows.
        source: Description of what determines it.
        least: Lower limit; 0 if unlimited.
    """

    value: float
    dynamic: bool
    source: str
    least: float = 0.0


def loss_scale_for(loss_scale: str | LossScale, number_format: NumberFormat) -> tuple[LossScale, str]:
    """Return a policy's loss scale for a format, and a description of what determines it.

    In bfloat16 the loss is never scaled, as it has the range of float32.
    """
    if number_format is BFLOAT16:
        return profile("none").scale, "no loss scaling in bfloat16"
    if isinstance(loss_scale, LossScale):
        return loss_scale, "the policy"
    shipped = profile(loss_scale)
    return shipped.scale, shipped.title


def starting_scale(loss_scale: str | LossScale, number_format: NumberFormat) -> StartingScale:
    """Return the initial loss scale of a policy."""
    scale, source = loss_scale_for(loss_scale, number_format)
    return StartingScale(scale.start, scale.kind == "dynamic", source, scale.min or 0.0)


@cache
def profiles() -> dict[str, LossScaleProfile]:
    """Return every shipped profile by name.

    Raises:
        PolicyError: The shipped file is damaged.
    """
    document = read_yaml(rules_directory() / "profiles" / "loss-scale.yaml")
    try:
        return {name: LossScaleProfile.model_validate(data) for name, data in document.data.items()}
    except ValidationError as error:
        raise PolicyError(f"{document.path}: {error.errors(include_url=False)[0]['msg']}") from error


def profile(name: str, where: str = "") -> LossScaleProfile:
    """Return a profile by name; ``where`` is the position of the name in a file, for the error.

    Raises:
        PolicyError: The name is unknown.
    """
    name = str(name)
    if name in profiles():
        return profiles()[name]
    suggestion = did_you_mean(name, profiles())
    prefix = f"{where}: " if where else ""
    raise PolicyError(
        f"{prefix}unknown loss-scale profile {describe(name)!r}",
        hint=f"{suggestion}one of: {', '.join(profiles())}",
    )


@cache
def rules_directory() -> Path:
    """Return the directory of the shipped rule files, in the wheel or beside the package.

    Raises:
        PolicyError: The installation is broken.
    """
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "_rules", package.parent / "rules"):
        if (candidate / "torch-cuda.yaml").is_file():
            return candidate
    raise PolicyError("the shipped rule files are missing", hint="install ampaudit again")


def policy_names() -> list[str]:
    """Return the names of the shipped policies, sorted."""
    return sorted(path.stem for path in rules_directory().glob("*.yaml"))
