"""Model directories with float8 weights, judged by Transformers' dequantization and by exact arithmetic."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result
from torch import Tensor

from ampaudit.cli.program import main
from ampaudit.core.errors import AuditError, SourceError, WeightsError
from ampaudit.core.source_config import SourceConfig
from ampaudit.source.open import open_source
from ampaudit.source.streamed import notes_on, open_weights, tensors_of

BLOCK = 16
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
E4M3 = torch.float8_e4m3fn
NOTE = "with fp8 weights: dequantized for both runs"


def command(*words: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, [str(word) for word in words])


def error_of(result: Result) -> AuditError:
    assert isinstance(result.exception, AuditError), result.output
    return result.exception


def grid_of(shape: torch.Size, block: int = BLOCK) -> tuple[int, ...]:
    return (*shape[:-2], -(-shape[-2] // block), -(-shape[-1] // block))


def codes(*shape: int) -> Tensor:
    return (torch.randn(shape) * 100).to(E4M3)


def exact(values: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor:
    """Multiply element by element; a product of 4 and 24 bits is exact in float64, and rounded once."""
    made = torch.empty(values.shape, dtype=torch.float64)
    wide, factors = values.double(), scale.double()
    for i in range(values.shape[-2]):
        for j in range(values.shape[-1]):
            made[..., i, j] = wide[..., i, j] * factors[..., i // rows, j // columns]
    return made.float()


def write(directory: Path, tensors: dict[str, Tensor], entry: Any) -> Path:
    """Write weights and a configuration that nothing but its entry is read of."""
    directory.mkdir(exist_ok=True)
    safetensors.torch.save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": entry} if entry else {}))
    return directory


def quantized(directory: Path, *, shards: int = 1) -> Path:
    """Quantize the products of a saved model; with shards, scales are in another file than their weights."""
    state = safetensors.torch.load_file(directory / "model.safetensors")
    files: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    for name, tensor in state.items():
        files[0][name] = tensor
        if tensor.dim() == 2 and "embed" not in name and "lm_head" not in name and "gate.weight" not in name:
            files[0][name] = (tensor * 1000).to(E4M3)
            files[-1][f"{name}_scale_inv"] = torch.rand(grid_of(tensor.shape)) / 1000 + 1e-3
    (directory / "model.safetensors").unlink()
    labels = [f"model-{i}.safetensors" for i in range(shards)] if shards > 1 else ["model.safetensors"]
    for label, tensors in zip(labels, files, strict=True):
        safetensors.torch.save_file(tensors, directory / label, metadata={"format": "pt"})
    if shards > 1:
        index = {name: label for label, part in zip(labels, files, strict=True) for name in part}
        table = {"metadata": {}, "weight_map": index}
        (directory / "model.safetensors.index.json").write_text(json.dumps(table))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    return directory


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of DeepSeek's kind, whose experts are stored one by one; all sizes are whole blocks."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, n_shared_experts=1, n_group=2,
        topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16,
        qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, max_position_embeddings=64,
        tie_word_embeddings=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("deepseek")
    DeepseekV3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def directory(deepseek: Path, tmp_path: Path) -> Callable[..., Path]:
    return lambda **options: quantized(Path(shutil.copytree(deepseek, tmp_path / "hf")), **options)


def dequantized_by_transformers(path: Path) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    kind = FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK), dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=kind)
    state: dict[str, Tensor] = model.state_dict()
    return state


@pytest.mark.parametrize("shards", [1, 2])
def test_the_model_has_the_weights_that_transformers_dequantizes(
    directory: Callable[..., Path], shards: int
) -> None:
    path = directory(shards=shards)
    source = open_source(str(path), SourceConfig())
    expected = dequantized_by_transformers(path)
    assert "model.layers.1.mlp.experts.gate_up_proj" in expected
    found = source.model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is torch.float32
        assert torch.equal(found[name], tensor), name
    assert len(source.notes) == 1
    assert NOTE in source.notes[0]


def test_a_streamed_model_has_the_same_weights(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 64}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **tiny)).save_pretrained(tmp_path)
    path = quantized(tmp_path, shards=2)
    source, expected = open_source(str(path), SourceConfig(stream=True)), dequantized_by_transformers(path)
    assert source.release is not None
    assert NOTE in source.notes[0]
    for name, tensor in source.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_scan_as_typed_says_what_was_dequantized(directory: Callable[..., Path]) -> None:
    path = directory()
    result = command("scan", path, "--policy", "half")
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    stored = safetensors.torch.load_file(path / "model.safetensors")
    count = sum(tensor.dtype is E4M3 for tensor in stored.values())
    assert f"{count} layers {NOTE}; what their quantized kernels compute is not audited" in words


def test_convert_writes_16_bit_weights_that_transformers_loads(
    directory: Callable[..., Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    path, out = directory(shards=2), tmp_path / "out"
    result = command("convert", path, "-o", out, "--policy", "half", "--dtype", "bfloat16", "--no-program")
    assert result.exit_code == 0, result.output
    assert NOTE in result.stdout
    sizes = [sum(f.stat().st_size for f in d.glob("model*.safetensors")) for d in (path, out)]
    assert sizes[0] < sizes[1]
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
    for name, tensor in dequantized_by_transformers(path).items():
        kept = name.endswith("e_score_correction_bias")  # which the class keeps in FP32
        assert loaded[name].dtype is (torch.float32 if kept else torch.bfloat16)
        assert torch.equal(loaded[name].bfloat16(), tensor.bfloat16()), name
    stored = {n for file in out.glob("model*.safetensors") for n in safetensors.torch.load_file(file)}
    assert not [name for name in stored if "scale" in name]


def test_restoring_gives_the_dequantized_weights(directory: Callable[..., Path], tmp_path: Path) -> None:
    path, out, back = directory(), tmp_path / "out", tmp_path / "back"
    assert command("convert", path, "-o", out, "--policy", "half", "--no-program").exit_code == 0
    assert command("convert", out, "-o", back, "--to", "float32").exit_code == 0
    stored, expected = safetensors.torch.load_file(back / "model.safetensors"), tensors_of(open_weights(path))
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())


EXPONENTS = torch.tensor([[120, 127], [126, 130]], dtype=torch.uint8)
GRID = torch.tensor([[0.1, 0.7], [0.013, 3e-4]])
CHANNELS = torch.rand(20, 1) + 0.1


def compressed(**weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


@pytest.mark.parametrize(
    ("entry", "scale_name", "scale", "rows", "columns"),
    [
        (FP8, "weight_scale_inv", GRID, 16, 16),
        (FP8, "weight_scale_inv", GRID.bfloat16(), 16, 16),
        (FP8, "scale", EXPONENTS.view(torch.float8_e8m0fnu), 16, 16),
        (FP8, "qscale_weight", GRID, 16, 16),
        (FP8 | {"weight_block_size": [13, 17]}, "weight_scale_inv", GRID, 13, 17),
        (FP8 | {"weight_block_size": None}, "weight_scale_inv", torch.tensor(0.3), 20, 24),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", torch.tensor([0.3]), 20, 24),
        (FP8 | {"quant_method": "mxfp8"}, "weight_scale_inv", EXPONENTS, 16, 16),
        ({"quant_method": "fbgemm_fp8"}, "weight_scale", CHANNELS, 1, 24),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "weight_scale", torch.tensor(0.3), 20, 24),
        (compressed(strategy="channel"), "weight_scale", CHANNELS.bfloat16(), 1, 24),
        (compressed(strategy="tensor"), "weight_scale", torch.tensor([0.3]).bfloat16(), 20, 24),
        (compressed(strategy="block", block_structure=[16, 16]), "weight_scale", GRID, 16, 16),
        (compressed(strategy="block", block_structure="16x16"), "weight_scale", GRID, 16, 16),
        (None, "weight_scale", CHANNELS, 1, 24),
    ],
)
def test_each_layout_is_multiplied_out_exactly(
    tmp_path: Path, entry: Any, scale_name: str, scale: Tensor, rows: int, columns: int
) -> None:
    """Also blocks that the sizes of a weight, 20 x 24, are no multiples of."""
    values, bias, activations = codes(20, 24), torch.randn(20).bfloat16(), torch.tensor(2.0)
    tensors = {"a.weight": values, f"a.{scale_name}": scale, "a.bias": bias, "a.input_scale": activations}
    checkpoint = open_weights(write(tmp_path, tensors, entry))
    found = tensors_of(checkpoint)
    assert found.keys() == {"a.weight", "a.bias"}
    is_exponent = scale.dtype is torch.uint8
    factors = torch.exp2(scale.double() - 127) if is_exponent else scale.double()
    spread = factors.reshape(1, 1) if factors.numel() == 1 else factors
    assert torch.equal(found["a.weight"], exact(values, spread, rows, columns))
    assert torch.equal(found["a.bias"], bias)
    (part,) = checkpoint.parts
    pieces = [piece.clone() for piece in part.pieces("a.weight")]
    assert torch.equal(torch.cat(pieces), found["a.weight"].reshape(-1))
    assert notes_on(checkpoint) == (f"1 layer {NOTE}; what their quantized kernels compute is not audited",)


@pytest.mark.parametrize("shape", [(32, 48), (3, 32, 48)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.uint8])
def test_one_weight_is_what_transformers_dequantizes(
    tmp_path: Path, shape: tuple[int, ...], kind: torch.dtype
) -> None:
    """Also those of several experts in one tensor."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    values, grid = codes(*shape), grid_of(torch.Size(shape))
    scale = torch.randint(115, 135, grid).to(kind) if kind is torch.uint8 else torch.rand(grid).to(kind)
    name = "a.weight" if len(shape) == 2 else "experts.down_proj"
    path = write(tmp_path, {name: values, f"{name}_scale_inv": scale}, FP8)
    expected = fp8.Fp8Dequantize(None)._dequantize_one(values, scale, output_dtype=torch.float32)
    assert torch.equal(tensors_of(open_weights(path))[name], expected)


