"""Attention, as one op of torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from ampaudit.source.onnx.ops.registry import operator
from ampaudit.source.onnx.values import NodeCall, Operand, Unsupported

_UNDERSTOOD = set(
    "is_causal kv_num_heads q_num_heads scale softcap softmax_precision qk_matmul_output_mode".split()
)


@operator("Attention")
def attention(
    call: NodeCall,
    q: Operand,
    k: Operand,
    v: Operand,
    mask: Operand = None,
    past_key: Operand = None,
    past_value: Operand = None,
    lengths: Operand = None,
) -> Any:
    """Attend; the standard's function covers what torch's op has no argument for."""
    others = set(call.node.attributes) - _UNDERSTOOD
    if others or call.attribute("softcap", 0.0) or call.is_read(3) or lengths is not None:
        raise Unsupported("torch's attention has no such argument")
    heads = [call.attribute(name) for name in ("q_num_heads", "kv_num_heads", "kv_num_heads")]
    flat = call.tensor(q).ndim == 3
    query, key, value = (_by_head(call.tensor(t), n) for t, n in zip((q, k, v), heads, strict=True))
    key, value = _after(call, past_key, key), _after(call, past_value, value)
    before = key.shape[2] - query.shape[2] if past_key is not None else 0
    bias = None if mask is None else call.tensor(mask)
    if bias is not None and bias.shape[-1] != key.shape[2]:
        raise Unsupported("its mask is shorter than the keys")
    result = _attend(call, (query, key, value), bias, bool(call.attribute("is_causal", 0)), before)
    return (_flat(result) if flat else result), key, value


def _by_head(tensor: torch.Tensor, heads: int | None) -> torch.Tensor:
    """Return a tensor with heads before the sequence."""
    if tensor.ndim == 4 or heads is None:
        return tensor
    return tensor.reshape(*tensor.shape[:2], heads, -1).transpose(1, 2)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).flatten(2)


def _after(call: NodeCall, past: Operand, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if past is None else torch.cat([call.tensor(past), tensor], 2)


def _attend(
    call: NodeCall,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    causal: bool,
    before: int = 0,
) -> torch.Tensor:
    """Attend; ``before`` is the number of keys before the first query."""
    query, key, value = tensors
    grouped = query.shape[1] != key.shape[1]
    scale = call.attribute("scale") or None
    if causal and (mask is not None or before):
        reach = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(before)
        if mask is None:
            mask = reach
        else:
            boolean = mask.dtype == torch.bool
            mask = mask & reach if boolean else mask.masked_fill(~reach, -math.inf)
        causal = False
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


@operator("MultiHeadAttention", domain="com.microsoft")
def multi_head_attention(
    call: NodeCall,
    q: Operand,
    k: Operand = None,
    v: Operand = None,
    bias: Operand = None,
    padding: Operand = None,
    attention_bias: Operand = None,
    past_key: Operand = None,
    past_value: Operand = None,
    *others: Operand,
) -> Any:
    """Attend with tensors not yet split into heads."""
    if k is None or v is None or call.tensor(q).ndim != 3 or any(other is not None for other in others):
        raise Unsupported("its tensors are packed")
    heads, tensors = call.attribute("num_heads"), [call.tensor(t) for t in (q, k, v)]
    if bias is not None:
        sizes = [t.shape[-1] if t.ndim == 3 else t.shape[1] * t.shape[3] for t in tensors]
        parts = call.tensor(bias).split(sizes)
        tensors = [
            t + (part if t.ndim == 3 else part.reshape(heads, 1, -1))
            for t, part in zip(tensors, parts, strict=True)
        ]
    query, key, value = (_by_head(t, heads) for t in tensors)
    key, value = _after(call, past_key, key), _after(call, past_value, value)
    mask = _mask_of(call, padding, attention_bias, key.shape[2])
    causal = bool(call.attribute("unidirectional", 0))
    result = _attend(call, (query, key, value), mask, causal, key.shape[2] - query.shape[2])
    return _flat(result), key, value


@operator("Attention", domain="com.microsoft")
def packed_attention(
    call: NodeCall,
    x: Operand,
    weights: Operand,
    bias: Operand = None,
    padding: Operand = None,
    past: Operand = None,
    attention_bias: Operand = None,
    *others: Operand,
) -> Any:
    """Compute queries, keys and values in one product, and attend."""
    if past is not None or call.attribute("do_rotary", 0) or any(other is not None for other in others):
        raise Unsupported("it has a cache")
    heads, tensor = call.attribute("num_heads"), call.tensor(x)
    shift = None if bias is None else call.tensor(bias)
    product = F.linear(tensor, call.tensor(weights).T, shift)
    sizes = call.attribute("qkv_hidden_sizes") or [product.shape[-1] // 3] * 3
    query, key, value = (_by_head(part, heads) for part in product.split(list(sizes), -1))
    mask = _mask_of(call, padding, attention_bias, key.shape[2])
    result = _attend(call, (query, key, value), mask, bool(call.attribute("unidirectional", 0)))
    present = torch.stack([key, value]) if call.is_read(1) else None
    return _flat(result), present


def _mask_of(call: NodeCall, padding: Operand, bias: Operand, length: int) -> torch.Tensor | None:
    """Return the attention mask, or the bias with masked positions at -inf."""
    if padding is None:
        return None if bias is None else call.tensor(bias)
    mask = call.tensor(padding)
    if mask.ndim == 1 and mask.shape[0] != length:
        mask = torch.arange(length) < mask.unsqueeze(-1)
    if mask.ndim not in (2, 3) or mask.shape[-1] != length:
        raise Unsupported("its mask has a shape of its own")
    visible = mask.bool()[:, None, None] if mask.ndim == 2 else mask.bool()[:, None]
    return visible if bias is None else call.tensor(bias).masked_fill(~visible, -math.inf)
