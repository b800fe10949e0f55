"""The built-in steps against Transformers' loop, a hand-written sampler, and PyTorch's recurrent cells."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

import ampaudit
from ampaudit.core.errors import AuditError, UsageError
from ampaudit.report.model import Report
from tests.support.steps import half, scanned

STEPS = 10
SMALL: dict[str, Any] = {"vocab_size": 64, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
LLAMA = {
    **SMALL,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def generating(name: str) -> Any:
    """A small model of Transformers with random weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(**SMALL, n_positions=64, n_embd=32, n_layer=2, n_head=2)
        return transformers.GPT2LMHeadModel(config).eval()
    if name == "mistral":  # its window is shorter than the decode
        return transformers.MistralForCausalLM(transformers.MistralConfig(**LLAMA, sliding_window=4)).eval()
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**SMALL, **sizes, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config).eval()


def prompt() -> dict[str, torch.Tensor]:
    """Two prompts, of which the first is padded on the left."""
    ids = torch.randint(3, 64, (2, 6), generator=torch.manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def cache_of(kept: dict[str, Any], layer: int, which: str) -> torch.Tensor:
    """FP32's keys or values of a decoder layer."""
    names = (
        f"output.past_key_values.{part}layers[{layer}].{which}" for part in ("", "self_attention_cache.")
    )
    found: torch.Tensor = next(kept[name][0] for name in names if name in kept)
    return found


@pytest.mark.parametrize("name", ["gpt2", "mistral", "t5"])
def test_decoding_is_that_of_transformers(name: str) -> None:
    model, inputs = generating(name), prompt()
    made = model.generate(
        **inputs, max_new_tokens=STEPS, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    report, kept = scanned(model, inputs, STEPS)
    assert report.steps is not None
    assert report.steps.traces == 2  # of the prompt, and of all tokens after it
    tokens = torch.stack([outputs["output.logits"][0][:, -1].argmax(-1) for outputs in kept], 1)
    assert torch.equal(tokens, made.sequences[:, -STEPS:])
    for outputs, logits in zip(kept, made.logits, strict=True):
        torch.testing.assert_close(outputs["output.logits"][0][:, -1], logits, rtol=1e-4, atol=1e-5)
    own = getattr(made.past_key_values, "self_attention_cache", made.past_key_values)
    for which in ("keys", "values"):
        expected = getattr(own.layers[1], which)
        written = cache_of(kept[-1], 1, which)
        length = tokens.shape[1] + (0 if name == "t5" else inputs["input_ids"].shape[1] - 1)
        found = written[:, :, :length][:, :, -expected.shape[2] :]
        seen = slice(2, None) if name == "gpt2" else slice(None)  # nothing reads what is padded
        torch.testing.assert_close(found[:, :, seen], expected[:, :, seen], rtol=1e-4, atol=1e-5)


def test_the_16_bit_cache_is_that_of_a_16_bit_loop() -> None:
    """Every number in the cache is one that float16 has, and differs from FP32's."""
    _, kept = scanned(generating("gpt2"), prompt(), 4)
    for which in ("keys", "values"):
        reference, value = kept[-1][f"output.past_key_values.layers[0].{which}"]
        assert torch.equal(half(value), value.float())
        assert not torch.equal(reference, value.float())


def test_an_overflow_in_the_cache_is_named() -> None:
    """A position that only the fifth step reaches has a key beyond float16."""
    model = generating("gpt2")
    attention = model.transformer.h[0].attn.c_attn
    with torch.no_grad():
        model.transformer.wpe.weight[9] = 0.0
        model.transformer.wpe.weight[9, 3] = 100.0
        attention.weight[3, 32:64] = 15_000.0
        attention.weight[:, :32] *= 1e-6  # queries: scores stay small
    peaks: list[float] = []
    hook = attention.register_forward_hook(
        lambda module, args, output: peaks.append(float(output[..., 32:64].abs().amax()))
    )
    model.generate(
        **prompt() | {"attention_mask": torch.ones(2, 6).long()}, max_new_tokens=8, do_sample=False
    )
    hook.remove()
    expected = 1 + next(step for step, peak in enumerate(peaks) if peak >= 65_520.0)
    assert expected == 5
    report, kept = scanned(model, {"input_ids": prompt()["input_ids"]}, 8)
    worst = next(f for f in report.findings if f.severity == "error")
    assert (worst.layer, worst.evidence.step) == ("transformer.h.0.attn.c_attn", expected)
    keys = [outputs["output.past_key_values.layers[0].keys"] for outputs in kept]
    assert [bool(value.isfinite().all()) for _, value in keys[:expected]] == [True] * 4 + [False]
    assert all(bool(reference.isfinite().all()) for reference, _ in keys)
    assert report.steps is not None
    assert [step.step for step in report.steps.steps if step.poisoned] == [6, 7, 8]


def test_a_model_with_its_own_kind_of_cache_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1)
    with pytest.raises(UsageError, match="cache of its own kind"):
        ampaudit.scan(transformers.MambaForCausalLM(config), prompt(), steps=3)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(sample) * (1.0 + timestep / 1000.0)
        return found


@dataclasses.dataclass
class Stepped:
    prev_sample: torch.Tensor


class CountingScheduler:
    """An Euler sampler that, as those of Diffusers, counts its steps and scales its samples."""

    def __init__(self, count: int, grow: float = 1.0) -> None:
        self.timesteps = torch.linspace(900.0, 0.0, count)
        self.sigmas = torch.linspace(8.0, 0.0, count + 1)
        self.index = 0
        self.grow = grow

    def scale_model_input(self, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return sample / (float(self.sigmas[min(self.index, len(self.timesteps) - 1)]) ** 2 + 1.0) ** 0.5

    def step(self, output: torch.Tensor, timestep: torch.Tensor, sample: torch.Tensor) -> Stepped:
        assert float(timestep) == float(self.timesteps[self.index])
        made = sample * self.grow + output * float(self.sigmas[self.index + 1] - self.sigmas[self.index])
        self.index += 1
        return Stepped(made)


def sampled(model: nn.Module, scheduler: Any, sample: torch.Tensor) -> list[torch.Tensor]:
    """The model's outputs in a pipeline's loop."""
    scheduler, found = copy.deepcopy(scheduler), []
    with torch.no_grad():
        for time in scheduler.timesteps:
            output = model(scheduler.scale_model_input(sample, time), time)
            output = output if isinstance(output, torch.Tensor) else output.sample
            found.append(output)
            sample = scheduler.step(output, time, sample).prev_sample
    return found


def test_a_sampler_is_the_loop_of_a_pipeline() -> None:
    torch.manual_seed(0)
    model, scheduler, sample = Denoiser(), CountingScheduler(12), torch.randn(3, 8) * 8.0
    report, kept = scanned(model, (sample, torch.tensor(1)), 12, next_inputs=scheduler)
    for outputs, expected in zip(kept, sampled(model, scheduler, sample), strict=True):
        torch.testing.assert_close(outputs["output"][0], expected)
    assert report.steps is not None
    assert report.steps.traces <= 2
    assert scheduler.index == 0  # the user's own is not stepped


def test_a_schedulers_overflow_is_named_with_its_line() -> None:
    scheduler = CountingScheduler(20, grow=2.0)
    report, _ = scanned(Denoiser(), (torch.full((3, 8), 2.0), torch.tensor(0)), 20, next_inputs=scheduler)
    (finding,) = [f for f in report.findings if f.code == "AMP118"]
    assert finding.source is not None
    assert "sample * self.grow" in finding.source.code
    assert finding.evidence.step is not None


def test_a_scheduler_with_too_few_timesteps_is_refused() -> None:
    with pytest.raises(UsageError, match="--steps 9: the scheduler has 5 timesteps"):
        ampaudit.scan(
            Denoiser(), (torch.ones(3, 8), torch.tensor(0)), steps=9, next_inputs=CountingScheduler(5)
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of diffusers
@pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="diffusers is not installed")
@pytest.mark.parametrize("name", ["DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler"])
def test_a_scheduler_of_diffusers_steps_as_in_its_pipeline(name: str) -> None:
    import diffusers

    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(16,),
        norm_num_groups=8,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    ).eval()
    scheduler = getattr(diffusers, name)()
    scheduler.set_timesteps(6)
    sample = torch.randn(1, 3, 8, 8) * scheduler.init_noise_sigma
    _, kept = scanned(model, (sample, torch.tensor(0)), 6, next_inputs=scheduler)
    for outputs, expected in zip(kept, sampled(model, scheduler, sample), strict=True):
        torch.testing.assert_close(outputs["output.sample"][0], expected, rtol=1e-4, atol=1e-4)


CELLS: dict[str, tuple[nn.Module, Any]] = {
    "rnn": (nn.RNNCell(8, 8), (torch.ones(2, 8), torch.zeros(2, 8))),
    "gru": (nn.GRU(8, 8), (torch.ones(3, 2, 8), torch.zeros(1, 2, 8))),
    "lstm": (nn.LSTM(8, 8), (torch.ones(3, 2, 8), (torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)))),
    "lstm cell": (nn.LSTMCell(8, 8), (torch.ones(2, 8), (torch.zeros(2, 8), torch.zeros(2, 8)))),
}


