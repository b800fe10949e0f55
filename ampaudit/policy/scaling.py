"""Loss-scale profiles of the systems that train in 16 bits."""

from __future__ import annotations

from functools import cache

from pydantic import BaseModel, ConfigDict, ValidationError

from ampaudit.errors import PolicyError, did_you_mean
from ampaudit.policy.places import rules_directory
from ampaudit.policy.schema import LossScale
from ampaudit.policy.yamlfile import read_yaml

__all__ = ["LossScaleProfile", "profile", "profiles"]


class LossScaleProfile(BaseModel):
    """A system's loss scale, and where its numbers come from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    source: str
    scale: LossScale


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
