"""Defines the schema of a rule file; unknown keys are errors."""

from __future__ import annotations

import difflib
import json
import re
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from ampaudit.core.text import is_number

# Synonyms in ATen. In-place variants (add_) are derived from the name.
_SYNONYMS = [
    line.split()
    for line in """
    abs absolute
    acos arccos
    acosh arccosh
    asin arcsin
    asinh arcsinh
    atan arctan
    atan2 arctan2
    atanh arctanh
    cat concat concatenate
    clamp clip
    det linalg_det
    digamma special_digamma
    div divide true_divide
    erf special_erf
    erfc special_erfc
    erfinv special_erfinv
    exp2 special_exp2
    expm1 special_expm1
    floor special_floor
    ge greater_equal
    gt greater
    igamma special_gammainc
    inverse linalg_inv
    layer_norm native_layer_norm
    group_norm native_group_norm
    le less_equal
    lgamma special_gammaln
    log1p special_log1p
    log_softmax special_log_softmax _log_softmax
    logit special_logit
    logsumexp special_logsumexp
    lt less
    matmul linalg_matmul
    matrix_power linalg_matrix_power
    mul multiply
    ne not_equal
    neg negative
    outer ger
    sigmoid special_expit
    slogdet linalg_slogdet
    softmax special_softmax _softmax
    sub subtract
    trunc fix
    """.strip().splitlines()
]
_GROUP_OF = {name: group for group in _SYNONYMS for name in group}


def synonyms(name: str) -> list[str]:
    """Return ATen's names for an op, the usual one first."""
    return _GROUP_OF.get(name, [name])


# Composite ops that are not decomposed, and the op inside them: a rule about the inner op applies to the
# outer one, as under autocast, which sees the inner call.
_DECIDED_BY = {
    **{f"conv{n}d.padding": f"conv{n}d" for n in (1, 2, 3)},
    **{
        f"{name}.vec": name
        for name in (
            *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d"),
            *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
            *("upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
            *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
        )
    },
    "square": "pow.Tensor_Scalar",
}
_FOREIGN = re.compile(r"\w+::\w+(\.\w+)?")
Scalar = bool | int | float | str | None
AS_IS = "as-is"  # name of the policy that adds no casts

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2000)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
Number = Annotated[float, Field(strict=True)]  # rejects true and "1"
Positive = Annotated[Number, Field(gt=0)]
Count = Annotated[int, Field(ge=1, strict=True)]
LowPrecisionDtype = Literal["float16", "bfloat16"]
Placement = Literal["unchanged", "lower", "float32"]


class UnknownOp(ValueError):
    """Raised for an unknown op name; ``near`` is a similar one."""

    def __init__(self, name: str, near: str | None) -> None:
        super().__init__(name)
        self.near = near


@cache
def _table() -> dict[str, tuple[str, ...]]:
    text = Path(__file__).with_name("aten_ops.txt").read_text(encoding="ascii")
    return {line.partition(" ")[0]: tuple(line.split()[1:]) for line in text.splitlines()}


@cache
def _overloads() -> dict[str, tuple[str, ...]]:
    overloads: dict[str, list[str]] = {}
    for name in _table():
        overloads.setdefault(name.partition(".")[0], []).append(name)
    return {base: tuple(names) for base, names in overloads.items()}


def inner_op(name: str) -> str | None:
    """Return the op whose rules also apply to a composite op; ``None`` for an op that is not composite."""
    return _DECIDED_BY.get(name)


def aten_names() -> frozenset[str]:
    """Return every ATen op, ``base`` or ``base.overload``, of the pinned torch release."""
    return frozenset(_table())


def aten_arguments(name: str) -> tuple[str, ...] | None:
    """Return the names of an op's arguments, or ``None`` for an op of another library."""
    return _table().get(name)


@cache
def expand(name: str) -> tuple[str, ...]:
    """Expand a name in a rule to ops.

    ``linear`` is the default overload, ``softmax.int`` one overload, ``softmax.*`` all overloads, and
    ``@softmax`` all overloads of the function and its synonyms, including in-place variants.
    ``library::op`` is an op of another library and returned unchanged.

    Raises:
        UnknownOp: The name is unknown.
    """
    if _FOREIGN.fullmatch(name) and not name.startswith("aten::"):
        return (name,)
    name = name.removeprefix("aten::")
    if name in _table():
        return (name,)
    if name.endswith(".*") and name[:-2] in _overloads():
        return _overloads()[name[:-2]]
    if name.startswith("@"):
        variants = [
            variant
            for base in synonyms(name[1:])
            for variant in (base, f"{base}_")
            if variant in _overloads()
        ]
        if variants:
            return tuple(op for variant in variants for op in _overloads()[variant])
    raise UnknownOp(name, _similar(name))


