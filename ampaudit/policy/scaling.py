"""Loss-scale profiles of the systems that train in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from pydantic import BaseModel, ConfigDict, ValidationError

from ampaudit.core.errors import PolicyError, did_you_mean
from ampaudit.core.formats import BFLOAT16, NumberFormat
from ampaudit.policy.paths import rules_directory
from ampaudit.policy.schema import LossScale
from ampaudit.policy.yamlfile import read_yaml

__all__ = ["LossScaleProfile", "StartingScale", "loss_scale_for", "profile", "profiles", "starting_scale"]


class LossScaleProfile(BaseModel):
    """A system's loss scale, and where its numbers come from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    source: str
    scale: LossScale


@dataclass(frozen=True, slots=True)
class StartingScale:
    """The loss scale that training starts with.

    Attributes:
        value: what the loss is multiplied by.
        dynamic: whether it is lowered when a gradient overflows.
        source: who says so, for readers.
        least: where it stops being lowered; 0 if nowhere.
    """

    value: float
    dynamic: bool
    source: str
    least: float = 0.0


def loss_scale_for(loss_scale: str | LossScale, number_format: NumberFormat) -> tuple[LossScale, str]:
    """What a policy's loss scale is for a format, and who says so.

    bfloat16 has float32's range, and no system scales the loss for it.
    """
    if number_format is BFLOAT16:
        return profile("none").scale, "no loss scaling in bfloat16"
    if isinstance(loss_scale, LossScale):
        return loss_scale, "the policy"
    known = profile(loss_scale)
    return known.scale, known.title


def starting_scale(loss_scale: str | LossScale, number_format: NumberFormat) -> StartingScale:
    """Where a policy's loss scale starts."""
    scale, source = loss_scale_for(loss_scale, number_format)
    return StartingScale(scale.start, scale.kind == "dynamic", source, scale.min or 0.0)


@cache
def profiles() -> dict[str, LossScaleProfile]:
    """Every shipped profile by name.

    Raises:
        PolicyError: the shipped file is damaged.
    """
    document = read_yaml(rules_directory() / "profiles" / "loss-scale.yaml")
    try:
        return {name: LossScaleProfile.model_validate(data) for name, data in document.data.items()}
    except ValidationError as error:
        raise PolicyError(f"{document.path}: {error.errors(include_url=False)[0]['msg']}") from error


def profile(name: str, where: str = "") -> LossScaleProfile:
    """The profile of that name.

    Raises:
        PolicyError: there is none; ``where`` says who asked.
    """
    if name in profiles():
        return profiles()[name]
    meant = did_you_mean(name, profiles())
    prefix = f"{where}: " if where else ""
    raise PolicyError(
        f"{prefix}unknown loss-scale profile {name!r}", hint=f"{meant}one of: {', '.join(profiles())}"
    )
