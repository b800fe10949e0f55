"""Lists ATen's op names without torch: names allowed in rule files, and the ops that they stand for."""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path

__all__ = ["UnknownOp", "aten_arguments", "aten_names", "expand", "inner_op"]

# Names that ATen gives to one function. In-place variants (add_) are found by their name.
_SYNONYMS = [
    line.split()
    for line in """
    abs absolute
    acos arccos
    acosh arccosh
    add
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
    hstack
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
    pow
    sigmoid special_expit
    slogdet linalg_slogdet
    softmax special_softmax _softmax
    sub subtract
    trunc fix
    """.strip().splitlines()
]
_GROUP_OF = {name: group for group in _SYNONYMS for name in group}


# Composite ops that stay whole, and the op inside them that decides for them: a rule about the inner op
# applies to the outer one, as it does under autocast, which sees the inner call.
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
    found: dict[str, list[str]] = {}
    for name in _table():
        found.setdefault(name.partition(".")[0], []).append(name)
    return {base: tuple(names) for base, names in found.items()}


def inner_op(name: str) -> str | None:
    """Return the op inside a composite one whose rules apply to it."""
    return _DECIDED_BY.get(name)


def aten_names() -> frozenset[str]:
    """Return every ATen op, ``base`` or ``base.overload``, of the pinned torch release."""
    return frozenset(_table())


def aten_arguments(name: str) -> tuple[str, ...] | None:
    """Return the names of an op's arguments, or ``None`` for an op of another library."""
    return _table().get(name)


@cache
def expand(name: str) -> tuple[str, ...]:
    """List the ops that a name in a rule stands for.

    ``linear`` is the default overload, ``softmax.int`` one overload, ``softmax.*`` all of them,
    ``@softmax`` all overloads of the function under each of ATen's names for it, in place or not.
    ``library::op`` is an op of another library, taken as it is.

    Raises:
        UnknownOp: there is no such op.
    """
    if "::" in name and not name.startswith("aten::"):
        return (name,)
    name = name.removeprefix("aten::")
    if name in _table():
        return (name,)
    if name.endswith(".*") and name[:-2] in _overloads():
        return _overloads()[name[:-2]]
    if name.startswith("@"):
        bases = _GROUP_OF.get(name[1:], [name[1:]])
        twins = [twin for base in bases for twin in (base, f"{base}_") if twin in _overloads()]
        if twins:
            return tuple(op for twin in twins for op in _overloads()[twin])
    raise UnknownOp(name, _near(name))


def _near(name: str) -> str | None:
    base = name.lstrip("@").partition(".")[0]
    if base in _overloads():
        return _overloads()[base][0]
    close = difflib.get_close_matches(base, _overloads(), n=1, cutoff=0.75)
    return (f"@{close[0]}" if name.startswith("@") else _overloads()[close[0]][0]) if close else None
