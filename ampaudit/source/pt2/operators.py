"""Looks up the operators that an exported program may call: PyTorch's own, without files and raw memory."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import predispatch
from torch._ops import HigherOrderOperator, OpOverload

from ampaudit.core.errors import SourceError
from ampaudit.core.untrusted import describe

__all__ = ["UnknownOperator", "operator_named"]

_OVERLOAD = re.compile(r"torch\.ops\.(aten|prims)\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)", re.ASCII)
_HIGHER_ORDER = re.compile(r"torch\.ops\.higher_order\.([a-z_]+)", re.ASCII)
_FUNCTION = re.compile(r"(_operator|math|torch|torch\._functorch\.predispatch)\.(\w+)", re.ASCII)
# those that write files, print, change the process, or trust sizes, indices and pointers that they are given
_FORBIDDEN = re.compile(
    r"from_file|_foreach_copy|save|print|manual_seed|backward|set_data|make_dual|pin_memory|\w*_unsafe|to_padded_tensor"
    r"|(sparse|to_sparse|fbgemm|quantized|cudnn|miopen|mps)(_\w+)?|\w+_mps|sspaddmm|hspmm|\w*_?jvp"
)
# of the operators that are private, or half of a backward pass, those that honest programs hold
_INTERNAL = re.compile(r"_(?!_\w+__$)\w+|\w+_backward\w*")
_KNOWN_INTERNAL = re.compile(
    r"(?!.*backward)(_adaptive_avg_pool[23]d|_add_relu|_addmm_activation|_aminmax|_assert_\w+|_autocast_\w+|_cast_\w+"
    r"|_cdist_forward|_conj(_copy|_physical)?|_convolution(_mode)?|_ctc_loss|_dim_arange|_efficientzerotensor"
    r"|_efficient_attention_forward|_embedding_bag(_forward_only)?|_euclidean_dist|_fake_quantize_\w+"
    r"|_fft_(c2c|c2r|r2c)|_flash_attention_forward|_foreach_\w+|_functional_\w+|_fused_moving_avg_obs_\w+"
    r"|_fused_rms_norm|_grouped_mm|_int_mm|_is_a(ll|ny)_true|_linalg_\w+|_local_scalar_dense|_log_softmax"
    r"|_logcumsumexp|_lu_with_info|_native_batch_norm_legit\w*|_native_multi_head_attention|_neg_view(_copy)?"
    r"|_pack_padded_sequence|_pad_(circular|enum|packed_sequence)|_pdist_forward|_prelu_kernel|_reshape_copy"
    r"|_safe_softmax|_sample_dirichlet|_scaled_dot_product_\w+|_scaled_(grouped_)?mm(_v2)?|_shape_as_tensor"
    r"|_softmax|_standard_gamma|_thnn_fused_(gru|lstm)_cell|_to_copy|_to_cpu|_transformer_encoder_layer_fwd"
    r"|_trilinear|_unique2?|_unsafe_\w+|_upsample_\w+|_weight_int[48]pack_mm\w*|_weight_norm(_interface)?)"
    r"|(convolution|diagonal|elu|gelu|glu|hardsigmoid|hardswish|hardtanh|leaky_relu|log_sigmoid|logit|mish"
    r"|native_dropout|select|sigmoid|silu|slice|softplus|tanh|threshold|native_layer_norm)_backward"
    r"|_(log_)?softmax_backward_data"
)
_RAW = re.compile(r"Storage|Stream|__torch__|Any|Dict|Future")  # types of arguments
# without while_loop, which need not end
_HIGHER_ORDER_NAMES = frozenset(
    {
        "associative_scan",
        "autograd_function_apply",
        "cond",
        "flex_attention",
        "invoke_subgraph",
        "map_impl",
        "out_dtype",
        "scan",
        "strict_mode",
        "tag_activation_checkpoint",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    }
)
_OPERATOR = frozenset(
    "add and_ eq floordiv ge getitem gt le lshift lt mod mul ne neg not_ or_ pos pow rshift "
    "sub truediv".split()
)
_MATH = frozenset("acos asin atan ceil cos cosh exp floor log log2 sin sinh sqrt tan tanh trunc".split())
_TORCH = frozenset(
    "sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt _sym_sqrt _sym_log2 _sym_cos _sym_sin "
    "sym_sum _sym_exp".split()
)
_VMAP = frozenset(
    "lazy_load_decompositions _add_batch_dim _remove_batch_dim _vmap_increment_nesting "
    "_vmap_decrement_nesting".split()
)
_GROWING = frozenset({"add", "lshift", "mod", "mul", "pow", "sub"})
_BITS = 64


class UnknownOperator(ValueError):
    """Raised for an operator that may not be called."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"operator {describe(name)!r} {why}")