def test_zero_points_are_subtracted_first(tmp_path: Path) -> None:
    values, zero = codes(20, 24), torch.full((20, 1), 2.0).to(E4M3)
    tensors = {"a.weight": values, "a.weight_scale": CHANNELS, "a.weight_zero_point": zero}
    found = tensors_of(open_weights(write(tmp_path, tensors, compressed(strategy="channel"))))
    assert found.keys() == {"a.weight"}
    assert torch.equal(found["a.weight"], exact(values.float() - 2, CHANNELS, 1, 24))


def test_the_configuration_of_a_tower_says_the_blocks(tmp_path: Path) -> None:
    values, grid = codes(20, 24), GRID[:, :1].contiguous()
    path = write(tmp_path, {"a.weight": values, "a.weight_scale_inv": grid}, None)
    table = {"text_config": {"quantization_config": FP8 | {"weight_block_size": [15, 32]}}}
    (path / "config.json").write_text(json.dumps(table))
    assert torch.equal(tensors_of(open_weights(path))["a.weight"], exact(values, grid, 15, 32))


def test_float8_without_a_quantization_is_plain_numbers(tmp_path: Path) -> None:
    values = codes(4, 4)
    checkpoint = open_weights(write(tmp_path, {"a.weight": values}, None))
    assert torch.equal(tensors_of(checkpoint)["a.weight"].float(), values.float())
    assert notes_on(checkpoint) == ()


