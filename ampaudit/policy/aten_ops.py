"""Lists ATen's ops without importing torch, and expands names in rule files to ops."""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path

__all__ = ["UnknownOp", "aten_arguments", "aten_names", "expand", "inner_op"]

# Synonyms in ATen. In-place variants (add_) are derived from the name.
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
    """Return the op whose rules also apply to a composite op; ``None`` for other ops."""
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
    if "::" in name and not name.startswith("aten::"):
        return (name,)
    name = name.removeprefix("aten::")
    if name in _table():
        return (name,)
    if name.endswith(".*") and name[:-2] in _overloads():
        return _overloads()[name[:-2]]
    if name.startswith("@"):
        bases = _GROUP_OF.get(name[1:], [name[1:]])
        variants = [variant for base in bases for variant in (base, f"{base}_") if variant in _overloads()]
        if variants:
            return tuple(op for variant in variants for op in _overloads()[variant])
    raise UnknownOp(name, _similar(name))


def _similar(name: str) -> str | None:
    base = name.lstrip("@").partition(".")[0]
    if base in _overloads():
        return _overloads()[base][0]
    close = difflib.get_close_matches(base, _overloads(), n=1, cutoff=0.75)
    return (f"@{close[0]}" if name.startswith("@") else _overloads()[close[0]][0]) if close else None
