"""Tests that weights stored in fewer than 16 bits are dequantized exactly, and that the rest is audited."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampaudit
from ampaudit.audit.inputs import as_source
from ampaudit.core.errors import SourceError
from ampaudit.source.dequantize import awq, gptq, scaled, unpack, with_plain_weights

ROWS, COLUMNS = 96, 128


def plain(model: nn.Module, inputs: Any) -> tuple[nn.Module, str]:
    """Return the dequantized copy, and its only note."""
    source = with_plain_weights(as_source(model, inputs))
    return source.model, "; ".join(source.notes)


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Pack integers along the first axis into words, bit by bit, as a long binary number."""
    ones = [(values >> bit) & 1 for bit in range(bits)]
    stream = torch.stack(ones, 1).reshape(-1, values.shape[1]).view(-1, 32, values.shape[1])
    words = sum(stream[:, bit].long() << bit for bit in range(32))
    assert isinstance(words, Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_unpack_reverses_packing_of_any_width(bits: int) -> None:
    values = torch.randint(0, 1 << bits, (64, 7))
    assert torch.equal(unpack(pack_bits(values, bits), bits, 64), values)


@pytest.mark.parametrize(
    ("shape", "scales", "block", "expected"),
    [
        ((4, 6), (), None, lambda s, i, j: s),
        ((4, 6), (4,), None, lambda s, i, j: s[i]),
        ((4, 6), (4, 1), None, lambda s, i, j: s[i, 0]),
        ((4, 6), (4, 3), None, lambda s, i, j: s[i, j // 2]),
        ((4, 6), (2, 2), (2, 4), lambda s, i, j: s[i // 2, j // 4]),
        ((200, 300), (2, 3), None, lambda s, i, j: s[i // 128, j // 128]),
    ],
)
def test_scales_cover_their_block(shape: Any, scales: Any, block: Any, expected: Any) -> None:
    values, scale = torch.randn(shape), torch.rand(scales) + 0.5
    made = scaled(values, scale, block)
    for i, j in ((0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, 1), (1, shape[1] // 2 + 1)):
        assert made[i, j] == values[i, j] * expected(scale, i, j)


def test_scales_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="scales of shape"):
        scaled(torch.ones(4, 6), torch.ones(4, 6, 1))
    with pytest.raises(ValueError, match="scales of shape"):
        scaled(torch.ones(4, 6), torch.ones(4, 4))


def codes_of(bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make codes (outputs, inputs), zeros and scales (outputs, groups), exact in float16."""
    codes = torch.randint(0, 1 << bits, (ROWS, COLUMNS))
    zeros = torch.randint(1, 1 << bits, (ROWS, COLUMNS // group))
    return codes, zeros, (torch.rand(ROWS, COLUMNS // group) + 0.5).half()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("reordered", [False, True])
@pytest.mark.parametrize("less_one", [False, True])
def test_gptq(bits: int, reordered: bool, less_one: bool) -> None:
    codes, zeros, scales = codes_of(bits, 32)
    group = torch.arange(COLUMNS) // 32
    group = group[torch.randperm(COLUMNS)] if reordered else group
    expected = (codes - zeros[:, group]).float() * scales.float()[:, group]
    layer = SimpleNamespace(
        bits=bits,
        qweight=pack_bits(codes.T, bits),
        qzeros=pack_bits(zeros - int(less_one), bits).T,
        scales=scales.T,
        g_idx=group if reordered else None,
    )
    assert torch.equal(gptq(layer, less_one=less_one), expected)


def test_awq_in_both_orders() -> None:
    codes, zeros, scales = codes_of(4, 32)
    expected = (codes - zeros.repeat_interleave(32, 1)).float() * scales.float().repeat_interleave(32, 1)
    order = torch.arange(ROWS).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
    sizes = {"group_size": 32, "in_features": COLUMNS, "out_features": ROWS}
    by_input = SimpleNamespace(
        qweight=pack_bits(codes[order], 4).T, qzeros=pack_bits(zeros[order], 4).T, scales=scales.T, **sizes
    )
    assert torch.equal(awq(by_input), expected)
    padded = (nn.functional.pad(item, (0, 4)) for item in (zeros, scales))
    zeros, scales = padded
    by_output = SimpleNamespace(
        qweight=pack_bits(codes.T, 4).T, qzeros=pack_bits(zeros.T, 4).T, scales=scales, **sizes
    )
    assert torch.equal(awq(by_output), expected)


# Layers of packages that are not installed: the same names, attributes and stored tensors.


class Linear4bit(nn.Linear):
    """Stores a weight as bitsandbytes does: NF4 or FP4 in blocks of 64, magnitudes in 8 bits if nested."""

    def __init__(self, inputs: int, outputs: int, *, nested: bool = True) -> None:
        super().__init__(inputs, outputs)
        code, codes = torch.randn(16).sort().values, torch.randint(0, 16, (inputs * outputs,))
        state = SimpleNamespace(
            code=code, blocksize=64, nested=nested, quant_type="nf4", shape=self.weight.shape
        )
        peaks = torch.rand(inputs * outputs // 64) * 0.01
        if nested:
            inner = SimpleNamespace(
                code=torch.linspace(-1, 1, 256), absmax=torch.rand(2) * 0.01, blocksize=256
            )
            state.absmax, state.offset = torch.randint(0, 256, (len(peaks),)).byte(), torch.tensor(0.02)
            state.state2 = inner
            repeated = [inner.absmax[i // 256] for i in range(len(peaks))]
            peaks = torch.stack(
                [inner.code[int(c)] * r + 0.02 for c, r in zip(state.absmax, repeated, strict=True)]
            )
        else:
            state.absmax = peaks
        self.expected = torch.stack([code[c] * peaks[i // 64] for i, c in enumerate(codes)]).view_as(
            self.weight
        )
        self.weight = nn.Parameter((codes[::2] << 4 | codes[1::2]).byte().view(-1, 1), requires_grad=False)
        self.weight.quant_state = state  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return x.detach().new_tensor((x.numpy() @ self.expected.T.numpy()) + self.bias.detach().numpy())


class Linear8bitLt(nn.Linear):
    """Stores a weight as LLM.int8 does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        codes = torch.randint(-127, 128, (outputs, inputs)).char()
        peaks = torch.rand(outputs) * 0.1
        self.expected = codes.float() * (peaks / 127)[:, None]
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.state = SimpleNamespace(CB=codes, SCB=peaks)

    def forward(self, x: Tensor) -> Tensor:
        return x.detach().new_tensor(x.numpy() @ self.expected.T.numpy() + self.bias.detach().numpy())


class FP8Linear(nn.Linear):
    """Stores a weight as Transformers' fine-grained fp8 does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        values = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-outputs // 32), -(-inputs // 64)) * 0.1
        self.block_size = (32, 64)
        self.expected = values.float() * scale.repeat_interleave(32, 0)[:outputs].repeat_interleave(64, 1)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.element_size() > 1 else self.expected
        return nn.functional.linear(x, weight, self.bias)


class ScaledTensor(Tensor):
    """A tensor subclass that knows its values, as torchao's do."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> ScaledTensor:
        made = Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        assert isinstance(made, ScaledTensor)
        return made

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = values, scale

    def dequantize(self) -> Tensor:
        return self.codes.float() * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        opened = [arg.dequantize() if isinstance(arg, cls) else arg for arg in args]
        return func(*opened, **(kwargs or {}))


def with_subclass(inputs: int, outputs: int) -> nn.Module:
    layer = nn.Linear(inputs, outputs)
    codes = torch.randint(-127, 128, (outputs, inputs)).char()
    layer.weight = nn.Parameter(ScaledTensor(codes, torch.rand(outputs, 1) * 0.001), requires_grad=False)
    return layer


def dynamic(inputs: int, outputs: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(inputs, outputs)), {nn.Linear})[
            0
        ]


for _layer, _package in (
    (Linear4bit, "bitsandbytes.nn"),
    (Linear8bitLt, "bitsandbytes.nn"),
    (FP8Linear, "transformers.x"),
):
    _layer.__module__ = _package

# how a layer is made, words of the note, and the error that its kernel's own rounding explains
LAYERS: dict[str, tuple[Any, str, float]] = {
    "bitsandbytes, nested": (Linear4bit, "bitsandbytes nf4", 1e-5),
    "bitsandbytes": (lambda i, o: Linear4bit(i, o, nested=False), "bitsandbytes nf4", 1e-5),
    "int8": (Linear8bitLt, "bitsandbytes int8", 1e-5),
    "fp8": (FP8Linear, "fp8", 1e-5),
    "tensor subclass": (with_subclass, "ScaledTensor", 1e-5),
    "torch.ao": (dynamic, "dynamically quantized torch.ao", 0.03),  # it rounds activations to 8 bits
}


class Model(nn.Module):
    """A quantized layer, and a product beside it that overflows in float16."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(ROWS, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(x))
        large = (hidden.abs() + 1) * 7e4  # planted
        return torch.as_tensor(self.head(hidden / large * 7e4))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_dequantized_and_what_is_around_them_is_audited(name: str) -> None:
    make, words, allowed = LAYERS[name]
    model, x = Model(make(COLUMNS, ROWS)), torch.randn(8, COLUMNS)
    before, own = dict(model.named_modules()), model(x)
    copied, note = plain(model, x)
    assert note.startswith(f"1 layer with {words} weights: dequantized for both runs")
    assert (copied(x) - own).abs().max() <= allowed * own.abs().max()
    assert dict(model.named_modules()) == before
    assert torch.equal(model(x), own)
    assert copied.get_submodule("head").weight is model.head.weight
    report = ampaudit.scan(model, x, policy="half", device="cpu")
    assert note in report.notes
    planted = Model.forward.__code__.co_firstlineno + 2
    found = [f for f in report.findings if f.code == "AMP101"]
    assert [f.source and f.source.line for f in found] == [planted]


class Quantized(Model):
    """A model that refuses to be cast, as those of Transformers do."""

    def __init__(self) -> None:
        super().__init__(Linear8bitLt(COLUMNS, ROWS))
        self.is_quantized = True

    def half(self) -> Quantized:
        if vars(self).get("is_quantized"):
            raise ValueError("`.half()` is not supported for quantized models")
        return super().half()


def test_a_dequantized_model_may_be_cast_by_its_own_method() -> None:
    model = Quantized()
    report = ampaudit.scan(model, torch.randn(8, COLUMNS), policy="half", device="cpu")
    assert [f.code for f in report.findings if f.severity == "error"] == ["AMP101"]
    assert model.is_quantized


def test_experts_in_fp8_compute_what_their_weights_stand_for() -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    moe = pytest.importorskip("transformers.integrations.moe")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=32, num_experts=4)
    config._experts_implementation = "grouped_mm"
    interface = fp8.ALL_FP8_EXPERTS_FUNCTIONS
    layer = moe.use_experts_implementation(
        experts_class=fp8.FP8Experts, experts_interface=interface, has_bias=False, has_gate=True
    )(config=config, block_size=(32, 32))
    wide: dict[str, Tensor] = {}
    for name in ("gate_up_proj", "down_proj"):
        values = torch.randn(getattr(layer, name).shape).to(torch.float8_e4m3fn)
        scale = torch.rand(getattr(layer, f"{name}_scale_inv").shape) + 0.5
        setattr(layer, name, nn.Parameter(values, requires_grad=False))
        setattr(layer, f"{name}_scale_inv", nn.Parameter(scale))
        wide[name] = values.float() * scale.repeat_interleave(32, 1).repeat_interleave(32, 2)
    copied, note = plain(nn.ModuleDict({"experts": layer}), torch.ones(1))
    assert "1 layer with fp8 weights" in note
    x, chosen, share = torch.randn(5, 64), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    expected = torch.zeros(5, 64)
    for row in range(5):
        for expert, part in zip(chosen[row], share[row], strict=True):
            gate, up = (wide["gate_up_proj"][expert] @ x[row]).chunk(2)
            expected[row] += part * (wide["down_proj"][expert] @ (nn.functional.silu(gate) * up))
    assert torch.allclose(copied.get_submodule("experts")(x, chosen, share), expected, rtol=1e-4, atol=1e-2)
    assert config._experts_implementation == "grouped_mm"


def test_a_model_without_such_weights_is_left_alone() -> None:
    source = as_source(nn.Linear(4, 4), torch.ones(2, 4))
    assert with_plain_weights(source) is source


def test_a_subclass_with_its_own_forward_is_refused() -> None:
    class Scaled(Linear8bitLt):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 1e4)

    with pytest.raises(SourceError, match=r"layer 0 \(Scaled\) changes the forward of Linear8bitLt"):
        plain(nn.Sequential(Scaled(4, 4)), torch.ones(2, 4))


def test_weights_in_the_order_of_a_kernel_are_refused() -> None:
    layer = type("MarlinLinear", (nn.Module,), {"forward": lambda self, x: x, "__module__": "gptqmodel.x"})()
    layer.qweight = torch.ones(2, 2).int()
    with pytest.raises(SourceError, match="load the model with backend='torch'"):
        plain(nn.Sequential(layer), torch.ones(2, 4))


def test_hooks_and_ties_survive() -> None:
    layer = Linear8bitLt(4, 4)
    calls: list[int] = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    model = nn.Sequential(layer, layer).eval()
    copied, _ = plain(model, torch.ones(2, 4))
    assert isinstance(copied, nn.Sequential)
    assert copied[0] is copied[1]
    assert not copied[0].training
    copied(torch.ones(2, 4))
    assert len(calls) == 2


class Recurrent(nn.Module):
    """Each recurrent layer that torch.ao quantizes dynamically."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, bidirectional=True, batch_first=True)
        self.gru, self.cell = nn.GRU(16, 4), nn.LSTMCell(4, 4)
        self.gru_cell, self.rnn_cell = nn.GRUCell(4, 4), nn.RNNCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.gru(self.lstm(x)[0])[0][:, 0]
        return torch.as_tensor(self.rnn_cell(self.gru_cell(self.cell(hidden)[0])))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.qint8, 0.02), (torch.float16, 1e-6)])
def test_dynamically_quantized_recurrent_layers(dtype: torch.dtype, allowed: float) -> None:
    model, x = Recurrent().eval(), torch.randn(2, 5, 8)
    kinds = (
        {nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell} if dtype is torch.qint8 else {nn.LSTM, nn.GRU}
    )
    quantized = torch.ao.quantization.quantize_dynamic(model, kinds, dtype=dtype)
    copied, note = plain(quantized, x)
    assert f"{len(kinds)} layers" in note
    assert not any("quantized" in type(module).__module__ for module in copied.modules())
    assert (copied(x) - quantized(x)).abs().max() <= allowed


class Static(nn.Module):
    """Layers and functions that torch.ao quantizes statically."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.up, self.act = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Hardswish()
        self.linear, self.second, self.layer_norm = nn.Linear(4, 6), nn.ReLU(), nn.LayerNorm(6)
        self.sum = torch.ao.nn.quantized.FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.up(self.relu(self.norm(self.conv(self.enter(x))))))
        hidden = self.sum.add(hidden, hidden).mean((2, 3))
        return torch.as_tensor(self.leave(self.layer_norm(self.second(self.linear(hidden)))))


@pytest.mark.filterwarnings("ignore")
def test_statically_quantized_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")
    quantization, model = torch.ao.quantization, Static().eval()
    model.qconfig = quantization.get_default_qconfig("qnnpack")
    fused = quantization.fuse_modules(model, [["conv", "norm", "relu"], ["linear", "second"]])
    prepared, x = quantization.prepare(fused), torch.randn(4, 3, 8, 8)
    prepared(x)
    quantized = quantization.convert(prepared)
    copied, note = plain(quantized, x)
    assert "3 layers with statically quantized torch.ao weights" in note
    assert not any("intrinsic" in type(module).__module__ for module in copied.modules())
    error = (copied(x) - quantized(x)).abs()
    assert error.mean() <= 0.1 * quantized(x).abs().mean()
    assert ampaudit.scan(quantized, x, policy="torch-cuda", device="cpu").verdict == "pass"


@pytest.mark.filterwarnings("ignore")
def test_quantized_embeddings() -> None:
    quantization = torch.ao.quantization
    model = nn.Sequential(nn.Embedding(10, 16)).eval()
    model[0].qconfig = quantization.float_qparams_weight_only_qconfig
    quantized = quantization.convert(quantization.prepare(model))
    x = torch.randint(0, 10, (3, 5))
    copied, _ = plain(quantized, x)
    assert type(copied[0]) is nn.Embedding
    assert torch.allclose(copied(x), quantized(x), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_parameter_is_dequantized() -> None:
    model = nn.Linear(4, 4)
    stored = torch.quantize_per_tensor(torch.randn(4), 0.1, 3, torch.qint8)
    model.register_buffer("table", stored)
    copied, note = plain(model, torch.ones(2, 4))
    assert torch.equal(copied.get_buffer("table"), stored.dequantize())
    assert "1 layer with torch.quantized weights" in note


@pytest.mark.parametrize("ordered", [False, True])
def test_scales_follow_the_order_of_columns_by_activations(ordered: bool) -> None:
    layer = nn.Linear(8, 4, bias=False)
    codes = torch.randint(-8, 8, (4, 8), dtype=torch.int8)
    layer.weight = nn.Parameter(codes, requires_grad=False)
    layer.weight_scale = nn.Parameter(torch.rand(4, 2) + 0.1)
    order = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0]) if ordered else torch.full((8,), -1)
    layer.weight_g_idx = nn.Parameter(order.int(), requires_grad=False)
    layer.quantization_scheme = SimpleNamespace(weights=SimpleNamespace(num_bits=4))
    copied, _ = plain(nn.Sequential(layer), torch.ones(1, 8))
    groups = order if ordered else torch.arange(8) // 4
    assert torch.allclose(copied[0].weight, codes.float() * layer.weight_scale[:, groups])
