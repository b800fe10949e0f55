"""Matrix products and convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from ampaudit.source.onnx.ops.elementwise import attribute_text, cast_tensor, named_dtype
from ampaudit.source.onnx.values import Known, NodeCall, Operand, Unsupported, operator

_UNDERSTOOD = set(
    "is_causal kv_num_heads q_num_heads scale softcap softmax_precision qk_matmul_output_mode".split()
)
_USUAL = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
_GATES = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}  # torch's order, as positions in ONNX
_ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "Relu": torch.relu, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid, "Softsign": F.softsign,
    "Softplus": F.softplus,
}  # fmt: skip
_SLOPES = {"LeakyRelu": "negative_slope", "Elu": "alpha"}
_WITH_ALPHA: dict[str, tuple[Callable[..., Any], float]] = {
    "LeakyRelu": (F.leaky_relu, 0.01), "Elu": (F.elu, 1.0),
}  # fmt: skip


@operator("MatMul")
def matmul(call: NodeCall, a: Operand, b: Operand) -> torch.Tensor:
    """Multiply matrices."""
    return torch.matmul(call.tensor(a), call.tensor(b))


@operator("Gemm")
def gemm(call: NodeCall, a: Operand, b: Operand, c: Operand = None) -> torch.Tensor:
    """Multiply two matrices, and add a third; a layer's weights are those of torch's linear."""
    if _is_linear(call, c):
        bias = None if c is None else call.tensor(c)
        return F.linear(call.tensor(a), call.tensor(b), bias)
    first = call.tensor(a).T if call.attribute("transA", 0) else call.tensor(a)
    second = call.tensor(b).T if call.attribute("transB", 0) else call.tensor(b)
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    if c is not None:
        return torch.addmm(call.tensor(c), first, second, beta=beta, alpha=alpha)
    product = torch.mm(first, second)
    return product if alpha == 1 else product * alpha


def _is_linear(call: NodeCall, c: Operand) -> bool:
    plain = call.attribute("alpha", 1.0) == call.attribute("beta", 1.0) == 1
    straight = not call.attribute("transA", 0) and call.attribute("transB", 0)
    return bool(plain and straight) and (c is None or call.tensor(c).ndim == 1)


@operator("Einsum")
def einsum(call: NodeCall, *values: Operand) -> torch.Tensor:
    """Sum products over indices."""
    return torch.einsum(str(call.attribute("equation")), *(call.tensor(value) for value in values))


@operator("Conv")
def conv(call: NodeCall, x: Operand, w: Operand, b: Operand = None) -> torch.Tensor:
    """Convolve."""
    tensor, weight = call.tensor(x), call.tensor(w)
    rank = tensor.ndim - 2
    strides = list(call.attribute("strides") or [1] * rank)
    dilations = list(call.attribute("dilations") or [1] * rank)
    pads = pads_of(call, list(tensor.shape[2:]), list(weight.shape[2:]), strides, dilations)
    before, after = pads[:rank], pads[rank:]
    if before != after:
        tensor = torch.constant_pad_nd(
            tensor, [p for pair in zip(before[::-1], after[::-1], strict=True) for p in pair]
        )
        before = [0] * rank
    function = (torch.conv1d, torch.conv2d, torch.conv3d)[rank - 1]
    bias = None if b is None else call.tensor(b)
    return function(tensor, weight, bias, strides, before, dilations, call.attribute("group", 1))


def pads_of(
    call: NodeCall, sizes: list[int], kernel: list[int], strides: list[int], dilations: list[int]
) -> list[int]:
    """Return the widths before and after each axis."""
    how = str(call.attribute("auto_pad", "NOTSET"))
    if how in ("NOTSET", "VALID"):
        pads = call.attribute("pads") if how == "NOTSET" else None
        return list(pads) if pads is not None else [0] * (2 * len(sizes))
    before, after = [], []
    for size, width, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        total = max(0, (-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size)
        less = total // 2
        first = less if how == "SAME_UPPER" else total - less
        before.append(first)
        after.append(total - first)
    return [*before, *after]


@operator("ConvTranspose")
def conv_transpose(call: NodeCall, x: Operand, w: Operand, b: Operand = None) -> Any:
    """Apply the transpose of a convolution."""
    tensor, weight = call.tensor(x), call.tensor(w)
    rank = tensor.ndim - 2
    strides = list(call.attribute("strides") or [1] * rank)
    dilations = list(call.attribute("dilations") or [1] * rank)
    extra = list(call.attribute("output_padding") or [0] * rank)
    output_shape, how = call.attribute("output_shape"), attribute_text(call, "auto_pad", "NOTSET")
    pads = list(call.attribute("pads") or [0] * (2 * rank))
    full = [
        (size - 1) * stride + (width - 1) * dilation + 1
        for size, stride, width, dilation in zip(
            tensor.shape[2:], strides, weight.shape[2:], dilations, strict=True
        )
    ]
    if output_shape is None and how.startswith("SAME"):
        output_shape = [size * stride for size, stride in zip(tensor.shape[2:], strides, strict=True)]
    if output_shape is not None:
        totals = [f + e - size for f, e, size in zip(full, extra, list(output_shape)[-rank:], strict=True)]
        extra = [e + max(0, -total) for e, total in zip(extra, totals, strict=True)]
        totals = [max(0, total) for total in totals]
        less, more = [t // 2 for t in totals], [t - t // 2 for t in totals]
        pads = [*less, *more] if how == "SAME_UPPER" else [*more, *less]
    before, after = pads[:rank], pads[rank:]
    bias = None if b is None else call.tensor(b)
    functions: Any = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
    limits = [max(stride, dilation) for stride, dilation in zip(strides, dilations, strict=True)]
    fits = all(e < limit for e, limit in zip(extra, limits, strict=True))
    ends = [e - a for e, a in zip(extra, after, strict=True)]
    if before == after and fits:
        return functions[rank - 1](
            tensor, weight, bias, strides, before, extra, call.attribute("group", 1), dilations
        )
    result = functions[rank - 1](
        tensor, weight, None, strides, [0] * rank, [0] * rank, call.attribute("group", 1), dilations
    )
    pairs = list(zip(before, ends, strict=True))[::-1]
    result = torch.constant_pad_nd(result, [w for first, last in pairs for w in (-first, last)])
    return result if bias is None else result + bias.reshape(-1, *[1] * rank)


@operator("FusedMatMul", domain="com.microsoft")
def fused_matmul(call: NodeCall, a: Operand, b: Operand) -> Any:
    """Multiply matrices that may be transposed, and a number."""
    if call.attribute("transBatchA", 0) or call.attribute("transBatchB", 0):
        raise Unsupported("its batches are transposed")
    first = call.tensor(a).mT if call.attribute("transA", 0) else call.tensor(a)
    second = call.tensor(b).mT if call.attribute("transB", 0) else call.tensor(b)
    alpha = call.attribute("alpha", 1.0)
    product = torch.matmul(first, second)
    return product if alpha == 1 else product * alpha


def _along(call: NodeCall, part: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Reshape scales or zero points to broadcast to a tensor: one, one per slice, or one per block."""
    axis, size = call.attribute("axis", 1), call.attribute("block_size", 0)
    if size:
        repeated = part.repeat_interleave(size, axis)
        return repeated.narrow(axis, 0, tensor.shape[axis])
    if part.ndim == 1 and tensor.ndim > 0 and part.numel() > 1:
        return part.reshape([-1 if a == axis % tensor.ndim else 1 for a in range(tensor.ndim)])
    return part.reshape(()) if part.numel() == 1 else part