@pytest.mark.parametrize("name", CELLS)
def test_recurrent_state_is_fed_back(name: str) -> None:
    cell, (x, state) = CELLS[name]
    _, kept = scanned(cell, (x, state), 5)
    with torch.no_grad():
        for _ in range(5):
            output = cell(x, state)
            state = output[1] if name in ("gru", "lstm") else output
    last = list(kept[-1].values())[-1][0]
    torch.testing.assert_close(last, state[-1] if isinstance(state, tuple) else state)


class InBuffer(nn.Module):
    """Keeps its state in a buffer."""

    state: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(4))
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.mul_(self.factor)
        return x * 0.0 + self.state


def test_state_in_a_buffer_is_carried() -> None:
    model = InBuffer()
    report, kept = scanned(model, torch.ones(4), 20)
    assert [float(outputs["output"][0][0]) for outputs in kept] == [2.0**step for step in range(1, 21)]
    assert report.steps is not None
    assert report.steps.first_broken is not None
    assert report.steps.first_broken.step == 16  # 2^16 is the first that float16 lacks
    assert [step.step for step in report.steps.steps if step.poisoned] == [17, 18, 19, 20]
    assert torch.equal(model.state, torch.ones(4))


def test_inputs_stay_if_only_buffers_change() -> None:
    class Summing(InBuffer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state.add_(x)
            return self.state.sum(-1, keepdim=True)

    _, kept = scanned(Summing(), torch.ones(4), 4)
    assert [float(outputs["output"][0]) for outputs in kept] == [8.0, 12.0, 16.0, 20.0]


class Holder:
    """An object with a tensor in it that torch does not know."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, held: Holder) -> tuple[torch.Tensor, Holder]:
        made = self.inner(x) + held.tensor
        return made, Holder(made)


def test_state_in_an_object_is_carried() -> None:
    model, x, held = Holding(), torch.ones(2, 4), Holder(torch.ones(2, 4))
    report, kept = scanned(model, (x, held), 4, next_inputs=lambda outputs, inputs: (inputs[0], outputs[1]))
    value = half(held.tensor)
    with torch.no_grad():
        for _ in range(4):
            value = half(half(half(x) @ half(model.inner.weight).T + half(model.inner.bias)) + value)
    torch.testing.assert_close(kept[-1]["output[0]"][1].float(), value, rtol=1e-3, atol=1e-3)
    assert report.steps is not None
    assert report.steps.traces <= 2


def test_shapes_that_grow_are_traced_for_each_step() -> None:
    def longer(outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([inputs, outputs[:, -1:]], 1)

    report, _ = scanned(nn.Linear(4, 4), torch.ones(2, 1, 4), 5, next_inputs=longer)
    assert report.steps is not None
    assert report.steps.traces == 5


def test_a_token_that_16_bits_would_choose_differently_is_counted() -> None:
    class Near(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Parameter(torch.tensor([[1.0, 1.0 + 2.0**-14]] * 2))

        def forward(self, token: torch.Tensor) -> torch.Tensor:
            return self.scores[token] * 1.0

    def greedy(outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return outputs.argmax(-1)

    report, kept = scanned(Near(), torch.tensor([0]), 4, next_inputs=greedy)
    assert report.steps is not None
    assert report.steps.flipped == (1, 2, 3)
    assert [int(outputs["output"][0].argmax()) for outputs in kept] == [1] * 4


def test_a_function_that_keeps_state_outside_is_refused() -> None:
    calls: list[int] = []

    def counted(outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return outputs * len(calls)

    with pytest.raises(AuditError, match="different results when it is called again"):
        ampaudit.scan(nn.Linear(4, 4), torch.ones(2, 4), steps=3, next_inputs=counted)


def test_inputs_written_in_place_are_not_the_users() -> None:
    x, position = torch.ones(2, 4), torch.tensor(1)

    def counted(outputs: torch.Tensor, inputs: Any) -> Any:
        return outputs, inputs[1].add_(1)

    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, position: torch.Tensor) -> Any:
            return self.inner(x) * 0.0 + position

    _, kept = scanned(Positioned(), (x, position), 4, next_inputs=counted)
    assert [float(outputs["output"][0][0, 0]) for outputs in kept] == [1.0, 2.0, 3.0, 4.0]
    assert int(position) == 1


def test_a_complex_state_is_fed_back() -> None:
    class Turning(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (0.6 + 0.8j)

    _, kept = scanned(Turning(), torch.ones(4, dtype=torch.complex64), 5)
    torch.testing.assert_close(kept[-1]["output"][0], torch.full((4,), (0.6 + 0.8j) ** 5))


def test_a_function_that_holds_a_model_shares_it() -> None:
    class Through(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("a model is not copied for each run")

    class Projected:
        def __init__(self) -> None:
            self.model = Through(4, 4)

        def __call__(self, outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.model(outputs.float()).to(outputs.dtype)
            return found

    report, _ = scanned(nn.Linear(4, 4), torch.ones(2, 4), 3, next_inputs=Projected())
    assert report.verdict == "pass"


def test_a_function_that_cannot_be_copied_is_refused() -> None:
    class Iterating:
        def __init__(self) -> None:
            self.numbers = (number for number in range(9))

        def __call__(self, outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
            return outputs * next(self.numbers)

    with pytest.raises(AuditError, match="cannot be copied for each run"):
        ampaudit.scan(nn.Linear(4, 4), torch.ones(2, 4), steps=3, next_inputs=Iterating())


def test_no_step_is_known_for_any_model() -> None:
    with pytest.raises(UsageError, match="no output of the model has the structure and shapes of an input"):
        ampaudit.scan(nn.Linear(4, 3), torch.ones(2, 4), steps=3)


@pytest.mark.parametrize("policy", ["ampaudit", "apex-o2", "onnx", "keep-fp32-modules"])
def test_each_kind_of_policy_carries_state(policy: str) -> None:
    cell, inputs = CELLS["gru"]
    report = ampaudit.scan(cell, inputs, steps=3, policy=policy)
    assert isinstance(report, Report)
    assert report.verdict == "pass"


def test_a_state_returned_in_float32_stays_float32() -> None:
    seen: list[torch.dtype] = []

    class Upcasting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.to(self.inner.weight.dtype)).float() * (1.0 + 2.0**-20)

    def kept_as_it_is(outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        seen.append(inputs.dtype)
        return outputs

    _, kept = scanned(Upcasting(), torch.ones(2, 4), 4, next_inputs=kept_as_it_is)
    assert not torch.equal(half(kept[-1]["output"][1]), kept[-1]["output"][1])
    assert seen.count(torch.float16) == 1  # the first input, which half casts
