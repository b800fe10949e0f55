"""In which dtype a policy stores each tensor, against the libraries that do it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampaudit.checkpoint.safetensors import clipped
from ampaudit.core.formats import FLOAT16
from ampaudit.policy import load_file, load_policy
from ampaudit.trace import TraceConfig, trace
from ampaudit.trace.converted import attach_weights
from ampaudit.trace.fake_model import named_tensors, stored_dtypes
from tests.support.native import run_converted


def t5(name: str) -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
    return getattr(transformers, f"{name}Model")(config(**sizes))


def gpt_oss() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(
        GptOssConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=50,
            num_local_experts=2,
            num_experts_per_tok=1,
            pad_token_id=0,
        )
    )


def deepseek() -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            hidden_size=16,
            intermediate_size=16,
            moe_intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=50,
            n_routed_experts=8,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            v_head_dim=4,
            qk_nope_head_dim=4,
            first_k_dense_replace=0,
            pad_token_id=0,
        )
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [lambda: t5("T5"), lambda: t5("MT5"), gpt_oss, deepseek])
def test_keep_fp32_modules_stores_what_from_pretrained_loads(
    make: Callable[[], Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make().eval()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    expected = {n: t.dtype for n, t in named_tensors(loaded).items() if t.is_floating_point()}
    stored = stored_dtypes(model, load_file("keep-fp32-modules").file.weights, dtype)
    ours = {n: stored.get(n, t.dtype) for n, t in named_tensors(model).items() if t.is_floating_point()}
    assert ours == expected
    assert dtype in ours.values()


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.bare = nn.BatchNorm2d(4, affine=False)
        self.instance = nn.InstanceNorm2d(4, affine=True)
        self.layer = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.instance(self.bare(self.norm(self.conv(x)))).mean((2, 3)))


def kept(policy: str, dtype: torch.dtype) -> set[str]:
    model = Norms()
    stored = stored_dtypes(model, load_file(policy).file.weights, dtype)
    floats = {name for name, tensor in named_tensors(model).items() if tensor.is_floating_point()}
    return {name.partition(".")[0] for name in floats - set(stored)}


def test_which_norms_stay_in_float32() -> None:
    assert kept("apex-o2", torch.float16) == {"norm"}  # affine batch norms only
    assert kept("apex-o3", torch.float16) == set()
    assert kept("paddle-o2", torch.float16) == {"norm", "bare", "instance", "layer"}
    assert kept("paddle-o2", torch.bfloat16) == {"norm", "bare"}
    assert kept("half", torch.float16) == set()


def test_apex_o2_equals_a_model_made_by_hand() -> None:
    """Affine batch norms in float32, all else and the input in half, the output back in float32."""
    model = Norms().eval()
    by_hand = copy.deepcopy(model).half()
    by_hand.norm.float()
    x = torch.randn(2, 3, 8, 8)
    expected = by_hand(x.half()).float()
    traced = trace(model, (x,), {}, TraceConfig(load_policy("apex-o2"), load_policy("torch-cuda"), FLOAT16))
    (found,) = run_converted(traced, [x])
    assert found.dtype is torch.float32
    assert torch.equal(found, expected)


def test_clipping_moves_finite_numbers_only() -> None:
    values = torch.tensor([0.0, 1e-9, -1e-9, 1.0, 2e4, -2e4, torch.inf, -torch.inf, torch.nan])
    expected = torch.tensor([0.0, 1e-7, -1e-7, 1.0, 1e4, -1e4, torch.inf, -torch.inf, torch.nan])
    assert torch.equal(clipped(values, 1e-7, 1e4).nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("policy", ["half", "onnx"])
def test_a_run_takes_its_weights_from_the_runs_device(policy: str) -> None:
    """The model may be elsewhere: its own tensors have no values here once the executor is made."""
    from ampaudit.run.backends import Native
    from ampaudit.run.lockstep import LockStep
    from ampaudit.run.meter import Meter
    from ampaudit.run.program import compile_program

    model, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    converted = attach_weights(
        trace(model, (x,), {}, TraceConfig(load_policy(policy), load_policy("torch-cuda"), FLOAT16))
    )
    device = torch.device("cpu")
    executor = LockStep(compile_program(converted.traced, device), converted, Native(), device)
    for name, tensor in converted.masters.items():
        converted.masters[name] = tensor.to("meta")
    ((reference, value),) = executor.run([x], Meter(FLOAT16, Native(), local=False))
    assert torch.equal(reference, model(x))
    assert value.dtype is torch.float16
    assert torch.allclose(value.float(), reference, atol=1e-2)


def test_the_onnx_policy_clips_weights_and_constants_and_the_reference_is_not_clipped() -> None:
    from ampaudit import scan

    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([30000.0, 1.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + 20000.0

    report = scan(Big().eval(), torch.ones(2), policy="onnx")
    add = next(site for site in report.sites if site.site == "(top)/add")
    assert add.forward is not None
    assert add.forward.peak == 50000.0
    assert add.forward.sqnr_db is not None
    assert add.forward.sqnr_db < 10  # 20000 instead of 50000