@operator("QuantizeLinear")
def quantize(call: NodeCall, x: Operand, scale: Operand, zero: Operand = None) -> Any:
    """Divide, round and clamp."""
    tensor, factor = call.tensor(x), call.tensor(scale)
    call.refuse_few_bits(2)
    offset = None if zero is None else call.tensor(zero)
    dtype = offset.dtype if offset is not None else named_dtype(call, "output_dtype", torch.uint8)
    quotient = tensor / _along(call, factor, tensor).to(tensor.dtype)
    if dtype.is_floating_point:
        return cast_tensor(call, quotient, dtype)
    quotient = torch.round(quotient)
    if offset is not None:
        quotient = quotient + _along(call, offset, tensor).to(quotient.dtype)
    limits = torch.iinfo(dtype)
    return torch.clamp(quotient, limits.min, limits.max).to(dtype)


@operator("DequantizeLinear")
def dequantize(call: NodeCall, x: Operand, scale: Operand, zero: Operand = None) -> Any:
    """Subtract the zero point and multiply."""
    tensor, factor = call.tensor(x), call.tensor(scale)
    dtype = named_dtype(call, "output_dtype", factor.dtype)
    wide = tensor.to(factor.dtype)
    if zero is not None:
        wide = wide - _along(call, call.tensor(zero), tensor).to(factor.dtype)
    return (wide * _along(call, factor, tensor)).to(dtype)


