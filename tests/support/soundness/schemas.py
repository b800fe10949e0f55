"""Calls of ATen overloads, every argument of the schema given by its type, or name where that says more."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from tests.support.soundness.draft import Draft, Refused

_LEFT_OUT = (
    "rand bernoulli dropout normal uniform multinomial poisson exponential geometric cauchy rrelu"
    " _backward backward_ sparse quantize fake_ fbgemm qint q_ cudnn miopen mkldnn mps mkl _foreach _fused"
    " fused_ _nested nested sym_ _lstm _gru lstm gru rnn _thnn ctc_loss record_stream set_data"
    " requires_grad retain_grad _version resize_ _resize as_strided set_ storage pin_memory is_pinned"
    " from_file _assert _print _jvp copy_sparse to_mkldnn to_dense _coalesced coalesce crow ccol"
    " col_indices row_indices values indices _indices _values _nnz int_repr dequantize _make_dual"
    " _fw_primal _unpack_dual _cast_ _efficient _flash _cslt _mixed _wrapped _weight_int _dyn_quant"
    " _grouped _scaled _spdiags _transform_bias stft istft _test _embedding_bag_ _convert _pad_packed"
    " _pack_padded _histogram histogram data unsafe_ _linalg_check grad _neg_view _conj conj cufft gelqf"
    " _choose_qparams _autocast _has_same _fft choose_qparams triplet _pdist _cdist _cummax _cummin sample"
    " _sample __ lu_ _lu linalg_ symeig svd qr eig_ geqrf orgqr ormqr cholesky lstsq ldl_ hspmm sspaddmm"
    " special_ debug nonzero unique masked_select where.default item is_ equal allclose bincount argwhere"
    " pinverse det slogdet logdet matrix_exp inverse complex polar view_as_complex view_as_real vander cov"
    " corrcoef gradient hamming hann bartlett blackman kaiser triu_indices tril_indices one_hot"
    " embedding_renorm renorm"
).split()
_KEPT = (
    "linalg_vector_norm linalg_norm special_expit special_log1p special_i0 _softmax _log_softmax"
    " _safe_softmax _to_copy _unsafe_view _reshape_alias"
).split()


def _wanted(name: str) -> bool:
    if name in _KEPT:
        return True
    return name[0] != "_" and not any(part in name for part in _LEFT_OUT)


@cache
def overloads(base: str) -> tuple[OpOverload, ...]:
    """Overloads of an ATen op whose first tensor argument can be made."""
    packet = getattr(torch.ops.aten, base, None)
    if packet is None:
        return ()
    found = []
    for name in packet.overloads():
        if name.startswith("prim_"):  # of TorchScript alone; they crash when called
            continue
        op = getattr(packet, name)
        types = [str(argument.real_type) for argument in op._schema.arguments]
        odd = any("Dimname" in kind or kind in ("Stream", "Generator") or "complex" in kind for kind in types)
        if not odd and any("Tensor" in kind for kind in types) | (base in _MAKERS):
            found.append(op)
    return tuple(found)


_MAKERS = frozenset("zeros ones full empty arange scalar_tensor eye linspace logspace".split())


@cache
def every_base() -> tuple[str, ...]:
    """Names of the ATen ops that a random call makes sense of."""
    names = {
        schema.name[6:] for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")
    }
    return tuple(sorted(name for name in names if _wanted(name) and overloads(name)))


def call_of(draft: Draft, op: OpOverload) -> str:
    """A template that calls the overload, with each argument given, or left at its default.

    Raises:
        Refused: an argument that nothing stands for.
    """
    base, given, skipped = op._schema.name.split("::")[1], list[str](), False
    text = f"aten.{base}.{op._overloadname or 'default'}"
    for argument in op._schema.arguments:
        if argument.has_default_value() and draft.random.random() < 0.45:
            value = None
        else:
            value = _argument(draft, base, argument, first=not given)
        if value is None:
            if not argument.has_default_value():
                raise Refused(f"{text}: {argument.name}")
            skipped = True
        else:
            given.append(f"{argument.name}={value}" if skipped or argument.kwarg_only else value)
    return f"A = {text}({', '.join(given)})"


def _argument(draft: Draft, base: str, argument: Any, *, first: bool) -> str | None:
    kind, name = str(argument.real_type), str(argument.name)
    optional = kind.startswith("Optional[")
    kind = kind.removeprefix("Optional[").removesuffix("]") if optional else kind
    if optional and not argument.has_default_value() and draft.random.random() < 0.3:
        return "None"
    if kind == "Tensor":
        return _tensor(draft, name, first)
    if name in ("layout", "device", "pin_memory", "memory_format", "generator"):
        return "None" if optional else None
    if name in _CHOICES:
        return draft.random.choice(_CHOICES[name].split())
    if name in _BY_NAME:
        return _BY_NAME[name](draft)
    if kind in ("List[Tensor]", "List[Optional[Tensor]]", "List[Optional[Tensor]"):
        return _tensors(draft, base)
    simple = {
        "number": draft.number,
        "float": draft.number,
        "bool": draft.token_bool,
        "int": lambda: draft.random.choice(("0", "1", "2", "3", "-1")),
        "SymInt": lambda: draft.random.choice(("0", "1", "2", "3", "-1")),
        "ScalarType": draft.token_dtype,
        "List[int": lambda: _sizes(draft),
        "List[int]": lambda: _sizes(draft),
        "List[float": lambda: str([draft.random.choice((1.0, 2.0))] * 2),
        "List[float]": lambda: str([draft.random.choice((1.0, 2.0))] * 2),
        "str": lambda: draft.random.choice(
            ("'none'", "'tanh'", "'trunc'", "'floor'", "'mean'", "'constant'")
        ),
        "List[bool]": lambda: "[True, True]",
    }.get(kind)
    return simple() if simple is not None else None


def _tensor(draft: Draft, name: str, first: bool) -> str:
    if name in ("index", "indices", "offsets"):
        size = min(draft.last.shape, default=1)
        shape = draft.last.shape if draft.random.random() < 0.5 else (draft.random.choice((1, 2, 3)),)
        return draft.index(int(size), shape)
    if name in ("mask", "condition"):
        found = draft.tensors(lambda t: t.dtype is torch.bool)
        if found and draft.random.random() < 0.5:
            return draft.random.choice(found)
        sizes = ", ".join(map(str, draft.last.shape))
        return draft.store(f"whole(1{', ' if sizes else ''}{sizes}).bool()", "buffer")
    if first:
        return draft.random.choice((draft.token_t, draft.token_t, draft.token_t, draft.token_a))()
    if name == "out" or name.startswith("out"):
        return draft.pick()
    return draft.partner(draft.last.shape)


def _tensors(draft: Draft, base: str) -> str:
    first = draft.pick()
    shape = tuple(draft.last.shape)
    if base.startswith("index") or base == "_unsafe_index":
        raise Refused("written by hand")
    alike = draft.tensors(lambda t: tuple(t.shape) == shape)
    if draft.random.random() < 0.4:
        alike.append(draft.weight(shape))
    return "[" + ", ".join([first, *draft.random.choices(alike, k=draft.random.randint(0, 2))]) + "]"


def _sizes(draft: Draft) -> str:
    rank = draft.random.choice((1, 2, 2, max(draft.last.ndim, 1)))
    return str([draft.random.choice((1, 2, 3, 1, 0)) for _ in range(rank)])


def _kernel(draft: Draft) -> str:
    rank = max(draft.last.ndim - 2, 1)
    return str([draft.random.choice((1, 2, 2, 3)) for _ in range(draft.random.choice((rank, rank, 1)))])


def _padding(draft: Draft) -> str:
    rank = max(draft.last.ndim - 2, 1)
    return str([draft.random.choice((0, 1, 1)) for _ in range(rank)])


def _dim(draft: Draft) -> str:
    return draft.token_dim() if draft.random.random() < 0.7 else draft.token_dims()


def _expanded(draft: Draft) -> str:
    lead = [draft.random.choice((1, 2, 3))] * draft.random.randint(0, 1)
    return str([*lead, *(n if n != 1 else draft.random.choice((1, 3, -1)) for n in draft.last.shape)])


_CHOICES = {
    "groups": "1 1 2", "correction": "0 1 2 3 1.5 -1 7 None", "rounding_mode": "'trunc' 'floor' None",
    "approximate": "'none' 'tanh'", "mode": "'constant' 'reflect' 'replicate' 'circular'",
    "ord": "2 1 0 3 float('inf') float('-inf') -1 0.5", "p": "2 1 0.5 3 float('inf')", "decimals": "0 1 2 -2",
    "num_groups": "1 2 3", "divisor_override": "1 2 -1 9", "k": "1 2 -1 0", "diagonal": "0 1 -1",
    "scale_factors": "[2.0,2.0]", "upscale_factor": "2", "downscale_factor": "2", "start": "0 1 -1 3 -2.5",
    "end": "1 2 -1 3 7.5 100", "step": "1 2 0.5 -1", "reduction": "0 1 2",
    "reduce": "'sum' 'prod' 'mean' 'amax' 'amin'", "indices_or_sections": "2 [1] [1,2] [0,1] [-1]",
    "split_size": "1 2 3", "chunks": "1 2 3", "sections": "1 2 3", "indices": "[1] [1,2] [0,1] [-1] [5]",
}  # fmt: skip
_BY_NAME = {
    "dim": _dim, "dims": lambda d: d.random.choice((d.token_order, d.token_dims))(), "axis": _dim,
    "dim0": Draft.token_dim, "dim1": Draft.token_dim, "axis0": Draft.token_dim, "axis1": Draft.token_dim,
    "start_dim": Draft.token_dim, "end_dim": Draft.token_dim, "source": _dim, "destination": _dim,
    "keepdim": Draft.token_keep, "dtype": Draft.token_dtype, "eps": Draft.token_eps,
    "train": Draft.token_bool,
    "kernel_size": _kernel, "stride": _kernel, "padding": _padding, "dilation": _kernel,
    "output_size": _kernel, "ceil_mode": Draft.token_bool, "fill_value": Draft.number,
    "names": lambda d: None,
    "size": lambda d: d.random.choice((d.token_shape, lambda: _expanded(d)))(), "shape": Draft.token_shape,
    "normalized_shape": lambda d: str(list(d.last.shape[-d.random.choice((1, 1, 2)) :])),
    "repeats": lambda d: str(d.random.choices((1, 2, 3), k=d.last.ndim + d.random.randint(0, 1))),
    "pad": lambda d: str(d.random.choices((0, 1, 2, -1), k=2 * d.random.randint(1, 2))),
    "split_sizes": lambda d: str(_split(d)),
}  # fmt: skip


def _split(draft: Draft) -> list[int]:
    size = draft.last.shape[draft.random.randrange(draft.last.ndim)] if draft.last.ndim else 1
    first = draft.random.randint(0, size)
    return [first, size - first]