def _similar(name: str) -> str | None:
    base = name.lstrip("@").partition(".")[0]
    if base in _overloads():
        return _overloads()[base][0]
    close = difflib.get_close_matches(base, _overloads(), n=1, cutoff=0.75)
    return (f"@{close[0]}" if name.startswith("@") else _overloads()[close[0]][0]) if close else None


class _Unset:
    """The type of an argument left at its default."""

    def __repr__(self) -> str:
        return "unset"


UNSET = _Unset()


class StrictModel(BaseModel):
    """A frozen model that rejects unknown keys, infinity and NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class NumericCondition(StrictModel):
    """Limits on a number: ``min`` and ``max`` include their value, ``above`` and ``below`` do not."""

    min: Number | None = None
    max: Number | None = None
    above: Number | None = None
    below: Number | None = None

    @model_validator(mode="after")
    def _check_possible(self) -> NumericCondition:
        lows = [(v, strict) for v, strict in ((self.min, False), (self.above, True)) if v is not None]
        highs = [(v, strict) for v, strict in ((self.max, False), (self.below, True)) if v is not None]
        if not lows and not highs:
            raise ValueError("give at least one of min, max, above, below")
        for low, low_open in lows:
            for high, high_open in highs:
                if low > high or (low == high and (low_open or high_open)):
                    raise ValueError(f"no number lies between {low:g} and {high:g}")
        return self

    def holds(self, value: float) -> bool:
        """Return whether a number is within the limits; NaN never is."""
        return (
            (self.min is None or value >= self.min)
            and (self.max is None or value <= self.max)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


class ArgTest(StrictModel):
    """A test of one argument; all given keys must hold."""

    model_config = ConfigDict(populate_by_name=True)

    equals: Scalar = None
    any_of: tuple[Scalar, ...] = Field(default=(), alias="in")
    range: NumericCondition | None = Field(
        default=None, description="of a number, or of every number in a list"
    )
    magnitude: NumericCondition | None = Field(default=None, description="the same for absolute values")
    unset: bool | None = Field(default=None, description="whether it was left at its default")

    @model_validator(mode="after")
    def _check_not_empty(self) -> ArgTest:
        if not self.model_fields_set:
            raise ValueError("give at least one of equals, in, range, magnitude, unset")
        if "any_of" in self.model_fields_set and not self.any_of:
            raise ValueError("no value is in an empty list")
        if self.unset and len(self.model_fields_set) > 1:
            raise ValueError("an argument that is unset has no value to test")
        return self

    def holds(self, value: Any) -> bool:
        """Return whether an argument passes; ``UNSET`` stands for one left at its default."""
        is_set = value is not UNSET
        if self.unset is not None and self.unset is is_set:
            return False
        if "equals" in self.model_fields_set and not (is_set and same_value(value, self.equals)):
            return False
        if self.any_of and not (is_set and any(same_value(value, item) for item in self.any_of)):
            return False
        numbers = _numbers(value)
        if self.range is not None and not (numbers and all(self.range.holds(n) for n in numbers)):
            return False
        return self.magnitude is None or bool(
            numbers and all(self.magnitude.holds(abs(number)) for number in numbers)
        )


def same_value(value: Any, expected: Scalar) -> bool:
    """Compare two values, distinguishing True from 1; anything but numbers, words and ``None`` differs."""
    is_scalar = value is None or isinstance(value, bool | int | float | str)
    return is_scalar and isinstance(value, bool) is isinstance(expected, bool) and value == expected


def _numbers(value: Any) -> list[float]:
    items = value if isinstance(value, list | tuple) else [value]
    return [float(v) for v in items] if all(map(is_number, items)) else []


class Cast(StrEnum):
    """The treatment of an op's floating-point inputs (float64, ints and bools are never cast)."""

    LOWER = "lower"  # cast them to the 16-bit format of the run
    FLOAT32 = "float32"  # cast them to float32
    WIDEST = "widest"  # cast them to the widest float among them
    NARROWEST = "narrowest"  # cast them to the 16-bit format if one of them has it
    SET_DTYPE = "set-dtype"  # leave them; set the op's dtype argument to float32 if it is unset
    APPEND_DTYPE = "append-dtype"  # leave them; call the overload that takes dtype, with float32
    FOLLOW = "follow"  # add no cast: ordinary type promotion
    FORBID = "forbid"  # refuse the op in 16 bits
    # colors of a graph coloring (docs/rules.md), resolved to lower or float32 before anything is cast
    ALLOW = "allow"  # always lower
    INFER = "infer"  # lower between lower ops, unless downstream of a denied one
    CLEAR = "clear"  # like infer, and never the end of a denied path
    DENY = "deny"  # always float32