@operator("MatMulInteger")
def matmul_integer(
    call: NodeCall, a: Operand, b: Operand, a_zero: Operand = None, b_zero: Operand = None
) -> Any:
    """Multiply matrices of integers."""
    first, second = call.tensor(a).int(), call.tensor(b).int()
    if a_zero is not None:
        zero = call.tensor(a_zero).int()
        first = first - (zero.unsqueeze(-1) if zero.ndim == 1 else zero)
    if b_zero is not None:
        second = second - call.tensor(b_zero).int()
    return torch.matmul(first, second)


@operator("QLinearMatMul")
def quantized_matmul(call: NodeCall, *values: Operand) -> Any:
    """Multiply matrices of quantized numbers, and quantize the result."""
    a, a_scale, a_zero, b, b_scale, b_zero, scale, zero = (call.tensor(value) for value in values)
    first, second = a.float() - _rows(a_zero), b.float() - b_zero.float()
    product = torch.matmul(first * _rows(a_scale), second * b_scale.float())
    quotient = torch.round(product / _rows(scale)) + _rows(zero)
    limits = torch.iinfo(zero.dtype)
    return torch.clamp(quotient, limits.min, limits.max).to(zero.dtype)


def _rows(part: torch.Tensor) -> torch.Tensor:
    return part.float().unsqueeze(-1) if part.ndim == 1 and part.numel() > 1 else part.float()


