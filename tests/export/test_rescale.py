"""``convert --rescale``: what is written holds no overflow, and computes what the model does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from ampaudit import convert, scan
from ampaudit.core.errors import UsageError
from ampaudit.core.source_config import SourceConfig
from ampaudit.export.config import ConvertConfig
from ampaudit.export.manifest import read_manifest
from ampaudit.export.weights import convert_weights
from ampaudit.source.open import open_source
from tests.support.converted import load, same_bits

WIDTH = 16


class PreNorm(nn.Module):
    """A residual stream of a few hundred thousands."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, 4)
        with torch.no_grad():
            self.down.weight.mul_(1e6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.head(self.last(x))


class PostNorm(PreNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.head(self.last(x + self.down(torch.tanh(self.up(x)))))


def made(kind: type[PreNorm]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return kind().eval(), torch.randn(6, WIDTH)


def decibels(wanted: torch.Tensor, got: torch.Tensor) -> float:
    return float(20 * torch.log10(wanted.norm() / (got.float() - wanted).norm()))


@pytest.mark.parametrize("policy", ["half", "ampaudit"])
def test_the_converted_program_is_right_where_half_overflows(tmp_path: Path, policy: str) -> None:
    model, x = made(PreNorm)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report, result = convert(model, x, tmp_path / "out", policy=policy, rescale=True)
    assert result is not None, report.findings
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    with torch.no_grad():
        assert decibels(model(x), program(x)) > 45
    manifest = read_manifest(tmp_path / "out")
    changes = [note for note in manifest.notes if note.startswith(("rescaled:", "with these weights"))]
    assert len(changes) == 3  # the change, and one eps for each norm
    assert "with these weights, set eps of norm to " in changes[1]
    assert "(it is 1e-05 in the code)" in changes[1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    master = load(tmp_path / "out" / "master.safetensors")
    ratio = master["down.weight"] / before["down.weight"]
    power = float(ratio.flatten()[0])
    assert torch.equal(master["down.weight"], before["down.weight"] * power)
    assert power in (2.0**-n for n in range(3, 9))


def test_a_tuned_model_says_what_was_rescaled(tmp_path: Path) -> None:
    """Its second audit was once reported without."""
    model, x = made(PreNorm)
    report, _ = convert(model, x, tmp_path / "out", rescale=True, tune=40.0)
    assert any(note.startswith("rescaled: ") for note in report.notes), report.notes


class Padded(PreNorm):
    """Keeps rows of padding at zero, by whether the stream is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.head(self.last(x * x.bool()))


def test_an_eps_is_right_where_it_matters(tmp_path: Path) -> None:
    """A norm's eps acts on small values only; those of the example are large."""
    model, x = made(Padded)
    _, result = convert(model, x, tmp_path / "out", policy="ampaudit", rescale=True)
    assert result is not None
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    with torch.no_grad():
        for parameter in (model.stem.bias, model.down.bias, model.up.bias):
            assert parameter is not None
        for scale in (1.0, 1e-3, 1e-6):
            assert decibels(model(x * scale), program(x * scale)) > 45


class Routed(PreNorm):
    """Runs the experts that its input asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.other.weight.mul_(1e6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        for expert in (x[:, 0] < -100).long().unique().tolist():
            h = h + (self.down, self.other)[expert](self.norm(h))
        return self.head(self.last(h))


def test_a_stream_is_not_rescaled_along_one_of_several_paths() -> None:
    model, x = made(Routed)
    report = scan(model, x, policy="half", advise=True)
    assert report.exit_code == 1
    tried = [trial.change for finding in report.findings for trial in finding.tried]
    assert not any("the same function" in text for text in tried), tried


def test_without_the_option_half_is_refused(tmp_path: Path) -> None:
    model, x = made(PreNorm)
    report, result = convert(model, x, tmp_path / "out", policy="half")
    assert result is None
    assert report.exit_code == 1


def test_the_reason_is_in_the_report_where_nothing_is_proved(tmp_path: Path) -> None:
    model, x = made(PostNorm)
    report, result = convert(model, x, tmp_path / "out", policy="half", rescale=True)
    assert result is None
    (note,) = (note for note in report.notes if note.startswith("--rescale"))
    assert note == "--rescale: nothing at down/linear: (top)/tanh reads the stream before a norm"
    assert not (tmp_path / "out").exists()


def test_nothing_to_do_is_said(tmp_path: Path) -> None:
    model, x = made(PreNorm)
    with torch.no_grad():
        model.down.weight.mul_(1e-6)
    _, result = convert(model, x, tmp_path / "out", policy="half", rescale=True, program=False)
    assert result is not None
    assert "--rescale: nothing overflows, so no weight was rescaled" in result.notes
    assert same_bits(load(tmp_path / "out" / "master.safetensors")["stem.weight"], model.stem.weight.data)


def test_a_hugging_face_directory_loads_with_its_new_eps(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=24, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(3e7)
    model.save_pretrained(tmp_path / "hf")
    source = open_source(str(tmp_path / "hf"), SourceConfig())
    _, result = convert(source, None, tmp_path / "out", policy="half", rescale=True, program=False)
    assert result is not None
    eps = json.loads((tmp_path / "out" / "config.json").read_text())["rms_norm_eps"]
    assert eps < config.rms_norm_eps
    assert not any("with these weights" in note for note in result.notes)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    ids = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        wanted, broken, got = model(ids).logits, model.half()(ids).logits, loaded(ids).logits
    assert got.dtype is torch.float16
    assert not broken.isfinite().all()
    assert decibels(wanted, got) > 40


def test_what_has_no_graph_is_refused(tmp_path: Path) -> None:
    model, _ = made(PreNorm)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(UsageError, match="no graph"):
        convert_weights(tmp_path / "weights.pt", tmp_path / "out", ConvertConfig(rescale=True))