COLORS = (Cast.ALLOW, Cast.INFER, Cast.CLEAR, Cast.DENY)
ArgumentCast = Literal["lower", "float32", "keep"]


class Reason(StrEnum):
    """The kind of reason for a rule."""

    RANGE = "range"
    PRECISION = "precision"
    NO_KERNEL = "no-kernel"
    SPEED = "speed"
    SEMANTICS = "semantics"


class Match(StrictModel):
    """The ops that a rule is about: all given keys must match, by any of their entries."""

    op: tuple[Text, ...] = Field(
        default=(), description="ATen names: base, base.overload, base.*, @alias; or names of the vocabulary"
    )
    layer: tuple[Text, ...] = Field(default=(), description="globs over the layer path")
    layer_regex: tuple[Text, ...] = Field(default=(), description="RE2 patterns searched in the layer path")
    module: tuple[Text, ...] = Field(
        default=(), description="class names of the layer or one of its bases, bare or with their module"
    )
    attributes: dict[str, bool | int | float | str | None] = Field(
        default={}, description="attributes that the layer's module must have, with these values"
    )
    parameter: tuple[Text, ...] = Field(default=(), description="globs over parameters that the op takes")
    site: tuple[Text, ...] = Field(default=(), description="globs over site ids, as reports print them")

    @model_validator(mode="after")
    def _check_not_empty(self) -> Match:
        empty = sorted(key for key in self.model_fields_set if not getattr(self, key))
        if empty:
            raise ValueError(f"{empty[0]} is empty, which no op matches; leave it out to match every op")
        return self


class EvidenceCondition(StrictModel):
    """Limits on measured magnitudes; a rule with one is a measured rule."""

    weight_peak: NumericCondition | None = Field(default=None, description="largest |w| of the op's weights")
    consumer_peak: NumericCondition | None = Field(
        default=None, description="largest output of the ops that use its output, in FP32"
    )
    input_peak: NumericCondition | None = Field(
        default=None, description="largest |x| of the op's inputs, in FP32"
    )
    output_peak: NumericCondition | None = Field(
        default=None, description="largest |y| of its output, in FP32"
    )
    mask: bool | None = Field(default=None, description="whether a large value here is a mask, by design")
    headroom_bits: NumericCondition | None = Field(
        default=None, description="log2(largest finite / output peak)"
    )

    @model_validator(mode="after")
    def _check_not_empty(self) -> EvidenceCondition:
        if all(getattr(self, key) is None for key in type(self).model_fields):
            raise ValueError(f"give at least one of {', '.join(type(self).model_fields)}")
        return self


class When(StrictModel):
    """Conditions under which a rule applies."""

    dtype: tuple[LowPrecisionDtype, ...] = Field(default=(), description="16-bit formats; empty means both")
    arguments: dict[str, ArgTest] = Field(default={}, description="tests of the op's arguments, by name")
    depth: NumericCondition | None = Field(
        default=None, description="terms per output element: product of the reduced axes, or fan-in"
    )
    capability: NumericCondition | None = Field(
        default=None, description="CUDA compute capability, such as 8.0"
    )
    versions: dict[Literal["torch", "cuda"], Text] = Field(default={}, description="such as '>=2.1,<3'")
    evidence: EvidenceCondition | None = None
    producer: Literal["float32"] | None = Field(default=None, description="an input comes from such an op")
    consumer: Literal["float32"] | None = Field(default=None, description="such an op uses the output")


class Rule(StrictModel):
    """One rule; the first rule that matches an op decides."""

    id: Text
    match: Match = Match()
    when: When = When()
    cast: Cast
    arguments: dict[str, ArgumentCast] = Field(default={}, description="arguments that differ from cast")
    clamp: Positive | Literal["max"] | None = Field(
        default=None, description="clamp the output to +-this, or to the format's largest finite number"
    )
    force: bool = Field(default=False, description="let a measured rule lower the precision")
    reason: Reason
    why: Text = Field(description="one sentence")
    source: Text

    @property
    def measured(self) -> bool:
        """Whether the rule depends on measurements, and so applies in the second pass."""
        return self.when.evidence is not None

    @property
    def colored(self) -> bool:
        """Whether the rule assigns a color."""
        return self.cast in COLORS


class KeepFp32(StrictModel):
    """Parameters and buffers that stay in float32 when weights are stored in 16 bits."""

    module: tuple[Text, ...] = Field(default=(), description="their module's class, or a base of it")
    model: tuple[Text, ...] = Field(default=(), description="class, or a base, of a model that holds them")
    attributes: dict[str, bool | int | float | str | None] = {}
    parameter: tuple[Text, ...] = Field(default=(), description="globs over parameter and buffer names")
    dtype: tuple[LowPrecisionDtype, ...] = Field(default=(), description="16-bit formats; empty means both")