def operator_named(name: str) -> Callable[..., Any]:
    """Return the operator that a program calls by its name, such as ``torch.ops.aten.add.Tensor``.

    Raises:
        UnknownOperator: this version of torch lacks it, or programs may not call it.
    """
    if found := _OVERLOAD.fullmatch(name):
        return _overload(name, *found.groups())
    if found := _HIGHER_ORDER.fullmatch(name):
        return _higher_order(name, found[1])
    if found := _FUNCTION.fullmatch(name):
        return _function(name, *found.groups())
    raise UnknownOperator(name, "is not one of PyTorch's own")


@functools.cache
def _overload(name: str, namespace: str, packet: str, overload: str) -> OpOverload:
    found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
    if not isinstance(found, OpOverload) or found.namespace != namespace:
        raise UnknownOperator(name, "is not in this version of PyTorch")
    arguments = found._schema.arguments
    raw = any(_RAW.search(str(a.type)) or a.name == "filename" for a in arguments)
    internal = _INTERNAL.fullmatch(packet) and (
        not _KNOWN_INTERNAL.fullmatch(packet) or any(a.is_out for a in arguments)
    )
    # without a kernel, it is a function of TorchScript on Python's values
    if raw or internal or _FORBIDDEN.fullmatch(packet) or not torch._C._dispatch_has_kernel(found.name()):
        raise UnknownOperator(name, "may not be called from a file: it reaches beyond its tensors")
    return found


def _higher_order(name: str, short: str) -> HigherOrderOperator:
    found = getattr(torch.ops.higher_order, short, None) if short in _HIGHER_ORDER_NAMES else None
    if not isinstance(found, HigherOrderOperator):
        raise UnknownOperator(name, "is not one that ampaudit reads from a file")
    return found


def _function(name: str, module: str, short: str) -> Callable[..., Any]:
    place, known = {
        "_operator": (operator, _OPERATOR),
        "math": (math, _MATH),
        "torch": (torch, _TORCH),
        "torch._functorch.predispatch": (predispatch, _VMAP),
    }[module]
    found = getattr(place, short, None) if short in known else None
    if found is None:
        raise UnknownOperator(name, "is not one that ampaudit reads from a file")
    return _bounded(found) if short in _GROWING else found


@functools.cache
def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operator on sizes, so that a chain of them cannot fill the memory with one integer."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if any(isinstance(argument, str | list | tuple) for argument in args):
            raise SourceError("the program computes with text or lists", hint="export the model again")
        found = None if _surely_large(function, args) else function(*args)
        if found is None or (type(found) is int and found.bit_length() > _BITS):
            raise SourceError("the program computes a size beyond 64 bits", hint="export the model again")
        return found

    return call


def _surely_large(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Return whether computing an integer would itself take long."""
    if len(args) != 2 or not all(type(a) is int for a in args):
        return False
    base, exponent = args
    if function is operator.pow:
        return bool(abs(base) > 1 and base.bit_length() * exponent > 2 * _BITS)
    return function is operator.lshift and exponent > _BITS