W = codes(20, 24)
PACKED = torch.zeros(20, 3, dtype=torch.int32)
INFINITE = torch.where(GRID > 0.5, torch.inf, GRID)


@pytest.mark.parametrize(
    ("entry", "tensors", "words"),
    [
        (FP8, {"a.weight": W}, r"'a.weight' is in float8, and its scale \(a.weight_scale_inv\) is missing"),
        (FP8, {"a.weight_scale_inv": GRID}, "asks for 'fp8', and no tensor is in float8"),
        (FP8, {"a.weight": W, "a.weight_scale_inv": GRID[:1]}, r"scales of shape \(1, 2\) for values of"),
        (FP8, {"a.weight": W, "a.weight_scale_inv": torch.ones(())}, r"scales of shape \(\) for values"),
        (FP8, {"a.weight": W, "a.weight_scale_inv": torch.ones(20, 24)}, r"scales of shape \(20, 24\)"),
        (FP8, {"a.weight": W[0], "a.weight_scale_inv": torch.ones(2)}, r"scales of shape \(2,\)"),
        ({"quant_method": "fp8"}, {"a.weight": W, "a.weight_scale": torch.ones(40, 24)}, r"shape \(40, 24\)"),
        (FP8, {"a.weight": W, "a.weight_scale_inv": INFINITE}, "'a.weight_scale_inv', .* NaN or infinity"),
        (
            FP8 | {"scale_fmt": "ue8m0"},
            {"a.weight": W, "a.weight_scale_inv": torch.full((2, 2), 255, dtype=torch.uint8)},
            "NaN or infinity",
        ),
        (
            FP8,
            {"a.weight": W.view(torch.int8), "a.weight_scale_inv": GRID},
            "'a.weight' is stored in I8; only",
        ),
        (
            compressed(),
            {"a.weight_packed": PACKED, "a.weight_scale": CHANNELS},
            "'a.weight_packed' is stored",
        ),
        (
            compressed(),
            {"a.weight": W, "a.weight_scale": CHANNELS, "a.weight_g_idx": PACKED[0]},
            "it is not known how 'a.weight' is stored with 'a.weight_g_idx'",
        ),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, {"a.weight": W}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": 128}, {"a.weight": W}, "weight_block_size"),
        ({"quant_method": "awq", "bits": 4}, {"a.qweight": PACKED}, "asks for a quantization, 'awq'; only"),
    ],
)
def test_what_cannot_be_dequantized_is_refused(
    tmp_path: Path, entry: Any, tensors: dict[str, Tensor], words: str
) -> None:
    with pytest.raises((WeightsError, SourceError), match=words) as caught:
        tensors_of(open_weights(write(tmp_path, tensors, entry)))
    assert caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "mxfp4", None])
@pytest.mark.parametrize("word", ["scan", "convert"])
def test_other_quantizations_are_refused_with_what_to_do(
    deepseek: Path, tmp_path: Path, method: str | None, word: str
) -> None:
    path = Path(shutil.copytree(deepseek, tmp_path / "hf"))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    (path / "config.json").write_text(json.dumps(config))
    output = ["-o", str(tmp_path / "out")] if word == "convert" else []
    error = error_of(command(word, path, *output))
    assert f"asks for a quantization, {str(method)!r}; only float8 weights of compressed" in str(error)
    assert error.hint.startswith("pass --trust to scan it with its package")
    assert not (tmp_path / "out").exists()


def test_a_missing_scale_is_refused_as_typed(directory: Callable[..., Path]) -> None:
    path = directory()
    state = safetensors.torch.load_file(path / "model.safetensors")
    del state["model.layers.0.mlp.up_proj.weight_scale_inv"]
    safetensors.torch.save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    error = error_of(command("scan", path))
    assert "'model.layers.0.mlp.up_proj.weight' is in float8, and its scale" in str(error)
