"""Recurrent layers: torch's where they compute the same, else step by step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from ampaudit.source.onnx.ops.activations import attribute_text
from ampaudit.source.onnx.ops.registry import operator
from ampaudit.source.onnx.values import Known, NodeCall, Operand, Unsupported

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
