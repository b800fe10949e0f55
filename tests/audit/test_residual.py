"""Rescaled residual streams: the same FP32 bits, no overflow, and refused where the graph proves neither."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from ampaudit import scan
from ampaudit.audit.advice.residual import ResidualRescale, residual_rescale
from ampaudit.audit.advice.residual_stream import Refusal
from ampaudit.core.formats import FLOAT16
from ampaudit.policy import load_policy
from ampaudit.trace import TraceConfig, trace
from ampaudit.trace.flow import Flow
from tests.support.wrap import Wrap

WIDTH, VOCABULARY = 16, 24
IDS = torch.arange(12).reshape(2, 6) * 5 % VOCABULARY


class HandWritten(nn.Module):
    """An RMS norm as in Llama and T5."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(1 + 0.1 * torch.randn(width)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inverse = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x * inverse).to(x.dtype)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm(WIDTH),
    "plain": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-3),
    "rms": lambda: nn.RMSNorm(WIDTH),
    "hand": lambda: HandWritten(WIDTH),
}
# what reads the stream outside of a norm, or leaves it
PLANTS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "gate": lambda net, x: x * torch.sigmoid(x),
    "attention": lambda net, x: x + torch.softmax(x @ x.mT, -1) @ x,
    "clamp": lambda net, x: x.clamp(-40.0, 40.0),
    "bias": lambda net, x: x + 1.0,
    "compared": lambda net, x: torch.where(x > 3.0, x, 0.0),
    "square": lambda net, x: x + x * x,
    "integers": lambda net, x: x + x.to(torch.int32),
    "bits": lambda net, x: x + x.view(torch.int32 if x.dtype == torch.float32 else torch.int16),
    "layer": lambda net, x: x + torch.tanh(net.probe(x)),
}