@operator("MatMulNBits", domain="com.microsoft")
def matmul_n_bits(
    call: NodeCall,
    a: Operand,
    b: Operand,
    scales: Operand,
    zeros: Operand = None,
    groups: Operand = None,
    bias: Operand = None,
) -> Any:
    """Multiply by a matrix of numbers with few bits, which is converted first."""
    rows, columns, size = call.attribute("N"), call.attribute("K"), call.attribute("block_size")
    bits = call.attribute("bits", 4)
    if groups is not None or bits not in (2, 4, 8):
        raise Unsupported("its weights are ordered by groups")
    blocks, tensor = -(-columns // size), call.tensor(a)
    factor = call.tensor(scales).reshape(rows, blocks, 1)
    packed = _unpacked(call.tensor(b).reshape(rows, blocks, -1), bits)[..., :size].to(tensor.dtype)
    if zeros is None:
        offset: Any = float(1 << (bits - 1))
    else:
        points = call.tensor(zeros)
        offset = points if points.is_floating_point() else _unpacked(points.reshape(rows, -1), bits)
        offset = offset.reshape(rows, -1)[:, :blocks].unsqueeze(-1).to(tensor.dtype)
    weight = ((packed - offset) * factor).reshape(rows, -1)[:, :columns]
    return torch.nn.functional.linear(tensor, weight, None if bias is None else call.tensor(bias))


def _unpacked(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack the numbers in bytes, low bits first."""
    parts = [tensor >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).flatten(-2)


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


@operator("LSTM", "GRU", "RNN")
def recurrent(
    call: NodeCall,
    x: Operand,
    w: Operand,
    r: Operand,
    b: Operand = None,
    lengths: Operand = None,
    h: Operand = None,
    c: Operand = None,
    peepholes: Operand = None,
) -> Any:
    """Run a recurrent layer over a sequence; outputs are the sequence and the last states."""
    tensor, weights, recurrence = call.tensor(x), call.tensor(w), call.tensor(r)
    bias = None if b is None else call.tensor(b)
    by_batch = call.attribute("layout", 0) == 1
    if by_batch:
        tensor = tensor.transpose(0, 1)
    steps, directions, hidden = tensor.shape[0], weights.shape[0], recurrence.shape[-1]
    shape = [directions, tensor.shape[1], hidden]
    states = [_start(call, state, shape, tensor, by_batch) for state in (h, c)]
    states = states if call.node.op_type == "LSTM" else states[:1]
    if isinstance(lengths, Known) and set(lengths.items()) == {steps}:
        lengths = None
    results = None
    if lengths is None and peepholes is None:
        results = _fused(call, tensor, weights, recurrence, bias, states)
    if results is None:
        results = _stepped(call, tensor, weights, recurrence, bias, states, lengths, peepholes)
    sequence, *last = results
    if by_batch:
        sequence, last = sequence.permute(2, 0, 1, 3), [state.transpose(0, 1) for state in last]
    return (sequence, *last)


def _start(
    call: NodeCall, state: Operand, shape: list[int], like: torch.Tensor, by_batch: bool
) -> torch.Tensor:
    if state is None:
        return torch.zeros(shape, dtype=like.dtype)
    tensor = call.tensor(state)
    return tensor.transpose(0, 1) if by_batch else tensor


def _fused(
    call: NodeCall,
    tensor: torch.Tensor,
    weights: torch.Tensor,
    recurrence: torch.Tensor,
    bias: torch.Tensor | None,
    states: list[torch.Tensor],
) -> list[torch.Tensor] | None:
    """Run torch's layer; ``None`` if it does not compute the same."""
    name, directions = call.node.op_type, weights.shape[0]
    names = list(call.attribute("activations") or _USUAL[name] * directions)
    relu = name == "RNN" and set(names) == {"Relu"}
    usual = names == _USUAL[name] * directions or relu
    after = name != "GRU" or call.attribute("linear_before_reset", 0)
    if not usual or not after or call.attribute("clip") is not None or call.attribute("input_forget", 0):
        return None
    parameters = []
    for d in range(directions):
        parameters += [_in_torch_order(name, weights[d]), _in_torch_order(name, recurrence[d])]
        if bias is not None:
            parameters += [_in_torch_order(name, part) for part in bias[d].chunk(2)]
    back = attribute_text(call, "direction", "forward") == "reverse"
    tensor = tensor.flip(0) if back else tensor
    rest: Any = (parameters, bias is not None, 1, 0.0, False, directions == 2, False)
    if name == "LSTM":
        sequence, *last = torch.lstm(tensor, tuple(states), *rest)
    else:
        function: Any = torch.gru if name == "GRU" else torch.rnn_relu if relu else torch.rnn_tanh
        sequence, *last = function(tensor, states[0], *rest)
    sequence = sequence.reshape(*sequence.shape[:2], directions, -1).transpose(1, 2)
    return [sequence.flip(0) if back else sequence, *last]


def _in_torch_order(name: str, stacked: torch.Tensor) -> torch.Tensor:
    parts = stacked.chunk(len(_GATES[name]))
    return torch.cat([parts[place] for place in _GATES[name]]) if len(parts) > 1 else stacked


def _stepped(
    call: NodeCall,
    tensor: torch.Tensor,
    weights: torch.Tensor,
    recurrence: torch.Tensor,
    bias: torch.Tensor | None,
    states: list[torch.Tensor],
    lengths: Operand,
    peepholes: Operand,
) -> list[torch.Tensor]:
    """Compute each step by the equations of the standard."""
    name, directions, steps = call.node.op_type, weights.shape[0], tensor.shape[0]
    ends = None if lengths is None else call.tensor(lengths)
    sequences, lasts = [], []
    for d in range(directions):
        back = d == 1 or attribute_text(call, "direction", "forward") == "reverse"
        sequence = _reversed(tensor, ends) if back else tensor
        peeps = None if peepholes is None else call.tensor(peepholes)[d].chunk(3)
        cell = partial(
            _CELLS[name], call, _activations(call, d, directions), recurrence[d],
            None if bias is None else bias[d], peeps,
        )  # fmt: skip
        state, rows = [s[d] for s in states], []
        for step in range(steps):
            new = cell(F.linear(sequence[step], weights[d]), *state)
            row = new[0]
            if ends is not None:
                running = (ends > step).unsqueeze(-1)
                new = [torch.where(running, fresh, old) for fresh, old in zip(new, state, strict=True)]
                row = torch.where(running, row, torch.zeros_like(row))
            state = list(new)
            rows.append(row)
        stacked = torch.stack(rows)
        sequences.append(_reversed(stacked, ends) if back else stacked)
        lasts.append(state)
    return [torch.stack(sequences, 1), *(torch.stack(list(parts)) for parts in zip(*lasts, strict=True))]


def _reversed(tensor: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
    """Reverse each sequence of a batch."""
    if ends is None:
        return tensor.flip(0)
    steps = torch.arange(tensor.shape[0]).unsqueeze(1)
    places = torch.where(steps < ends, ends - 1 - steps, steps).long()
    return torch.gather(tensor, 0, places.unsqueeze(-1).expand_as(tensor))


def _activations(call: NodeCall, direction: int, directions: int) -> list[Callable[..., Any]]:
    usual = _USUAL[call.node.op_type]
    names = list(call.attribute("activations") or usual * directions)
    names = names[direction * len(usual) : (direction + 1) * len(usual)]
    alphas = list(call.attribute("activation_alpha") or [])
    functions: list[Callable[..., Any]] = []
    for name in names:
        if name in _WITH_ALPHA:
            function, alpha = _WITH_ALPHA[name]
            functions.append(partial(function, **{_SLOPES[name]: alphas.pop(0) if alphas else alpha}))
        elif name in _ACTIVATIONS:
            functions.append(_ACTIVATIONS[name])
        else:
            raise Unsupported(f"no activation {name}")
    return functions


def _clipped(call: NodeCall, tensor: torch.Tensor) -> torch.Tensor:
    limit = call.attribute("clip")
    return tensor if limit is None else torch.clamp(tensor, -limit, limit)


def _lstm(
    call: NodeCall, f: Any, r: torch.Tensor, bias: Any, peeps: Any, x: torch.Tensor, h: Any, c: Any
) -> Any:
    total = x + F.linear(h, r)
    total = total if bias is None else total + sum(bias.chunk(2))
    i, o, forget, new = total.chunk(4, -1)
    if peeps is not None:
        i, forget = i + peeps[0] * c, forget + peeps[2] * c
    i = f[0](_clipped(call, i))
    forget = 1 - i if call.attribute("input_forget", 0) else f[0](_clipped(call, forget))
    c = forget * c + i * f[1](_clipped(call, new))
    o = o if peeps is None else o + peeps[1] * c
    return [f[0](_clipped(call, o)) * f[2](c), c]


def _gru(call: NodeCall, f: Any, r: torch.Tensor, bias: Any, peeps: Any, x: torch.Tensor, h: Any) -> Any:
    del peeps
    size = h.shape[-1]
    gates, inner = x[..., : 2 * size], x[..., 2 * size :]
    before = torch.zeros_like(r[:, 0]) if bias is None else bias.chunk(2)[1]
    if bias is not None:
        first = bias.chunk(2)[0]
        gates, inner = gates + first[: 2 * size], inner + first[2 * size :]
    gates = gates + F.linear(h, r[: 2 * size], before[: 2 * size])
    update, reset = (f[0](_clipped(call, part)) for part in gates.chunk(2, -1))
    if call.attribute("linear_before_reset", 0):
        new = inner + reset * F.linear(h, r[2 * size :], before[2 * size :])
    else:
        new = inner + F.linear(reset * h, r[2 * size :], before[2 * size :])
    return [(1 - update) * f[1](_clipped(call, new)) + update * h]


def _rnn(call: NodeCall, f: Any, r: torch.Tensor, bias: Any, peeps: Any, x: torch.Tensor, h: Any) -> Any:
    del peeps
    total = x + F.linear(h, r)
    return [f[0](_clipped(call, total if bias is None else total + sum(bias.chunk(2))))]


_CELLS: dict[str, Callable[..., Any]] = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}