class Constants(StrictModel):
    """The clipping of finite weights outside the range (inf, NaN and 0 stay)."""

    max_finite: Positive
    min_positive: Number = Field(ge=0)

    @model_validator(mode="after")
    def _check_order(self) -> Constants:
        if self.min_positive > self.max_finite:
            raise ValueError("min_positive is larger than max_finite")
        return self


class WeightPolicy(StrictModel):
    """How the converted model stores weights, takes inputs and returns outputs."""

    storage: Literal["float32", "lower", "rounded"] = Field(
        default="float32",
        description="lower: weights are stored in 16 bits; rounded: the same, but the model's code sees them "
        "in float32",
    )
    buffers: Literal["all", "persistent"] = Field(
        default="all",
        description="which buffers storage is about: all, as .half() casts; persistent, as loading does",
    )
    casts: Literal["float32", "floating", "half", "to"] = Field(
        default="float32",
        description="what storage lower casts: float32 tensors and not float64; every floating-point one; or "
        "what the model's own .half(), or .to(dtype), does",
    )
    inputs: Placement = "unchanged"
    outputs: Placement = "unchanged"
    master: bool = Field(default=True, description="keep the FP32 weights beside the 16-bit copies")
    keep_fp32_modules: Literal["respect", "ignore"] = Field(
        default="respect",
        description="what to do with a model's own _keep_in_fp32_modules when the storage is lower",
    )
    keep: tuple[KeepFp32, ...] = ()
    clip: Constants | None = None
    numbers: Literal["exact", "rounded"] = Field(
        default="exact",
        description="numbers that are operands of 16-bit ops: exact, as PyTorch takes them; or rounded, as "
        "constants of a graph are",
    )


USUAL_START = 65536.0


class LossScale(StrictModel):
    """The loss scale in training.

    A dynamic scale starts at ``init``; it is multiplied by ``growth`` after ``interval`` steps without
    overflow, and by ``backoff`` after ``hysteresis`` steps with one, within ``min`` and ``max``.
    ``caller`` stands for a number that the system leaves to its user.
    """

    kind: Literal["dynamic", "static", "none"] = "dynamic"
    init: Positive | Literal["caller"] = Field(default=65536.0, description="the scale itself if static")
    growth: Number = Field(default=2.0, gt=1)
    backoff: Number = Field(default=0.5, gt=0, lt=1)
    interval: Count = 2000
    min: Positive | None = None
    max: Positive | Literal["finite"] | None = None
    hysteresis: Count | Literal["caller"] = 1

    @model_validator(mode="after")
    def _check_order(self) -> LossScale:
        if self.min is not None and isinstance(self.max, float) and self.min > self.max:
            raise ValueError("min is larger than max")
        return self

    @property
    def start(self) -> float:
        """The initial scale; torch's default if the system leaves it to its user."""
        return self.init if isinstance(self.init, float) else USUAL_START

    @property
    def lives(self) -> int:
        """The number of overflows until the scale is lowered."""
        return self.hysteresis if isinstance(self.hysteresis, int) else 1


class Defaults(StrictModel):
    """The treatment of ops that no rule mentions."""

    cast: Literal[Cast.FOLLOW, Cast.LOWER, Cast.FLOAT32, Cast.NARROWEST] = Cast.FOLLOW
    why: Text = "no rule mentions this op: ordinary type promotion of its inputs"


class RuleFile(StrictModel):
    """A whole policy."""

    name: Name
    title: Text
    extends: tuple[Text, ...] = Field(default=(), description="names or paths; their rules come after ours")
    drop: tuple[Text, ...] = Field(default=(), description="ids of inherited rules to leave out")
    vocabulary: Name | None = Field(default=None, description="whose op names match.op uses; unset: ATen's")
    level: Literal["calls", "graph"] = Field(
        default="calls",
        description="calls: casts while the model's code runs, as autocast; graph: casts in its FP32 graph",
    )
    autocast: bool = Field(
        default=False,
        description="whether the model's own code sees autocast as enabled, as under torch.autocast",
    )
    weights: WeightPolicy = WeightPolicy()
    loss_scale: Name | LossScale = Field(default="torch", description="a profile's name, or the numbers")
    defaults: Defaults = Defaults()
    rules: tuple[Rule, ...] = ()


def rules_schema_text() -> str:
    """Return the JSON Schema (2020-12) of a rule file, as in docs/rules.schema.json."""
    schema = RuleFile.model_json_schema(by_alias=True)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(head | schema, indent=1, sort_keys=True) + "\n"