class PreNorm(nn.Module):
    """A transformer without attention: an embedding, blocks that add to it, a norm, a head."""

    def __init__(self, norm: str, depth: int, bias: bool, tied: bool, plant: str | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(6, WIDTH))
        self.norms = nn.ModuleList(NORMS[norm]() for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH, bias=bias) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH, bias=bias) for _ in range(depth))
        self.last, self.head = NORMS[norm](), nn.Linear(WIDTH, VOCABULARY, bias=bias and not tied)
        self.probe = nn.Linear(WIDTH, WIDTH)
        self.plant = plant
        if tied:
            self.head.weight = self.embedding.weight
        with torch.no_grad():
            for layer in self.down:
                layer.weight.mul_(3e5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.position
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        x = x if self.plant is None else PLANTS[self.plant](self, x)
        return self.head(self.last(x))


class Reshaped(PreNorm):
    """The stream passes through views between its blocks."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = (self.embedding(ids) + self.position).flatten(0, 1)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = (x + down(F.gelu(up(norm(x))))).unflatten(0, (-1, 6)).flatten(0, 1)
        out: torch.Tensor = self.head(self.last(x))
        return out


def flow_of(model: nn.Module, *args: Any, **kwargs: Any) -> Flow:
    return Flow(
        trace(model, args, kwargs, TraceConfig(load_policy("half"), load_policy("torch-cuda"), FLOAT16))
    )


def rescaled(
    model: nn.Module, at: str, *args: Any, peak: float = 4e5, **kwargs: Any
) -> ResidualRescale | Refusal:
    """Rescale the stream through a site, on the word that it overflows there."""
    return rescaled_in(flow_of(model, *args, **kwargs), model, at, peak)


def rescaled_in(flow: Flow, model: nn.Module, at: str, peak: float = 4e5) -> ResidualRescale | Refusal:
    site = next(site for site in reversed(flow.traced.sites) if site.id == at or site.id.startswith(f"{at}#"))
    try:
        return residual_rescale(model, flow, site, {site.id: peak}, FLOAT16)
    except Refusal as refusal:
        return refusal


def pasted(model: nn.Module, code: str) -> nn.Module:
    changed = copy.deepcopy(model)
    exec(code, {"torch": torch, "model": changed})
    return changed


def leaves(output: Any) -> list[torch.Tensor]:
    found = torch.utils._pytree.tree_leaves(dict(output) if hasattr(output, "keys") else output)
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]


def assert_same_bits(model: nn.Module, changed: nn.Module, *args: Any, **kwargs: Any) -> None:
    with torch.no_grad():
        before, after = leaves(model(*args, **kwargs)), leaves(changed(*args, **kwargs))
    assert before
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@settings(max_examples=10, deadline=None)
@given(
    norm=st.sampled_from(sorted(NORMS)),
    depth=st.integers(1, 3),
    bias=st.booleans(),
    tied=st.booleans(),
    plant=st.sampled_from([None, None, *sorted(PLANTS)]),
    seed=st.integers(0, 99),
)
def test_generated_nets_keep_every_bit_or_are_refused(
    norm: str, depth: int, bias: bool, tied: bool, plant: str | None, seed: int
) -> None:
    torch.manual_seed(seed)
    model = PreNorm(norm, depth, bias, tied, plant).eval()
    flow = flow_of(model, IDS)
    found = rescaled_in(flow, model, "(top)/add")
    if plant is not None or (tied and norm == "plain"):
        assert isinstance(found, Refusal)
        assert str(found)
        return
    assert isinstance(found, ResidualRescale), found
    assert found.bits == 5  # 4e5 is 2.6 bits above the limit, and two are spare
    changed = pasted(model, found.paste)
    assert_same_bits(model, changed, IDS)
    assert_same_bits(model, found.applied(model), IDS)
    assert found.is_in(flow, flow_of(changed, IDS))
    assert not found.is_in(flow, flow_of(model, IDS))


def test_a_stream_passes_through_views() -> None:
    torch.manual_seed(0)
    model = Reshaped("layer", 2, bias=True, tied=False, plant=None).eval()
    found = rescaled(model, "(top)/add", IDS)
    assert isinstance(found, ResidualRescale), found
    assert_same_bits(model, pasted(model, found.paste), IDS)


def test_advice_cures_the_overflow_of_the_stream() -> None:
    torch.manual_seed(0)
    model = PreNorm("layer", 2, bias=True, tied=True, plant=None).eval()
    report = scan(model, IDS, policy="half", advise=True)
    errors = [finding for finding in report.findings if finding.severity == "error"]
    assert errors
    assert all(f.tried[0].kind == "rescale" and f.tried[0].outcome == "cure" for f in errors)
    changed = pasted(model, errors[0].tried[0].paste)
    assert_same_bits(model, changed, IDS)
    after = scan(changed, IDS, policy="half")
    assert not [finding for finding in after.findings if finding.severity == "error"]
    with torch.no_grad():  # and in the kernels of this machine
        wanted, broken, got = model(IDS), copy.deepcopy(model).half()(IDS), changed.half()(IDS).float()
    assert not broken.isfinite().all()
    assert 20 * math.log10(float(wanted.norm() / (got - wanted).norm())) > 40


@dataclass(frozen=True)
class Case:
    """A net of transformers with random weights.

    Attributes:
        build: makes the net.
        at: a site on its stream.
        compensated: weights that make up for a tied head.
        refused: the reason, where there is one.
    """

    build: Callable[[Any], nn.Module]
    at: str
    inputs: dict[str, Any]
    compensated: tuple[str, ...] = ()
    refused: str = ""


SMALL = {
    **{
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 24,
    },
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
TEXT = {"input_ids": IDS, "use_cache": False}
PAIR = {"input_ids": IDS, "decoder_input_ids": IDS, "use_cache": False}
WHISPER = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
WHISPER |= {
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "vocab_size": 24,
    "max_source_positions": 8,
    "num_mel_bins": 8,
}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
SPEECH = {"input_features": torch.ones(2, 8, 16), "decoder_input_ids": IDS, "use_cache": False}


def whisper(tf: Any) -> nn.Module:
    return tf.WhisperForConditionalGeneration(tf.WhisperConfig(**WHISPER))


CASES = {
    "llama": Case(
        lambda tf: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, num_key_value_heads=1)),
        "model.layers.1/add",
        TEXT,
    ),
    "qwen3, tied": Case(
        lambda tf: tf.Qwen3ForCausalLM(
            tf.Qwen3Config(**SMALL, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True)
        ),
        "model.layers.0.mlp.down_proj/linear",
        TEXT,
        ("model.norm.weight",),
    ),
    "gpt2": Case(
        lambda tf: tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=24)),
        "transformer.h.1/add",
        TEXT,
        ("transformer.ln_f.bias", "transformer.ln_f.weight"),
    ),
    "t5": Case(
        lambda tf: tf.T5ForConditionalGeneration(
            tf.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=24)
        ),
        "encoder.block.1.layer.1.DenseReluDense.wo/linear",
        PAIR,
        ("decoder.final_layer_norm.weight",),
    ),
    "vit": Case(
        lambda tf: tf.ViTModel(
            tf.ViTConfig(
                hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                image_size=16, patch_size=8,
            )
        ),
        "layers.1/add",
        {"pixel_values": torch.ones(2, 3, 16, 16)},
    ),
    "whisper, decoder": Case(
        whisper, "model.decoder.layers.0/add", SPEECH,
        ("model.decoder.layer_norm.bias", "model.decoder.layer_norm.weight"),
    ),
    "whisper, encoder": Case(
        whisper, "model.encoder.layers.0/add", SPEECH,
        refused="model.encoder/gelu#2 writes to the stream, and no weight scales its result",
    ),
    "bert": Case(
        lambda tf: tf.BertModel(tf.BertConfig(**SMALL)), "encoder.layer.0.output/add", {"input_ids": IDS},
        refused="encoder.layer.0.intermediate.intermediate_act_fn/gelu reads the stream before a norm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_models_of_transformers(name: str) -> None:
    transformers, case = pytest.importorskip("transformers"), CASES[name]
    torch.manual_seed(1)
    model = case.build(transformers).eval()
    found = rescaled(model, case.at, **case.inputs)
    if case.refused:
        assert isinstance(found, Refusal)
        assert str(found) == case.refused
        return
    assert isinstance(found, ResidualRescale), found
    assert tuple(sorted(n for n, power in found.weights.items() if power > 0)) == case.compensated
    assert_same_bits(model, pasted(model, found.paste), **case.inputs)


def block(function: Callable[..., Any], **parts: nn.Module) -> nn.Module:
    torch.manual_seed(2)
    given = {"stem": nn.Linear(8, 8), "branch": nn.Linear(8, 8), "norm": nn.LayerNorm(8), **parts}
    return Wrap(function, **given).eval()


def added(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.stem(x) + m.branch(x)


REFUSED: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "an output": (lambda m, x: added(m, x), "the stream leaves the model as an output"),
    "an output as well": (
        lambda m, x: (m.norm(h := added(m, x)), h), "the stream leaves the model as an output"
    ),
    "the input": (lambda m, x: m.norm(x + m.branch(x)), "an input of the model is on the stream"),
    "a constant": (lambda m, x: m.norm(added(m, x) + torch.arange(8.0)), "no weight scales"),
    "a number": (lambda m, x: m.norm(added(m, x) + 0.25), "is not an attribute"),
    "eps in the code": (lambda m, x: F.layer_norm(added(m, x), (8,)), "is not an attribute"),
    "written into zeros": (
        lambda m, x: m.norm(torch.zeros_like(x).copy_(added(m, x))), "(top)/zeros_like"
    ),
    "a cube root": (lambda m, x: m.norm(added(m, x).abs() ** 0.3), "takes a power of the stream"),
    "one weight twice": (
        lambda m, x: m.norm(added(m, x) + m.branch(x).sigmoid()), "(top)/sigmoid writes to the stream"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str) -> None:
    function, reason = REFUSED[name]
    found = rescaled(block(function), "(top)/add", torch.ones(4, 8))
    assert isinstance(found, Refusal)
    assert reason in str(found)


def test_weights_that_would_be_subnormal_are_refused() -> None:
    model = block(lambda m, x: m.norm(added(m, x)))
    with torch.no_grad():
        model.branch.weight.mul_(1e-4)
    found = rescaled(model, "(top)/add", torch.ones(4, 8), peak=2e6)
    assert isinstance(found, Refusal)
    assert "branch.weight times 2^-7 is subnormal in float16: " in str(found)


def test_weights_in_one_memory_are_refused() -> None:
    model = block(lambda m, x: m.norm(added(m, x)))
    both = torch.randn(9, 8)
    model.stem.weight, model.branch.weight = nn.Parameter(both[:8]), nn.Parameter(both[1:])
    found = rescaled(model, "(top)/add", torch.ones(4, 8))
    assert isinstance(found, Refusal)
    assert "shares memory" in str(found)


def test_an_eps_that_something_else_reads_is_no_advice() -> None:
    """FP32 gives the same bits, since the values are large: the graph must say it."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.branch, self.eps = nn.Linear(8, 8), nn.Linear(8, 8), 1e-5
            with torch.no_grad():
                self.stem.weight.mul_(2e6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = F.layer_norm(self.stem(x) + self.branch(x), (8,), eps=self.eps)
            return F.layer_norm(300 * x, (8,), eps=self.eps * self.reads) + hidden

        reads = 1.0

    torch.manual_seed(3)
    model, x = Twice().eval(), torch.randn(4, 8)
    kinds = [t.kind for f in scan(model, x, policy="half", advise=True).findings for t in f.tried]
    assert kinds
    assert "rescale" not in kinds
    model.reads = 0.0
    kinds = [t.kind for f in scan(model, x, policy="half", advise=True).findings for t in f.tried]
    assert "rescale" in kinds


class Limited(PreNorm):
    """A clamp after each block, as ten projects have it."""

    limit = 65504.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.position
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = (x + down(F.gelu(up(norm(x))))).clamp(-self.limit, self.limit)
        return self.head(self.last(x))


def test_a_limit_is_judged_by_its_error_and_compared_with_the_rescaled_stream() -> None:
    torch.manual_seed(0)
    model = Limited("layer", 3, bias=True, tied=False, plant=None).eval()
    report = scan(model, IDS, policy="half", advise=True)
    errors = [finding for finding in report.findings if finding.severity == "error"]
    assert errors
    with torch.no_grad():
        clamped, model.limit = model(IDS), math.inf
        wanted = model(IDS)
    cost = -20 * math.log10(float((wanted - clamped).norm() / clamped.norm()))
    for trial in (finding.tried[0] for finding in errors):
        assert (trial.kind, trial.outcome) == ("rescale", "cure")
        assert trial.before_db == pytest.approx(cost, abs=0.1)
        assert "in FP32 as well" in trial.before
        assert trial.after.startswith("nothing is clamped")
    model.limit = 65504.0
    changed = pasted(model, errors[0].tried[0].paste)
    with torch.no_grad():
        assert torch.equal(changed(IDS), wanted)  # with its clamps
        got = copy.deepcopy(changed).half()(IDS).float()
    decibels = 20 * math.log10(float(wanted.norm() / (got - wanted).norm()))
    assert decibels == pytest.approx(errors[0].tried[0].after_db, abs=2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_limit_of_float16_that_acts_in_fp32_is_a_warning(dtype: str) -> None:
    model = block(lambda m, x: m.norm((1e5 * x).clamp(-65504.0, 65504.0)) + m.stem(x) + m.branch(x))
    for scale, acts in ((1.0, True), (0.1, False)):
        x = torch.linspace(-1, 1, 32).reshape(4, 8) * scale
        found = [f for f in scan(model, x, policy="half", dtype=dtype).findings if f.code == "AMP111"]
        assert [f.severity.value for f in found] == ["warning"] * acts
        assert all("100,000" in f.cause for f in found)


STEPS: dict[str, Callable[[Any, int, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": lambda net, n, a, b: net.layers[n % 3](a),
    "norm": lambda net, n, a, b: net.norms[n % 3](a),
    "add": lambda net, n, a, b: a + b,
    "subtract": lambda net, n, a, b: a - 2 * b,
    "in place": lambda net, n, a, b: a.clone().add_(b),
    "vector": lambda net, n, a, b: a * net.vectors[n % 2],
    "gate": lambda net, n, a, b: a * torch.sigmoid(b),
    "relu": lambda net, n, a, b: F.relu(a),
    "gelu": lambda net, n, a, b: F.gelu(a),
    "attention": lambda net, n, a, b: F.scaled_dot_product_attention(b, b, a),
    "cut": lambda net, n, a, b: torch.cat([a[:, :3], b[:, 3:]], dim=1),
    "mean": lambda net, n, a, b: a - a.mean(-1, keepdim=True),
    "masked": lambda net, n, a, b: torch.where(net.mask, a, b),
    "written": lambda net, n, a, b: torch.zeros_like(a).index_copy_(1, torch.arange(6), b),
    "divided": lambda net, n, a, b: a / (b.square().mean(-1, keepdim=True) + net.eps).sqrt(),
    "limited": lambda net, n, a, b: a.clamp(min=-net.eps),
    "chosen": lambda net, n, a, b: a.gather(2, b.argmax(-1, keepdim=True)).expand_as(a) + b,
}


class Program(nn.Module):
    """A random program; layers are used several times."""

    def __init__(self, steps: list[tuple[str, int, int, int]]) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=n > 0) for n in range(3))
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), HandWritten(WIDTH), nn.RMSNorm(WIDTH)])
        self.vectors = nn.ParameterList(torch.randn(WIDTH) for _ in range(2))
        self.stem, self.eps = nn.Linear(WIDTH, WIDTH), 0.25
        self.register_buffer("mask", torch.rand(6, 1) > 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [self.stem(x), self.stem(x).relu()]
        for name, number, first, second in self.steps:
            values.append(
                STEPS[name](self, number, values[-1 - first % 2], values[-1 - second % len(values)])
            )
        return self.norms[0](values[-1])


@settings(max_examples=5, deadline=None)
@example(steps=[("attention", 0, 0, 0)])  # one value is query, key and value
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 2), st.integers(0, 1), st.integers(0, 9)),
        min_size=1,
        max_size=8,
    )
)
def test_what_is_proved_of_random_programs_keeps_every_bit(steps: list[tuple[str, int, int, int]]) -> None:
    torch.manual_seed(5)
    model, x = Program(steps).eval(), torch.randn(2, 6, WIDTH)
    flow = flow_of(model, x)
    seen: list[object] = []
    for site in flow.traced.sites:
        if site.dtype is not torch.float16 or flow.base(site) not in ("add", "linear", "mul", "sub"):
            continue
        try:
            found = residual_rescale(model, flow, site, {site.id: 4e5}, FLOAT16)
        except Refusal:
            continue
        if found.weights not in seen:
            seen.append(found.weights)
            changed = pasted(model, found.paste)
            if found.is_in(flow, flow_of(changed, x)):  # an eps may have two readers
                assert_same_bits(model, changed, x)
