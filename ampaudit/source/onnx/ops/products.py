"""Matrix products, convolutions, quantization, attention and recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ampaudit.source.onnx.files import unpacked
from ampaudit.source.onnx.ops.elementwise import PLAIN, WITH_ALPHA, cast_tensor, dtype_attribute
from ampaudit.source.onnx.values import Known, NodeCall, Operand, Unsupported, operator

_SUPPORTED_ATTRIBUTES = set(
    "is_causal kv_num_heads q_num_heads scale softcap softmax_precision qk_matmul_output_mode".split()
)
_DEFAULT_ACTIVATIONS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
_GATES = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}  # torch's order, as positions in ONNX
_ACTIVATIONS = ("Relu", "Tanh", "Sigmoid", "Softsign", "Softplus")
_ACTIVATIONS_WITH_ALPHA = ("LeakyRelu", "Elu")


@operator("Gemm")
def gemm(call: NodeCall, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    """Multiply two matrices and add a third; the form of a linear layer becomes torch's linear."""
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    left, right = (call.attribute(name, 0) for name in ("transA", "transB"))
    if alpha == beta == 1 and right and not left and (c is None or c.ndim == 1):
        return F.linear(a, b, c)
    first, second = a.T if left else a, b.T if right else b
    if c is not None:
        return torch.addmm(c, first, second, beta=beta, alpha=alpha)
    product = torch.mm(first, second)
    return product if alpha == 1 else product * alpha


@operator("Einsum")
def einsum(call: NodeCall, *values: Tensor) -> Tensor:
    """Evaluate a product in Einstein notation."""
    return torch.einsum(str(call.attribute("equation")), *values)


