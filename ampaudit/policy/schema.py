"""The shape of a rule file; unknown keys are errors."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

__all__ = ["Cast", "Match", "Reason", "Rule", "RuleFile", "Weights", "When"]

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2000)]
LowerDtype = Literal["float16", "bfloat16"]


class Cast(StrEnum):
    """What a rule does to the floating-point inputs of an op (float64, ints and bools stay)."""

    LOWER = "lower"  # cast them to the 16-bit format of the run
    FLOAT32 = "float32"  # cast them to float32
    WIDEST = "widest"  # cast them to the widest float among them
    SET_DTYPE = "set-dtype"  # leave them; set the op's dtype argument to float32 if it is unset
    APPEND_DTYPE = "append-dtype"  # leave them; call the overload that takes dtype, with float32
    FOLLOW = "follow"  # add no cast: ordinary type promotion
    FORBID = "forbid"  # refuse the op in 16 bits


class Reason(StrEnum):
    """Why an op is where it is."""

    RANGE = "range"
    PRECISION = "precision"
    NO_KERNEL = "no-kernel"
    SPEED = "speed"
    SEMANTICS = "semantics"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Match(_Strict):
    """Which ops a rule is about: every key that is given must match, any entry of a key is enough."""

    op: tuple[Text, ...] = Field(
        default=(), description="ATen names, base or base.overload; a bare base is the default overload"
    )
    layer: tuple[Text, ...] = Field(default=(), description="globs over the layer path")


class When(_Strict):
    """Circumstances under which a rule applies."""

    dtype: tuple[LowerDtype, ...] = Field(default=(), description="16-bit formats; empty means both")


class Rule(_Strict):
    """One rule: the first in order that matches an op decides."""

    id: Text
    match: Match
    when: When = When()
    cast: Cast
    reason: Reason
    why: Text = Field(description="one sentence")
    source: Text


class Weights(_Strict):
    """How the converted model keeps its parameters and floating-point buffers, and takes its inputs."""

    storage: Literal["float32", "lower"] = "float32"
    inputs: Literal["unchanged", "lower"] = "unchanged"
    master: bool = Field(default=True, description="keep the FP32 weights beside the 16-bit copies")
    keep_fp32_modules: Literal["respect", "ignore"] = Field(
        default="respect",
        description="what to do with a model's own _keep_in_fp32_modules when the storage is lower",
    )


class Defaults(_Strict):
    """What happens to an op that no rule mentions."""

    cast: Literal[Cast.FOLLOW] = Cast.FOLLOW
    why: Text = "no rule mentions this op: ordinary type promotion of its inputs"


class RuleFile(_Strict):
    """A whole policy."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
    title: Text
    autocast: bool = Field(
        description="whether the model's own code sees autocast as enabled, as under torch.autocast"
    )
    weights: Weights = Weights()
    defaults: Defaults = Defaults()
    rules: tuple[Rule, ...] = ()