@operator("Conv")
def conv(call: NodeCall, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a convolution."""
    rank = x.ndim - 2
    strides, dilations = call.attribute("strides") or [1] * rank, call.attribute("dilations") or [1] * rank
    pads = pads_of(call, list(x.shape[2:]), list(weight.shape[2:]), strides, dilations)
    before, after = pads[:rank], pads[rank:]
    if before != after:
        x, before = torch.constant_pad_nd(x, last_axis_first(before, after)), [0] * rank
    function = (torch.conv1d, torch.conv2d, torch.conv3d)[rank - 1]
    return function(x, weight, bias, strides, before, dilations, call.attribute("group", 1))


def last_axis_first(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Return the padding before and after each axis in torch's order, which begins with the last axis."""
    return [width for pair in list(zip(before, after, strict=True))[::-1] for width in pair]


def pads_of(
    call: NodeCall, sizes: list[int], kernel: list[int], strides: list[int], dilations: list[int]
) -> list[int]:
    """Return the padding before each axis, then that after each axis."""
    how = call.attribute("auto_pad", "NOTSET")
    if how in ("NOTSET", "VALID"):
        pads: list[int] | None = call.attribute("pads") if how == "NOTSET" else None
        return pads if pads is not None else [0] * (2 * len(sizes))
    before, after = [], []
    for size, width, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        total = max(0, (-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size)
        less = total // 2
        first = less if how == "SAME_UPPER" else total - less
        before.append(first)
        after.append(total - first)
    return [*before, *after]


@operator("ConvTranspose")
def conv_transpose(call: NodeCall, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Apply the transpose of a convolution."""
    rank, sizes = x.ndim - 2, x.shape[2:]
    strides, dilations = call.attribute("strides") or [1] * rank, call.attribute("dilations") or [1] * rank
    extra, groups = call.attribute("output_padding") or [0] * rank, call.attribute("group", 1)
    output_shape, how = call.attribute("output_shape"), call.attribute("auto_pad", "NOTSET")
    pads = call.attribute("pads") or [0] * (2 * rank)
    full = [
        (size - 1) * stride + (width - 1) * dilation + 1
        for size, stride, width, dilation in zip(sizes, strides, weight.shape[2:], dilations, strict=True)
    ]
    if output_shape is None and how.startswith("SAME"):
        output_shape = [size * stride for size, stride in zip(sizes, strides, strict=True)]
    if output_shape is not None:
        totals = [f + e - size for f, e, size in zip(full, extra, output_shape[-rank:], strict=True)]
        extra = [e + max(0, -total) for e, total in zip(extra, totals, strict=True)]
        totals = [max(0, total) for total in totals]
        less, more = [t // 2 for t in totals], [t - t // 2 for t in totals]
        pads = [*less, *more] if how == "SAME_UPPER" else [*more, *less]
    before, after = pads[:rank], pads[rank:]
    function: Any = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)[rank - 1]
    fits = all(e < max(limits) for e, *limits in zip(extra, strides, dilations, strict=True))
    if before == after and fits:
        return function(x, weight, bias, strides, before, extra, groups, dilations)
    result = function(x, weight, None, strides, [0] * rank, [0] * rank, groups, dilations)
    ends = [e - a for e, a in zip(extra, after, strict=True)]
    result = torch.constant_pad_nd(result, last_axis_first([-width for width in before], ends))
    return result if bias is None else result + bias.reshape(-1, *[1] * rank)


@operator("FusedMatMul", domain="com.microsoft")
def fused_matmul(call: NodeCall, a: Tensor, b: Tensor) -> Any:
    """Multiply matrices, which may be transposed, and scale the product."""
    if call.attribute("transBatchA", 0) or call.attribute("transBatchB", 0):
        raise Unsupported("its batches are transposed")
    first = a.mT if call.attribute("transA", 0) else a
    second = b.mT if call.attribute("transB", 0) else b
    alpha = call.attribute("alpha", 1.0)
    product = torch.matmul(first, second)
    return product if alpha == 1 else product * alpha


def _along(call: NodeCall, part: Tensor, tensor: Tensor) -> Tensor:
    """Reshape scales or zero points to broadcast to a tensor: one, one per slice, or one per block."""
    axis, size = call.attribute("axis", 1), call.attribute("block_size", 0)
    if size:
        repeated = part.repeat_interleave(size, axis)
        return repeated.narrow(axis, 0, tensor.shape[axis])
    if part.ndim == 1 and tensor.ndim > 0 and part.numel() > 1:
        return part.reshape([-1 if a == axis % tensor.ndim else 1 for a in range(tensor.ndim)])
    return part.reshape(()) if part.numel() == 1 else part


@operator("QuantizeLinear")
def quantize(call: NodeCall, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Any:
    """Divide, round and clamp."""
    call.reject_sub_byte_type(2)
    dtype = zero.dtype if zero is not None else dtype_attribute(call, "output_dtype", torch.uint8)
    quotient = x / _along(call, scale, x).to(x.dtype)
    if dtype.is_floating_point:
        return cast_tensor(call, quotient, dtype)
    quotient = torch.round(quotient)
    if zero is not None:
        quotient = quotient + _along(call, zero, x).to(quotient.dtype)
    return _clamped(quotient, dtype)


def _clamped(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    limits = torch.iinfo(dtype)
    return torch.clamp(tensor, limits.min, limits.max).to(dtype)


@operator("DequantizeLinear")
def dequantize(call: NodeCall, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Any:
    """Subtract the zero point and multiply."""
    dtype = dtype_attribute(call, "output_dtype", scale.dtype)
    wide = x.to(scale.dtype)
    if zero is not None:
        wide = wide - _along(call, zero, x).to(scale.dtype)
    return (wide * _along(call, scale, x)).to(dtype)


@operator("MatMulInteger")
def matmul_integer(
    call: NodeCall, a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None
) -> Any:
    """Multiply matrices of integers."""
    first, second = a.int(), b.int()
    if a_zero is not None:
        zero = a_zero.int()
        first = first - (zero.unsqueeze(-1) if zero.ndim == 1 else zero)
    if b_zero is not None:
        second = second - b_zero.int()
    return torch.matmul(first, second)


@operator("QLinearMatMul")
def quantized_matmul(call: NodeCall, *values: Tensor) -> Any:
    """Multiply matrices of quantized numbers, and quantize the result."""
    a, a_scale, a_zero, b, b_scale, b_zero, scale, zero = values
    first, second = a.float() - _rows(a_zero), b.float() - b_zero.float()
    product = torch.matmul(first * _rows(a_scale), second * b_scale.float())
    return _clamped(torch.round(product / _rows(scale)) + _rows(zero), zero.dtype)


def _rows(part: Tensor) -> Tensor:
    return part.float().unsqueeze(-1) if part.ndim == 1 and part.numel() > 1 else part.float()


@operator("MatMulNBits", domain="com.microsoft")
def matmul_n_bits(
    call: NodeCall,
    x: Tensor,
    b: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    groups: Operand = None,
    bias: Tensor | None = None,
) -> Any:
    """Multiply by a matrix of integers with few bits, which is dequantized first."""
    rows, columns, size = call.attribute("N"), call.attribute("K"), call.attribute("block_size")
    bits = call.attribute("bits", 4)
    if groups is not None or bits not in (2, 4, 8):
        raise Unsupported("its weights are ordered by groups")
    blocks = -(-columns // size)
    factor = scales.reshape(rows, blocks, 1)
    packed = unpacked(b.reshape(rows, blocks, -1), bits)[..., :size].to(x.dtype)
    if zeros is None:
        offset: Any = float(1 << (bits - 1))
    else:
        offset = zeros if zeros.is_floating_point() else unpacked(zeros.reshape(rows, -1), bits)
        offset = offset.reshape(rows, -1)[:, :blocks].unsqueeze(-1).to(x.dtype)
    weight = ((packed - offset) * factor).reshape(rows, -1)[:, :columns]
    return F.linear(x, weight, bias)


@operator("Attention")
def attention(
    call: NodeCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    lengths: Operand = None,
) -> Any:
    """Compute attention; the standard's function covers arguments that torch's op lacks."""
    others = set(call.node.attributes) - _SUPPORTED_ATTRIBUTES
    if others or call.attribute("softcap", 0.0) or call.is_read(3) or lengths is not None:
        raise Unsupported("torch's attention has no such argument")
    heads = [call.attribute(name) for name in ("q_num_heads", "kv_num_heads", "kv_num_heads")]
    query, key, value = (_split_heads(t, n) for t, n in zip((q, k, v), heads, strict=True))
    key, value = _with_past(past_key, key), _with_past(past_value, value)
    before = key.shape[2] - query.shape[2] if past_key is not None else 0
    if mask is not None and mask.shape[-1] != key.shape[2]:
        raise Unsupported("its mask is shorter than the keys")
    result = _attend(call, query, key, value, mask, bool(call.attribute("is_causal", 0)), before)
    return (_merge_heads(result) if q.ndim == 3 else result), key, value


def _split_heads(tensor: Tensor, heads: int | None) -> Tensor:
    """Return a tensor with heads before the sequence."""
    if tensor.ndim == 4 or heads is None:
        return tensor
    return tensor.reshape(*tensor.shape[:2], heads, -1).transpose(1, 2)


def _merge_heads(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).flatten(2)


def _with_past(past: Tensor | None, tensor: Tensor) -> Tensor:
    return tensor if past is None else torch.cat([past, tensor], 2)


def _attend(
    call: NodeCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    before: int,
) -> Tensor:
    """Compute attention; ``before`` is the number of keys before the first query."""
    grouped = query.shape[1] != key.shape[1]
    scale = call.attribute("scale") or None
    if causal and (mask is not None or before):
        reach = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(before)
        if mask is None:
            mask = reach
        else:
            mask = mask & reach if mask.dtype == torch.bool else mask.masked_fill(~reach, -math.inf)
        causal = False
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


@operator("MultiHeadAttention", domain="com.microsoft")
def multi_head_attention(
    call: NodeCall,
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    bias: Tensor | None = None,
    padding: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    *others: Operand,
) -> Any:
    """Compute attention on tensors that are not yet split into heads."""
    if k is None or v is None or q.ndim != 3 or any(other is not None for other in others):
        raise Unsupported("its tensors are packed")
    heads, tensors = call.attribute("num_heads"), [q, k, v]
    if bias is not None:
        sizes = [t.shape[-1] if t.ndim == 3 else t.shape[1] * t.shape[3] for t in tensors]
        parts = bias.split(sizes)
        tensors = [
            t + (part if t.ndim == 3 else part.reshape(heads, 1, -1))
            for t, part in zip(tensors, parts, strict=True)
        ]
    query, key, value = (_split_heads(t, heads) for t in tensors)
    key, value = _with_past(past_key, key), _with_past(past_value, value)
    mask = _mask_of(padding, attention_bias, key.shape[2])
    causal = bool(call.attribute("unidirectional", 0))
    result = _attend(call, query, key, value, mask, causal, key.shape[2] - query.shape[2])
    return _merge_heads(result), key, value


@operator("Attention", domain="com.microsoft")
def packed_attention(
    call: NodeCall,
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    padding: Tensor | None = None,
    past: Operand = None,
    attention_bias: Tensor | None = None,
    *others: Operand,
) -> Any:
    """Compute queries, keys and values in one product, then attention."""
    if past is not None or call.attribute("do_rotary", 0) or any(other is not None for other in others):
        raise Unsupported("it has a cache")
    product = F.linear(x, weights.T, bias)
    q, k, v = product.split(call.attribute("qkv_hidden_sizes") or [product.shape[-1] // 3] * 3, -1)
    result, key, value = multi_head_attention(call, q, k, v, None, padding, attention_bias)
    return result, torch.stack([key, value]) if call.is_read(1) else None


def _mask_of(mask: Tensor | None, bias: Tensor | None, length: int) -> Tensor | None:
    """Return the attention mask, or the bias with masked positions at -inf."""
    if mask is None:
        return bias
    if mask.ndim == 1 and mask.shape[0] != length:
        mask = torch.arange(length) < mask.unsqueeze(-1)
    if mask.ndim not in (2, 3) or mask.shape[-1] != length:
        raise Unsupported(f"its mask has the shape {list(mask.shape)}")
    visible = mask.bool()[:, None, None] if mask.ndim == 2 else mask.bool()[:, None]
    return visible if bias is None else bias.masked_fill(~visible, -math.inf)


@operator("LSTM", "GRU", "RNN")
def recurrent(
    call: NodeCall,
    tensor: Tensor,
    weights: Tensor,
    recurrence: Tensor,
    bias: Tensor | None = None,
    lengths: Operand = None,
    h: Tensor | None = None,
    c: Tensor | None = None,
    peepholes: Tensor | None = None,
) -> Any:
    """Run a recurrent layer over a sequence; outputs are the sequence and the last states."""
    by_batch = call.attribute("layout", 0) == 1
    if by_batch:
        tensor = tensor.transpose(0, 1)
    steps, directions, hidden = tensor.shape[0], weights.shape[0], recurrence.shape[-1]
    shape = [directions, tensor.shape[1], hidden]
    states = [_start(state, shape, tensor, by_batch) for state in (h, c)]
    rows = len(_GATES[call.node.op_type]) * hidden
    _check_sizes("W", weights, [directions, rows, tensor.shape[2]])
    _check_sizes("R", recurrence, [directions, rows, hidden])
    if bias is not None:
        _check_sizes("B", bias, [directions, 2 * rows])
    for state in states:
        _check_sizes("an initial state", state, shape)
    layer = call, tensor, weights, recurrence, bias, states if call.node.op_type == "LSTM" else states[:1]
    if isinstance(lengths, Known) and set(lengths.items()) == {steps}:
        lengths = None
    results = _fused(*layer) if lengths is None and peepholes is None else None
    if results is None:
        results = _stepped(*layer, None if lengths is None else call.tensor(lengths), peepholes)
    sequence, *last = results
    if by_batch:
        sequence, last = sequence.permute(2, 0, 1, 3), [state.transpose(0, 1) for state in last]
    return (sequence, *last)


def _check_sizes(what: str, tensor: Tensor, shape: list[int]) -> None:
    """Check a shape, because torch's LSTM would read and write beyond the end of a smaller tensor."""
    if list(tensor.shape) != shape:
        raise RuntimeError(f"{what} has the sizes {list(tensor.shape)} and should have {shape}")


def _start(state: Tensor | None, shape: list[int], like: Tensor, by_batch: bool) -> Tensor:
    if state is None:
        return torch.zeros(shape, dtype=like.dtype)
    return state.transpose(0, 1) if by_batch else state


def _fused(
    call: NodeCall,
    tensor: Tensor,
    weights: Tensor,
    recurrence: Tensor,
    bias: Tensor | None,
    states: list[Tensor],
) -> list[Tensor] | None:
    """Run torch's layer; ``None`` if it does not compute the same function."""
    name, directions = call.node.op_type, weights.shape[0]
    names = call.attribute("activations") or _DEFAULT_ACTIVATIONS[name] * directions
    relu = name == "RNN" and set(names) == {"Relu"}
    usual = names == _DEFAULT_ACTIVATIONS[name] * directions or relu
    after = name != "GRU" or call.attribute("linear_before_reset", 0)
    if not usual or not after or call.attribute("clip") is not None or call.attribute("input_forget", 0):
        return None
    parameters = []
    for d in range(directions):
        parameters += [_in_torch_order(name, weights[d]), _in_torch_order(name, recurrence[d])]
        if bias is not None:
            parameters += [_in_torch_order(name, part) for part in bias[d].chunk(2)]
    back = call.attribute("direction") == "reverse"
    tensor = tensor.flip(0) if back else tensor
    rest: Any = (parameters, bias is not None, 1, 0.0, False, directions == 2, False)
    if name == "LSTM":
        sequence, *last = torch.lstm(tensor, tuple(states), *rest)
    else:
        function: Any = torch.gru if name == "GRU" else torch.rnn_relu if relu else torch.rnn_tanh
        sequence, *last = function(tensor, states[0], *rest)
    sequence = sequence.reshape(*sequence.shape[:2], directions, -1).transpose(1, 2)
    return [sequence.flip(0) if back else sequence, *last]


def _in_torch_order(name: str, stacked: Tensor) -> Tensor:
    parts = stacked.chunk(len(_GATES[name]))
    return torch.cat([parts[place] for place in _GATES[name]]) if len(parts) > 1 else stacked


def _stepped(
    call: NodeCall,
    tensor: Tensor,
    weights: Tensor,
    recurrence: Tensor,
    bias: Tensor | None,
    states: list[Tensor],
    ends: Tensor | None,
    peepholes: Tensor | None,
) -> list[Tensor]:
    """Compute each step by the equations of the standard."""
    name, directions, steps = call.node.op_type, weights.shape[0], tensor.shape[0]
    sequences, lasts = [], []
    for d in range(directions):
        back = d == 1 or call.attribute("direction") == "reverse"
        sequence = _reversed(tensor, ends) if back else tensor
        peeps = None if peepholes is None else peepholes[d].chunk(3)
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


def _reversed(tensor: Tensor, ends: Tensor | None) -> Tensor:
    """Reverse each sequence of a batch."""
    if ends is None:
        return tensor.flip(0)
    steps = torch.arange(tensor.shape[0]).unsqueeze(1)
    places = torch.where(steps < ends, ends - 1 - steps, steps).long()
    return torch.gather(tensor, 0, places.unsqueeze(-1).expand_as(tensor))


def _activations(call: NodeCall, direction: int, directions: int) -> list[Callable[..., Any]]:
    usual = _DEFAULT_ACTIVATIONS[call.node.op_type]
    names = call.attribute("activations") or usual * directions
    names = names[direction * len(usual) : (direction + 1) * len(usual)]
    alphas = call.attribute("activation_alpha") or []
    functions: list[Callable[..., Any]] = []
    for name in names:
        if name in _ACTIVATIONS_WITH_ALPHA:
            function, alpha = WITH_ALPHA[name]
            slope = alphas.pop(0) if alphas else alpha
            functions.append(lambda x, f=function, slope=slope: f(x, slope))
        elif name in _ACTIVATIONS:
            functions.append(PLAIN[name])
        else:
            raise Unsupported(f"no activation {name}")
    return functions


def _clipped(call: NodeCall, tensor: Tensor) -> Tensor:
    limit = call.attribute("clip")
    return tensor if limit is None else torch.clamp(tensor, -limit, limit)


def _lstm(call: NodeCall, f: Any, r: Tensor, bias: Any, peeps: Any, x: Tensor, h: Any, c: Any) -> Any:
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


def _gru(call: NodeCall, f: Any, r: Tensor, bias: Any, _peeps: Any, x: Tensor, h: Any) -> Any:
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


def _rnn(call: NodeCall, f: Any, r: Tensor, bias: Any, _peeps: Any, x: Tensor, h: Any) -> Any:
    total = x + F.linear(h, r)
    return [f[0](_clipped(call, total if bias is None else total + sum(bias.chunk(2))))]


_CELLS: dict[str, Callable[..., Any]] = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}
